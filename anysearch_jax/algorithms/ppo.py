"""What PPO adds to the objective: advantages by a critic, and its loss.

Generalized advantage estimation (Schulman et al. 2015b) over the tokens that
the model wrote: they are the steps. What the environment writes between two of
them is part of the state that the second one is sampled in, so no discount, no
reward and no value falls on it. The policy's loss is `objective.grpo_loss` by
these advantages.
"""

from __future__ import annotations

import functools
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
  """Advantages and returns of the model's tokens in packed rows.

    delta_t = r_t + gamma V_t+1 - V_t,  A_t = delta_t + gamma lam A_t+1

  where t + 1 is the next token that the model wrote in the same segment; after
  the last one V and A are 0: an episode ends there, nothing is bootstrapped.

  Args:
    reward: float `[..., T]`, of each token.
    value: float `[..., T]`, of the state that each token was sampled in.
    mask: bool `[..., T]`, True on the model's tokens. Elsewhere reward and
      value may hold anything, NaN included.
    segment_ids: int `[..., T]`, consecutive tokens of one trajectory.
    gamma: discount.
    lam: 0 is one step ahead, 1 the whole rest.

  Returns:
    Advantages and returns (advantage + value), float32 `[..., T]`, 0 off mask.
  """
  chex.assert_equal_shape([reward, value, mask, segment_ids])
  chex.assert_type(mask, bool)
  reward, value = (
    jnp.where(mask, x, 0).astype(jnp.float32) for x in (reward, value)
  )
  goes_on = segment_ids == _shifted(segment_ids, fill=-1)
  # The value of the first of the model's tokens from here on.
  ahead = _backwards(value, goes_on & ~mask)
  delta = reward + gamma * jnp.where(goes_on, _shifted(ahead), 0) - value
  advantage = _backwards(
    jnp.where(mask, delta, 0), jnp.where(mask, gamma * lam, 1) * goes_on
  )
  advantage = jnp.where(mask, advantage, 0)
  return advantage, advantage + value


def _shifted(x: chex.Array, fill: float = 0) -> chex.Array:
  """What stands one place later."""
  last = jnp.full_like(x[..., :1], fill)
  return jnp.concatenate([x[..., 1:], last], -1)


def _backwards(x: chex.Array, keep: chex.Array) -> chex.Array:
  """y with y_t = x_t + keep_t y_t+1 over the last axis."""

  def join(later, earlier):
    return earlier[0] + earlier[1] * later[0], earlier[1] * later[1]

  parts = (x, keep.astype(x.dtype))
  last = x.ndim - 1
  return jax.lax.associative_scan(join, parts, reverse=True, axis=last)[0]


@jax.jit
def whiten(advantage: Any, mask: Any) -> Any:
  """Mean 0 and variance 1 over all that `mask` holds.

  Args:
    advantage: a tree of float arrays, those of one rollout.
    mask: bool, the same tree.

  Returns:
    The same tree, 0 off mask; all 0 where the advantages are equal.
  """
  # Measured from the least, as `objective.advantages`: equal ones are zeros.
  least = functools.reduce(
    jnp.minimum,
    [
      jnp.min(x, where=m, initial=jnp.inf)
      for x, m in zip(*map(jax.tree.leaves, (advantage, mask)), strict=True)
    ],
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
  """The critic's loss of a micro-batch.

    loss = sum weight max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2

  Args:
    value: float, the critic's, of the state that each token was sampled in.
    old_value: the same before the rollout's first step, equal shape.
    returns: what the values are to be, equal shape.
    weight: see `objective.token_weights`, equal shape. Where it is 0 the other
      arrays may hold anything, and `value` gets a gradient of exactly 0.
    clip: c; 0 leaves the clip out.

  Returns:
    The scalar loss, and what is summed over an optimizer step's micro-batches:
    `loss`, `mean` of the values, `clip_fraction` (the share of tokens that the
    clip holds, whose gradient is 0) and what `explained_variance` takes.
  """
  tokens = [value, old_value, returns, weight]
  chex.assert_equal_shape(tokens)
  chex.assert_type(tokens, float)
  live = weight > 0
  value, old_value, returns = (jnp.where(live, x, 0) for x in tokens[:-1])
  old_value, returns = jax.lax.stop_gradient((old_value, returns))
  error = jnp.square(value - returns)
  held = jnp.zeros_like(live)
  if clip:
    moved = value - old_value
    near = old_value + jnp.clip(moved, -clip, clip)
    clipped = jax.lax.stop_gradient(jnp.square(near - returns))
    # Inside the clip the two are equal but for rounding, which must not hold.
    held = (jnp.abs(moved) > clip) & (clipped > error)
    error = jnp.where(held, clipped, error)

  def mean(values: chex.Array) -> chex.Array:
    return jnp.sum(weight * values)

  loss, rest = 0.5 * mean(error), returns - value
  return loss, {
    "loss": loss,
    "mean": mean(value),
    "clip_fraction": mean(held),
    "weight": jnp.sum(weight),
    "returns": mean(returns),
    "returns_squared": mean(jnp.square(returns)),
    "rest": mean(rest),
    "rest_squared": mean(jnp.square(rest)),
  }


def explained_variance(
  weight: float,
  returns: float,
  returns_squared: float,
  rest: float,
  rest_squared: float,
) -> float:
  """1 less the share of the returns' variance that the values leave over.

  Args:
    weight, returns, returns_squared, rest, rest_squared: sums over a step, as
      `value_loss` names them.

  Returns:
    1 for a perfect critic, 0 for a constant one and where returns do not vary.
  """

  def variance(mean: float, square: float) -> float:
    return max(square / weight - (mean / weight) ** 2, 0.0)

  spread = variance(returns, returns_squared) if weight else 0.0
  # Below this a sum of float32 squares is rounding.
  if spread < 1e-6:
    return 0.0
  return 1 - variance(rest, rest_squared) / spread
