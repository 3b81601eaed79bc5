"""The parts of PPO beyond the GRPO objective: a critic's advantages and loss.

Generalized advantage estimation (Schulman et al. 2015b,
https://arxiv.org/abs/1506.02438) takes the tokens that the model wrote as
steps. Tokens of the environment between two of them are part of the state in
which the second one is sampled, so they have no discount, reward or value. The
policy's loss is `grpo.grpo_loss` with these advantages.
"""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp


@jax.jit
def gae(
  reward: chex.Array,
  value: chex.Array,
  mask: chex.Array,
  segment_ids: chex.Array,
  *,
  gamma: float,
  lam: float,
) -> tuple[chex.Array, chex.Array]:
  """Returns advantages and returns of the model's tokens in packed rows.

    delta_t = r_t + gamma V_t+1 - V_t,  A_t = delta_t + gamma lam A_t+1

  Here t + 1 is the next token that the model wrote in the same segment. After
  the last one V and A are 0, because the episode ends there and is not
  bootstrapped.

  Args:
    reward: float `[..., T]`, reward of each token.
    value: float `[..., T]`, value of the state in which each token was sampled.
    mask: bool `[..., T]`, True on the model's tokens. Elsewhere reward and
      value may hold anything, NaN included.
    segment_ids: int `[..., T]`, equal for consecutive tokens of a trajectory.
    gamma: discount.
    lam: 0 is the one-step temporal difference, 1 the Monte Carlo return.

  Returns:
    Advantages and returns (advantage + value), float32 `[..., T]`; 0 where the
    mask is False.
  """
  chex.assert_equal_shape([reward, value, mask, segment_ids])
  chex.assert_type(mask, bool)
  reward, value = (
    jnp.where(mask, x, 0).astype(jnp.float32) for x in (reward, value)
  )
  goes_on = segment_ids == _shifted(segment_ids, fill=-1)
  # At each position: the value of the segment's next model token, which may be
  # this one.
  ahead = _backwards(value, goes_on & ~mask)
  delta = reward + gamma * jnp.where(goes_on, _shifted(ahead), 0) - value
  advantage = _backwards(
    jnp.where(mask, delta, 0), jnp.where(mask, gamma * lam, 1) * goes_on
  )
  advantage = jnp.where(mask, advantage, 0)
  return advantage, advantage + value


def _shifted(x: chex.Array, fill: float = 0) -> chex.Array:
  """Shifts the last axis by one: position t gets the value of t + 1."""
  last = jnp.full_like(x[..., :1], fill)
  return jnp.concatenate([x[..., 1:], last], -1)


def _backwards(x: chex.Array, keep: chex.Array) -> chex.Array:
  """Returns y with y_t = x_t + keep_t y_t+1 over the last axis.

  The recurrence is a composition of affine maps, which is associative, so a
  parallel scan needs log T sequential steps in place of T
  (https://www.cs.cmu.edu/~guyb/papers/Ble93.pdf).
  """

  def join(later, earlier):
    return earlier[0] + earlier[1] * later[0], earlier[1] * later[1]

  parts = (x, keep.astype(x.dtype))
  last = x.ndim - 1
  return jax.lax.associative_scan(join, parts, reverse=True, axis=last)[0]


@jax.jit
def whiten(advantage: Any, mask: Any) -> Any:
  """Normalises to mean 0 and variance 1 over all positions in `mask`.

  `advantage` is a tree of float arrays, the advantages of one rollout, and
  `mask` the same tree, bool. So is the result; it is 0 where the mask is False,
  and everywhere if all advantages are equal.
  """
  # Subtracting the smallest makes equal advantages exact zeros, as in
  # `grpo.advantages`.
  least = jax.tree.reduce(
    jnp.minimum,
    jax.tree.map(
      lambda x, m: jnp.min(x, where=m, initial=jnp.inf), advantage, mask
    ),
  )

  def total(tree: Any) -> chex.Array:
    return sum(jnp.sum(x) for x in jax.tree.leaves(tree))

  count = jnp.maximum(total(mask), 1)
  shifted = jax.tree.map(
    lambda x, m: jnp.where(m, x - least, 0), advantage, mask
  )
  mean = total(shifted) / count
  centred = jax.tree.map(lambda x, m: jnp.where(m, x - mean, 0), shifted, mask)
  variance = total(jax.tree.map(jnp.square, centred)) / count
  return jax.tree.map(lambda x: x * jax.lax.rsqrt(variance + 1e-8), centred)


def value_loss(
  value: chex.Array,
  old_value: chex.Array,
  returns: chex.Array,
  weight: chex.Array,
  *,
  clip: float,
) -> tuple[chex.Array, dict[str, chex.Array]]:
  """Returns the critic's loss of a micro-batch.

    loss = sum weight max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2

  Args:
    value: float, the critic's value of the state in which each token was
      sampled.
    old_value: the same before the rollout's first step, equal shape.
    returns: targets of the values, equal shape.
    weight: see `grpo.token_weights`, equal shape. Where it is 0 the other
      arrays may hold anything, and `value` gets a gradient of exactly 0.
    clip: c; 0 means no clip.

  Returns:
    The scalar loss, and metrics to be summed over an optimizer step's
    micro-batches: `loss`, `mean` of the values, `clip_fraction` (the share of
    tokens where the clip is active, so that the gradient is 0) and the
    arguments of `explained_variance`.
  """
  tokens = [value, old_value, returns, weight]
  chex.assert_equal_shape(tokens)
  chex.assert_type(tokens, float)
  live = weight > 0
  value, old_value, returns = (jnp.where(live, x, 0) for x in tokens[:-1])
  old_value, returns = jax.lax.stop_gradient((old_value, returns))
  error = jnp.square(value - returns)
  is_clipped = jnp.zeros_like(live)
  if clip:
    moved = value - old_value
    near = old_value + jnp.clip(moved, -clip, clip)
    clipped = jax.lax.stop_gradient(jnp.square(near - returns))
    # Inside the clip both errors are equal up to rounding. The first condition
    # keeps rounding from zeroing the gradient there.
    is_clipped = (jnp.abs(moved) > clip) & (clipped > error)
    error = jnp.where(is_clipped, clipped, error)

  def mean(values: chex.Array) -> chex.Array:
    return jnp.sum(weight * values)

  loss = 0.5 * mean(error)
  residual = returns - value
  return loss, {
    "loss": loss,
    "mean": mean(value),
    "clip_fraction": mean(is_clipped),
    "weight": jnp.sum(weight),
    "returns": mean(returns),
    "returns_squared": mean(jnp.square(returns)),
    "residual": mean(residual),
    "residual_squared": mean(jnp.square(residual)),
  }


def explained_variance(
  weight: float,
  returns: float,
  returns_squared: float,
  residual: float,
  residual_squared: float,
) -> float:
  """Returns 1 - Var(returns - values) / Var(returns).

  It is 1 for a perfect critic, and 0 for a constant one or if the returns do
  not vary.

  Args:
    weight, returns, returns_squared, residual, residual_squared: sums over a
      step of the metrics of these names that `value_loss` returns.
  """

  def variance(mean: float, square: float) -> float:
    return max(square / weight - (mean / weight) ** 2, 0.0)

  spread = variance(returns, returns_squared) if weight else 0.0
  # A smaller difference of float32 sums of squares is rounding error.
  if spread < 1e-6:
    return 0.0
  return 1 - variance(residual, residual_squared) / spread
