"""The GRPO objective (the paper's appendix "GRPO Optimization Objective").

Advantages are group-relative. The loss is a weighted sum over tokens; with the
weights of `token_weights` it is the paper's mean over trajectories of the mean
over each one's model tokens. A sum neither knows nor cares which tokens share
a row or a micro-batch, so packing and accumulation leave it as it is.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib

KL_ESTIMATORS = ("k1", "k2", "k3")


class TokenTerms(NamedTuple):
  """Per-token terms of the objective, all of the shape of the tokens.

  policy_loss: the negated clipped surrogate. kl: the KL estimate, unweighted.
  ratio: importance ratio to the behaviour policy. clipped: bool, the clip
  holds the token, whose policy gradient is 0.
  """

  policy_loss: chex.Array
  kl: chex.Array
  ratio: chex.Array
  clipped: chex.Array


@functools.partial(jax.jit, static_argnames=("epsilon", "normalize_std"))
def advantages(
  total: chex.Array,
  valid: chex.Array,
  *,
  epsilon: float,
  normalize_std: bool,
) -> chex.Array:
  """Rewards standardised in their group (Eq. 11).

  Args:
    total: `[..., G]` rewards.
    valid: bool `[..., G]`; mean and standard deviation are over the valid.
    epsilon: epsilon_0, added to the population standard deviation.
    normalize_std: False leaves the division out.

  Returns:
    float32 `[..., G]`: exactly 0 where not valid, and throughout a group whose
    valid rewards are equal or fewer than two.
  """
  chex.assert_equal_shape([total, valid])
  chex.assert_type(valid, bool)
  total = jnp.where(valid, jnp.asarray(total, float), 0)
  # Measured from the group's least reward, equal rewards are exact zeros and
  # so are their mean and spread: no rounding is left to divide by epsilon.
  least = jnp.min(total, -1, where=valid, initial=jnp.inf, keepdims=True)
  shifted = jnp.where(valid, total - least, 0)
  count = jnp.maximum(jnp.sum(valid, -1, keepdims=True), 1)
  mean = jnp.sum(shifted, -1, keepdims=True) / count
  centred = jnp.where(valid, shifted - mean, 0)
  if not normalize_std:
    return centred
  std = jnp.sqrt(jnp.sum(centred**2, -1, keepdims=True) / count)
  return centred / (std + epsilon)


def kl_estimate(
  logp_t: chex.Array, reference_logp_t: chex.Array, *, estimator: str
) -> chex.Array:
  """Per-token estimate of KL(policy || reference).

  k1 is the paper's formula, k3 the low-variance one, k2 half the square; see
  http://joschu.net/blog/kl-approx.html.

  Args:
    logp_t: float, log-probability of each token under the policy.
    reference_logp_t: the same under the reference, equal shape.
    estimator: one of `KL_ESTIMATORS`.

  Returns:
    The estimate, same shape; gradients flow through both arguments.

  Raises:
    ValueError: an unknown estimator.
  """
  chex.assert_equal_shape([logp_t, reference_logp_t])
  log_ratio = reference_logp_t - logp_t
  match estimator:
    case "k1":
      return -log_ratio
    case "k2":
      return 0.5 * log_ratio**2
    case "k3":
      return jnp.expm1(log_ratio) - log_ratio
  raise ValueError(
    f"Found kl_estimator {estimator!r}; expected one of "
    f"{', '.join(KL_ESTIMATORS)}."
  )


def token_terms(
  logp_t: chex.Array,
  behaviour_logp_t: chex.Array,
  reference_logp_t: chex.Array,
  advantage_t: chex.Array,
  *,
  config: config_lib.ObjectiveConfig,
) -> TokenTerms:
  """The terms of Eq. 12 for each token.

    policy_loss = -min(r A, clip(r, 1 - low, 1 + high) A),  r = pi / pi_old

  Args:
    logp_t: float, log-probabilities under the policy being trained.
    behaviour_logp_t: under the policy that sampled the token, equal shape.
    reference_logp_t: under the reference policy, equal shape.
    advantage_t: the advantage of the token's trajectory, equal shape.
    config: clip range and KL estimator.

  Returns:
    The terms, elementwise.

  Raises:
    ValueError: an unknown `config.kl_estimator`.
  """
  tokens = [logp_t, behaviour_logp_t, reference_logp_t, advantage_t]
  chex.assert_equal_shape(tokens)
  chex.assert_type(tokens, float)
  ratio_t = jnp.exp(logp_t - behaviour_logp_t)
  low, high = 1 - config.clip_low, 1 + config.clip_high
  clipped_t = ((advantage_t > 0) & (ratio_t > high)) | (
    (advantage_t < 0) & (ratio_t < low)
  )
  # The minimum as a choice: the gradient of `minimum` and `clip` at a tie is
  # halved, here it is that of the branch taken.
  bound_t = jnp.where(advantage_t > 0, high, low).astype(ratio_t.dtype)
  surrogate_t = jnp.where(clipped_t, bound_t, ratio_t) * advantage_t
  kl_t = kl_estimate(logp_t, reference_logp_t, estimator=config.kl_estimator)
  return TokenTerms(-surrogate_t, kl_t, ratio_t, clipped_t)


def token_weights(
  model_mask: chex.Array, valid: chex.Array, *, num_valid: chex.Numeric
) -> chex.Array:
  """Weights that make a sum over tokens Eq. 12's double mean.

  Args:
    model_mask: bool `[B, T]`, one trajectory a row, True on model tokens.
    valid: bool `[B]`, False for an episode that failed.
    num_valid: valid trajectories of the whole optimizer step, over every
      micro-batch and device.

  Returns:
    float32 `[B, T]`, 1 / (|tau| num_valid) on the model tokens of valid rows.
  """
  chex.assert_rank([model_mask, valid], [2, 1])
  chex.assert_equal_shape_prefix([model_mask, valid], 1)
  chex.assert_type([model_mask, valid], bool)
  lengths = jnp.sum(model_mask, -1, keepdims=True)
  per_token = 1 / (jnp.maximum(lengths, 1) * jnp.maximum(num_valid, 1))
  return jnp.where(model_mask & valid[:, None], per_token, 0)


def grpo_loss(
  logp: chex.Array,
  behaviour_logp: chex.Array,
  reference_logp: chex.Array,
  advantage: chex.Array,
  weight: chex.Array,
  *,
  config: config_lib.ObjectiveConfig,
) -> tuple[chex.Array, dict[str, chex.Array]]:
  """The loss of a micro-batch: the negative of Eq. 12, to be minimised.

    loss = sum weight (policy_loss + beta_KL kl)

  Args:
    logp: float, log-probabilities under the policy being trained.
    behaviour_logp: under the policy that sampled the tokens, equal shape.
    reference_logp: under the reference policy, equal shape.
    advantage: the advantage of each token's trajectory, equal shape.
    weight: see `token_weights`, equal shape. Where it is 0 the other arrays
      may hold anything, NaN included, and `logp` gets a gradient of exactly 0.
    config: clip range, KL estimator and its coefficient.

  Returns:
    The scalar loss, and metrics: `policy_loss`, `kl`, `ratio`, `clip_fraction`
    and `logp_difference` (|log pi - log pi_old|), means over the optimizer step
    once summed over its micro-batches; and `logp_difference_max`, a maximum.

  Raises:
    ValueError: an unknown `config.kl_estimator`.
  """
  tokens = [logp, behaviour_logp, reference_logp, advantage, weight]
  chex.assert_equal_shape(tokens)
  chex.assert_type(tokens, float)
  # Garbage is replaced before the maths, not only after it: the derivative of
  # a value that `where` drops is multiplied by 0, and 0 * inf is NaN.
  live = weight > 0
  logp, behaviour_logp, reference_logp, advantage = (
    jnp.where(live, x, 0) for x in tokens[:-1]
  )
  terms = token_terms(
    logp, behaviour_logp, reference_logp, advantage, config=config
  )

  def mean(values: chex.Array) -> chex.Array:
    return jnp.sum(weight * values)

  policy_loss, kl = mean(terms.policy_loss), mean(terms.kl)
  difference = jnp.abs(logp - behaviour_logp)
  metrics = {
    "policy_loss": policy_loss,
    "kl": kl,
    "ratio": mean(terms.ratio),
    "clip_fraction": mean(terms.clipped),
    "logp_difference": mean(difference),
    "logp_difference_max": jnp.max(difference, initial=0),
  }
  return policy_loss + config.kl_coefficient * kl, metrics
