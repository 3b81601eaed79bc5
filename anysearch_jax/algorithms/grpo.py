"""The GRPO objective (the paper's appendix "GRPO Optimization Objective").

Advantages are group-relative. The loss is a weighted sum over tokens. With the
weights of `token_weights` it equals the paper's mean over trajectories of the
mean over each one's model tokens, or the mean over all model tokens. A sum does
not depend on which tokens share a row or a micro-batch, so packing and gradient
accumulation do not change it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings

KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl")
REDUCTIONS = ("sequence-mean", "token-mean")
NORMALIZERS = ("group", "batch", "none")
DEVIATIONS = ("population", "sample")
# Edges of a histogram in nats, eight per decade. Counts of the tokens beyond
# each edge can be summed over micro-batches and devices; quantiles cannot.
GAP_EDGES = tuple(10 ** (i / 8) for i in range(-48, 17))


# The largest log-ratio that is exponentiated. `exp` overflows float32 at 88.7,
# and one such token makes the gradient of the whole step NaN. The bound is that
# of verl,
# https://github.com/volcengine/verl/blob/main/verl/trainer/ppo/core_algos.py.
# verl also clamps k3 itself to 10, as `low_var_kl` does. `k3` does not, because
# the penalty loses its gradient wherever the reference gives a token 14 times
# the policy's probability. Healthy runs reach that, but not a log-ratio of 20.
_MAX_LOG_RATIO = 20.0
_MAX_LOW_VAR_KL = 10.0


class TokenTerms(NamedTuple):
  """Per-token terms of the objective, all of the shape of the tokens.

  Attributes:
    policy_loss: the negated clipped surrogate.
    kl: the KL estimate, unweighted.
    ratio: importance ratio to the old policy.
    clipped_low, clipped_high: bool, whether this side of the clip is active, so
      that the token's policy gradient is 0.
    capped: bool, whether `importance_cap` bounds the ratio, which makes the
      gradient 0 too.
  """

  policy_loss: chex.Array
  kl: chex.Array
  ratio: chex.Array
  clipped_low: chex.Array
  clipped_high: chex.Array
  capped: chex.Array


@functools.partial(
  jax.jit, static_argnames=("epsilon", "normalize", "deviation")
)
def advantages(
  total: chex.Array,
  valid: chex.Array,
  *,
  epsilon: float,
  normalize: str,
  deviation: str = "population",
) -> chex.Array:
  """Centres rewards in their group and divides by a deviation (Eq. 11).

    A = (R - mean of the group) / (deviation + epsilon)

  The choice of the deviation sets the price of a search, docs/objective.md.

  Args:
    total: `[..., G]` rewards, of a whole rollout if `normalize` is `batch`.
    valid: bool `[..., G]`; means and deviations are those of the valid rewards.
    epsilon: epsilon_0, added to the standard deviation.
    normalize: `group`, the deviation of the group's rewards (the paper's);
      `batch`, the root mean square of R - mean over all groups; `none`, a
      divisor of exactly 1.
    deviation: whether squares are averaged over n rewards (`population`) or
      over n - 1 (`sample`, as torch.std).

  Returns:
    float32 `[..., G]` advantages. They are exactly 0 where not valid, and in
    the whole group if its valid rewards are equal or fewer than two.

  Raises:
    ValueError: `normalize` or `deviation` is unknown.
  """
  chex.assert_equal_shape([total, valid])
  chex.assert_type(valid, bool)
  total = jnp.where(valid, jnp.asarray(total, float), 0)
  # After subtracting the group's smallest reward, equal rewards are exact
  # zeros, and so are their mean and spread. Otherwise rounding errors, divided
  # by the small epsilon, would become advantages.
  least = jnp.min(total, -1, where=valid, initial=jnp.inf, keepdims=True)
  shifted = jnp.where(valid, total - least, 0)
  settings.require("deviation", deviation, DEVIATIONS)
  count = jnp.sum(valid, -1, keepdims=True)
  mean = jnp.sum(shifted, -1, keepdims=True) / jnp.maximum(count, 1)
  centred = jnp.where(valid, shifted - mean, 0)
  match normalize:
    case "group":
      squares = jnp.sum(centred**2, -1, keepdims=True)
    case "batch":
      squares = jnp.sum(centred**2)
      count = jnp.sum(valid)
    case "none":
      return centred
    case _:
      raise settings.unknown("normalize", normalize, NORMALIZERS)
  if deviation == "sample":
    count = count - 1
  variance = squares / jnp.maximum(count, 1)
  return centred / (jnp.sqrt(variance) + epsilon)


def kl_estimate(
  logp_t: chex.Array, reference_logp_t: chex.Array, *, estimator: str
) -> chex.Array:
  """Returns a per-token estimate of KL(policy || reference).

  k1 is the paper's formula, k2 is half the squared log-ratio, and k3 is the
  unbiased low-variance estimate; see http://joschu.net/blog/kl-approx.html. k3
  clamps the log-ratio to [-20, 20] and has no gradient beyond. low_var_kl is
  verl's: k3 up to 10, and 10 without a gradient beyond.

  Args:
    logp_t: float, log-probability of each token under the policy.
    reference_logp_t: the same under the reference, equal shape.
    estimator: one of `KL_ESTIMATORS`.

  Returns:
    The estimate, same shape; gradients flow through both arguments.

  Raises:
    ValueError: the estimator is unknown.
  """
  chex.assert_equal_shape([logp_t, reference_logp_t])
  log_ratio = reference_logp_t - logp_t
  match estimator:
    case "k1":
      return -log_ratio
    case "k2":
      return 0.5 * log_ratio**2
    case "k3" | "low_var_kl":
      far = jnp.abs(log_ratio) > _MAX_LOG_RATIO
      log_ratio = _near(reference_logp_t, logp_t) - logp_t
      k3 = jnp.expm1(log_ratio) - log_ratio
      if estimator == "low_var_kl":
        far |= k3 > _MAX_LOW_VAR_KL
        k3 = jnp.where(k3 > _MAX_LOW_VAR_KL, _MAX_LOW_VAR_KL, k3)
      return jnp.where(far, jax.lax.stop_gradient(k3), k3)
  raise settings.unknown("kl_estimator", estimator, KL_ESTIMATORS)


def token_terms(
  logp_t: chex.Array,
  old_logp_t: chex.Array,
  reference_logp_t: chex.Array,
  advantage_t: chex.Array,
  *,
  config: config_lib.ObjectiveConfig,
) -> TokenTerms:
  """Returns the terms of Eq. 12 for each token.

    policy_loss = -min(r A, clip(r, 1 - low, 1 + high) A),  r = pi / pi_old

  log r is clamped to [-20, 20]; above 20 it has no gradient. Where A < 0, that
  minimum has no bound. With `old_logp` `engine`, r counts as `importance_cap`
  beyond it (dual clip, Eq. 5 of https://arxiv.org/abs/1912.09729).

  Args:
    logp_t: float, log-probabilities under the policy being trained.
    old_logp_t: under the old policy, equal shape.
    reference_logp_t: under the reference policy, equal shape.
    advantage_t: the advantage of the token's trajectory, equal shape.
    config: clip range, importance cap and KL estimator.

  Raises:
    ValueError: `config.kl_estimator` is unknown.
  """
  tokens = [logp_t, old_logp_t, reference_logp_t, advantage_t]
  chex.assert_equal_shape(tokens)
  chex.assert_type(tokens, float)
  ratio_t = jnp.exp(logp_t - _near(old_logp_t, logp_t))
  far_t = logp_t - old_logp_t > _MAX_LOG_RATIO
  low = 1 - config.clip_low
  high = 1 + config.clip_high
  clipped_low_t = (advantage_t < 0) & (ratio_t < low)
  clipped_high_t = (advantage_t > 0) & (ratio_t > high)
  # The minimum is written as a choice of branches, because the gradients of
  # `jnp.minimum` and `jnp.clip` at a tie are halved. A ratio exactly on the
  # edge of the clip keeps its gradient here.
  bound_t = jnp.where(advantage_t > 0, high, low).astype(ratio_t.dtype)
  clipped_t = clipped_low_t | clipped_high_t
  capped_t = jnp.zeros_like(clipped_t)
  if config.old_logp == "engine" and (cap := config.importance_cap):
    capped_t = (advantage_t < 0) & (ratio_t > cap)
    bound_t = jnp.where(capped_t, cap, bound_t)
    clipped_t |= capped_t
  bound_t = jnp.where(clipped_t, bound_t, jax.lax.stop_gradient(ratio_t))
  surrogate_t = jnp.where(clipped_t | far_t, bound_t, ratio_t) * advantage_t
  kl_t = kl_estimate(logp_t, reference_logp_t, estimator=config.kl_estimator)
  return TokenTerms(
    policy_loss=-surrogate_t,
    kl=kl_t,
    ratio=ratio_t,
    clipped_low=clipped_low_t,
    clipped_high=clipped_high_t,
    capped=capped_t,
  )


def _near(logp_t: chex.Array, to_t: chex.Array) -> chex.Array:
  """Returns `logp_t` clamped to within `_MAX_LOG_RATIO` of `to_t`.

  This clamps one operand and not the difference of both. A clamp in the middle
  of the backward pass would change which operations XLA fuses, and thereby the
  last bit of gradients that the clamp does not affect.
  """
  to_t = jax.lax.stop_gradient(to_t)
  return jnp.clip(logp_t, to_t - _MAX_LOG_RATIO, to_t + _MAX_LOG_RATIO)


def token_weights(
  masks: Sequence[np.ndarray], *, reduction: str
) -> list[np.ndarray]:
  """Returns weights with which a sum over tokens is the mean over a step.

  Args:
    masks: bool `[T]` of each valid trajectory of the optimizer step, over all
      micro-batches and devices; True on model tokens.
    reduction: `sequence-mean`, Eq. 12's double mean: a model token weighs
      1 / (its trajectory's model tokens * trajectories). `token-mean`: 1 /
      model tokens of the step.

  Returns:
    float32 `[T]` each; 0 off the model's tokens.

  Raises:
    ValueError: the reduction is unknown.
  """
  counts = [int(np.sum(mask)) for mask in masks]
  match reduction:
    case "sequence-mean":
      denominators = [count * len(masks) for count in counts]
    case "token-mean":
      denominators = [sum(counts)] * len(masks)
    case _:
      raise settings.unknown("reduction", reduction, REDUCTIONS)
  return [
    (mask / max(denominator, 1)).astype(np.float32)
    for mask, denominator in zip(masks, denominators)
  ]


def grpo_loss(
  logp: chex.Array,
  behaviour_logp: chex.Array,
  reference_logp: chex.Array,
  advantage: chex.Array,
  weight: chex.Array,
  *,
  old_logp: chex.Array | None = None,
  config: config_lib.ObjectiveConfig,
) -> tuple[chex.Array, dict[str, chex.Array]]:
  """Returns the loss of a micro-batch: the negative of Eq. 12, to be minimised.

    loss = sum weight (importance policy_loss + beta_KL kl)
    importance = min(pi_old / pi_behaviour, cap), 1 where the cap is 0 or
    pi_old is pi_behaviour

  Args:
    logp: float, log-probabilities under the policy being trained.
    behaviour_logp: under the policy that sampled the tokens, equal shape.
    reference_logp: under the reference policy, equal shape.
    advantage: the advantage of each token's trajectory, equal shape.
    weight: see `token_weights`, equal shape. Where it is 0 the other arrays
      may hold anything, NaN included, and `logp` gets a gradient of exactly 0.
    old_logp: under the policy in the denominator of the ratio, equal shape;
      None: `behaviour_logp`. No gradient flows into either.
    config: clip range, KL estimator and its coefficient, importance cap.

  Returns:
    The scalar loss, and metrics of three sorts:

    * Sums over micro-batches of these are means over the optimizer step:
      `policy_loss`, `kl`, `ratio`, `clip_fraction` and its two sides
      `clip_fraction_low` and `clip_fraction_high`, `logp_difference`
      (|log pi - log pi_behaviour|), `behaviour_kl` (k3 estimate of
      KL(behaviour || policy)) and, with a cap, `importance` and
      `importance_capped` (the share of tokens whose weight is capped).
    * Maxima: `ratio_max` and `logp_difference_max`.
    * Sums: `logp_difference_counts`, the number of tokens, then for each of
      `GAP_EDGES` the number of tokens whose difference is larger.

  Raises:
    ValueError: `config.kl_estimator` is unknown.
  """
  if old_logp is None:
    old_logp = behaviour_logp
  tokens = [logp, behaviour_logp, old_logp, reference_logp, advantage, weight]
  chex.assert_equal_shape(tokens)
  chex.assert_type(tokens, float)
  # Inputs of weight 0 are replaced before the computation. Masking only its
  # result would multiply their derivatives by 0, and 0 * inf is NaN. See
  # "Gradients contain NaN where using where" in the FAQ of JAX,
  # https://docs.jax.dev/en/latest/faq.html.
  live = weight > 0
  logp, behaviour_logp, old_logp, reference_logp, advantage = (
    jnp.where(live, x, 0) for x in tokens[:-1]
  )
  behaviour_logp, old_logp = jax.lax.stop_gradient((behaviour_logp, old_logp))
  terms = token_terms(logp, old_logp, reference_logp, advantage, config=config)

  def mean(values: chex.Array) -> chex.Array:
    return jnp.sum(weight * values)

  def maximum(values: chex.Array) -> chex.Array:
    return jnp.max(values, where=live, initial=0)

  policy_loss = terms.policy_loss
  metrics = {}
  if config.importance_cap and config.old_logp == "engine":
    metrics = {"importance_capped": mean(terms.capped)}
  elif config.importance_cap:
    drift = jnp.exp(old_logp - behaviour_logp)
    importance = jnp.minimum(drift, config.importance_cap)
    policy_loss = importance * policy_loss
    metrics = {
      "importance": mean(importance),
      "importance_capped": mean(drift > config.importance_cap),
    }
  policy_loss = mean(policy_loss)
  kl = mean(terms.kl)
  low = mean(terms.clipped_low)
  high = mean(terms.clipped_high)
  difference = jnp.abs(logp - behaviour_logp)
  edges = jnp.array((-1.0, *GAP_EDGES))  # The first one counts every token.
  beyond = live[..., None] & (difference[..., None] > edges)
  metrics |= {
    "policy_loss": policy_loss,
    "kl": kl,
    "ratio": mean(terms.ratio),
    "ratio_max": maximum(terms.ratio),
    "clip_fraction": low + high,
    "clip_fraction_low": low,
    "clip_fraction_high": high,
    "logp_difference": mean(difference),
    "logp_difference_max": maximum(difference),
    "logp_difference_counts": jnp.sum(
      beyond, tuple(range(live.ndim)), dtype=jnp.float32
    ),
    "behaviour_kl": mean(kl_estimate(behaviour_logp, logp, estimator="k3")),
  }
  return policy_loss + config.kl_coefficient * kl, metrics
