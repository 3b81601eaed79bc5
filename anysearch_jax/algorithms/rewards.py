"""The composite reward of a group (the paper's section "Reward Design").

    R_total = alpha R_acc + beta R_format + delta R_length + gamma_q R_tool
              - charge searches

The last term is not the paper's: `charge` is 0 by default (docs/objective.md).

Arrays in, arrays out: `environment/scoring` decides whether an answer is right
and well formed. The last axis of every array is the group (G): trajectories of
one question under one budget. An invalid trajectory does not affect the
statistics of its group, whatever its values are, and its rewards are 0.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from anysearch_jax import budgets
from anysearch_jax import config as config_lib
from anysearch_jax.config import settings

GAMMA_MODES = ("adaptive", "fixed", "off")
RELATIVE_COSTS = ("searches", "dollars")


class Rewards(NamedTuple):
  """The reward and its parts, float32 `[..., G]`; 0 where not valid.

  Attributes:
    em, format: the indicators as given.
    length: the length penalty, in [-1, 0].
    r_abs, r_rel: both signals as defined, even if they are switched off.
    tool: their product; a signal that is switched off is replaced by em.
    gamma: `[...]`, the weight of `tool` in the group.
    total: R_total.
  """

  em: chex.Array
  format: chex.Array
  length: chex.Array
  r_abs: chex.Array
  r_rel: chex.Array
  tool: chex.Array
  gamma: chex.Array
  total: chex.Array


def length_reward(
  generated_tokens: chex.Array, *, limit: int, tolerance: int
) -> chex.Array:
  """Returns the soft penalty on long generations (appendix, R_length).

  Args:
    generated_tokens: any shape, number of tokens that the model wrote, >= 0.
    limit: L_lim, tokens without penalty.
    tolerance: L_tol, tokens over which the penalty grows to 1; 0 is a step.

  Returns:
    float32 of the same shape: 0 up to the limit, falling linearly to -1 at
    limit + tolerance, and -1 beyond.
  """
  n = jnp.asarray(generated_tokens, float)
  slope = (limit - n) / max(tolerance, 1)
  return jnp.where(n <= limit, 0, jnp.where(n <= limit + tolerance, slope, -1))


def absolute_reward(
  em: chex.Array, used: chex.Array, budget: chex.Array
) -> chex.Array:
  """Returns R_abs (Eq. 7), the share of the budget that a correct answer saved.

  Args:
    em: correctness in {0, 1}.
    used: searches charged.
    budget: searches assigned, >= 0. The three arguments broadcast together.

  Returns:
    float32, in [0, 1] while 0 <= used <= budget; 0 where the budget is 0.
  """
  em, used, budget = (jnp.asarray(x, float) for x in (em, used, budget))
  return jnp.where(budget > 0, em * (budget - used) / jnp.maximum(budget, 1), 0)


def share_saved(
  em: chex.Array,
  spent: Mapping[str, chex.Array],
  caps: Mapping[str, chex.Array],
  weights: Mapping[str, float],
) -> chex.Array:
  """Returns R_abs of a budget in several units (docs/budgets.md).

    R_abs = em sum_u w_u (cap_u - spent_u) / cap_u / sum_u w_u

  The sums are over the units that are capped. With searches alone this is
  `absolute_reward`.

  Args:
    em: `[..., G]` correctness in {0, 1}.
    spent: `[..., G]` what was spent, by unit.
    caps: `[...]` what was assigned, by unit; infinite or 0: no cap.
    weights: w_u by unit, >= 0; only these units count.

  Returns:
    float32 `[..., G]`, in [0, 1]; 0 where no cap has a weight.
  """
  em = jnp.asarray(em, float)
  weighted_shares = jnp.zeros_like(em)
  weight_sum = jnp.zeros_like(em)
  for unit, weight in weights.items():
    cap = jnp.expand_dims(jnp.asarray(caps[unit], float), -1)
    capped = (cap > 0) & jnp.isfinite(cap)
    share = 1 - jnp.asarray(spent[unit], float) / jnp.where(capped, cap, 1)
    weighted_shares += jnp.where(capped, weight * jnp.clip(share, 0, 1), 0)
    weight_sum += jnp.where(capped, weight, 0)
  return jnp.where(
    weight_sum > 0,
    em * weighted_shares / jnp.where(weight_sum > 0, weight_sum, 1),
    0,
  )


def relative_cost(
  em: chex.Array, cost: chex.Array, valid: chex.Array, *, xi: float
) -> chex.Array:
  """Returns R_rel of costs in any unit: `relative_reward` of their shares.

  Args:
    em, valid, xi: as for `relative_reward`.
    cost: `[..., G]`, >= 0; divided by the largest of the correct trajectories,
      so that xi means the same for cents and for dollars.
  """
  correct = valid & (jnp.asarray(em) != 0)
  largest = jnp.max(jnp.where(correct, cost, 0), -1, keepdims=True)
  share = jnp.where(largest > 0, cost / jnp.where(largest > 0, largest, 1), 0)
  return relative_reward(em, share, valid, xi=xi)


def relative_reward(
  em: chex.Array, used: chex.Array, valid: chex.Array, *, xi: float
) -> chex.Array:
  """Returns R_rel (Eq. 8), which compares the searches of correct answers.

  Args:
    em: `[..., G]` correctness in {0, 1}.
    used: `[..., G]` searches charged.
    valid: bool `[..., G]`.
    xi: stability constant, > 0.

  Returns:
    float32 `[..., G]` in [0, 1]: 1 for the correct trajectories with the
    fewest searches, almost 0 for those with the most (if they differ), 0 for
    incorrect and invalid ones.
  """
  chex.assert_equal_shape([em, used, valid])
  correct = valid & (jnp.asarray(em) != 0)
  used = jnp.where(correct, jnp.asarray(used, float), 0)
  largest = jnp.max(used, -1, keepdims=True)
  smallest = jnp.min(jnp.where(correct, used, largest), -1, keepdims=True)
  return jnp.where(
    correct, 1 - (used - smallest) / (largest - smallest + xi), 0
  )


def adaptive_weight(
  em: chex.Array, valid: chex.Array, *, gamma_max: float
) -> chex.Array:
  """Returns gamma_q (Eq. 9), `gamma_max` times the group's accuracy.

  Args:
    em: `[..., G]` correctness in {0, 1}.
    valid: bool `[..., G]`; the mean is over the valid trajectories.
    gamma_max: weight of a group whose answers are all right.

  Returns:
    float32 `[...]` in [0, gamma_max]; 0 for a group without a valid trajectory.
  """
  chex.assert_equal_shape([em, valid])
  correct = jnp.sum(jnp.asarray(em, float), -1, where=valid)
  return gamma_max * correct / jnp.maximum(jnp.sum(valid, -1), 1)


@functools.partial(jax.jit, static_argnames="config")
def composite(
  em: chex.Array,
  format_: chex.Array,
  generated_tokens: chex.Array,
  searches: chex.Array,
  budget: chex.Array,
  valid: chex.Array,
  *,
  config: config_lib.RewardConfig,
  spent: Mapping[str, chex.Array] | None = None,
  caps: Mapping[str, chex.Array] | None = None,
) -> Rewards:
  """Returns R_total of every trajectory of every group (Eq. 5 to 9).

  Args:
    em: `[..., G]` exact match in {0, 1}.
    format_: `[..., G]` format indicator in {0, 1}.
    generated_tokens: `[..., G]` number of tokens that the model wrote, >= 0.
    searches: `[..., G]` searches charged, >= 0.
    budget: `[...]` searches assigned to the group, >= 0.
    valid: bool `[..., G]`, False for an episode that failed.
    config: weights and switches.
    spent: `[..., G]` tokens, dollars and seconds by unit; needed if a weight of
      theirs is above 0, or if the relative factor compares dollars.
    caps: `[...]` of the same units, infinite without a cap.

  Raises:
    ValueError: `config.gamma_mode` or `config.rel_cost` is unknown.
  """
  chex.assert_equal_shape([em, format_, generated_tokens, searches, valid])
  chex.assert_shape(budget, em.shape[:-1])
  chex.assert_type(valid, bool)
  em, format_, generated_tokens, searches = (
    jnp.where(valid, jnp.asarray(x, float), 0)
    for x in (em, format_, generated_tokens, searches)
  )

  length = length_reward(
    generated_tokens,
    limit=config.length_limit,
    tolerance=config.length_tolerance,
  )
  weights = {u: w for u in budgets.UNITS if (w := getattr(config, f"abs_{u}"))}
  spent = spent or {}
  caps = caps or {}
  budget = jnp.asarray(budget)
  if list(weights) == ["searches"]:
    r_abs = absolute_reward(em, searches, jnp.expand_dims(budget, -1))
  else:
    search_cap = jnp.where(budget < budgets.UNCAPPED, budget, jnp.inf)
    spent_by_unit = {**spent, "searches": searches}
    caps = {**caps, "searches": search_cap}
    r_abs = share_saved(em, spent_by_unit, caps, weights)
  match config.rel_cost:
    case "searches":
      r_rel = relative_reward(em, searches, valid, xi=config.xi)
    case "dollars":
      r_rel = relative_cost(em, spent["dollars"], valid, xi=config.xi)
    case _:
      raise settings.unknown("rel_cost", config.rel_cost, RELATIVE_COSTS)
  tool = (r_abs if config.use_abs else em) * (r_rel if config.use_rel else em)
  match config.gamma_mode:
    case "adaptive":
      gamma = adaptive_weight(em, valid, gamma_max=config.gamma_max)
    case "fixed":
      gamma = jnp.full(em.shape[:-1], config.gamma_fixed, float)
    case "off":
      gamma = jnp.zeros(em.shape[:-1], float)
    case _:
      raise settings.unknown("gamma_mode", config.gamma_mode, GAMMA_MODES)
  total = (
    config.alpha * em
    + config.beta * format_
    + config.delta * length
    + jnp.expand_dims(gamma, -1) * tool
    - config.charge * searches
  )
  return Rewards(
    em=em,
    format=format_,
    length=length,
    r_abs=r_abs,
    r_rel=r_rel,
    tool=tool,
    gamma=gamma,
    total=total,
  )
