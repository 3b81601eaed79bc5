"""The budget curriculum (the paper's section "Curriculum Learning").

Phase I anneals the budget from B_max to 1, with the same number of optimizer
steps for each level. Phase II draws a budget for each group; the further a
level's recent accuracy is below that of the best level, the more often it is
drawn.

With `token_levels` a level is a pair of a number of searches and a cap on
generated tokens, and the same rule draws from the grid of all pairs.

    state = init(config, seed)
    assignment = assign(state, num_groups=Q, config=config)   # one rollout
    state = record(state, budgets, em, valid, config=config)  # its outcomes

The state is a pytree of arrays and is part of a checkpoint. Time is counted in
optimizer steps; the step of a rollout is that of its first optimizer step.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib

# Named explicitly, so that draws do not depend on JAX's default generator.
_PRNG = "threefry2x32"


class CurriculumState(NamedTuple):
  """The state of the curriculum; level b is at index b - 1.

  With T token levels, L = Bmax T, and the pair of b searches and the t-th token
  level (from 0) is at index (b - 1) T + t; otherwise L = Bmax.

  Attributes:
    windows: int8 `[L, W]`, ring buffers of the last outcomes in {0, 1}.
    counts: int32 `[L]`, number of outcomes ever recorded for each level.
    step: int32 `[]`, optimizer steps of all recorded rollouts.
    key: uint32 `[2]`, key data of the seed; never changes.
  """

  windows: chex.Array
  counts: chex.Array
  step: chex.Array
  key: chex.Array


class Assignment(NamedTuple):
  """The assignment of a rollout.

  Attributes:
    budgets: int32 `[Q]`, searches assigned to each group.
    scaffold: bool `[]`, whether the budget is stated before each turn.
    tokens: int32 `[Q]`, cap on each group's generated tokens; None without
      `token_levels`.
  """

  budgets: chex.Array
  scaffold: chex.Array
  tokens: chex.Array | None = None


def init(config: config_lib.CurriculumConfig, seed: int) -> CurriculumState:
  """Returns the state before the first rollout: empty windows, step 0."""
  return CurriculumState(
    windows=jnp.zeros((config.levels, config.window), jnp.int8),
    counts=jnp.zeros(config.levels, jnp.int32),
    step=jnp.zeros((), jnp.int32),
    key=jax.random.key_data(jax.random.key(seed, impl=_PRNG)),
  )


@jax.jit
def accuracies(state: CurriculumState) -> chex.Array:
  """Returns R(b) (Eq. 3), the mean outcome of each level's window.

  It is float32 `[L]` in [0, 1]; 0 for an empty window.
  """
  _assert_state(state)
  outcome_counts = jnp.clip(state.counts, 1, state.windows.shape[-1])
  return jnp.sum(state.windows, -1, dtype=jnp.float32) / outcome_counts


@functools.partial(jax.jit, static_argnames="config")
def probabilities(
  state: CurriculumState, *, config: config_lib.CurriculumConfig
) -> chex.Array:
  """Returns P(b) (Eq. 4) of the levels; L is B_max without `token_levels`.

    P(b) = (1 - lambda) (Rmax - R(b) + eps) / sum_b' (...) + lambda / L

  It is a distribution, float32 `[L]`; lambda is `config.uniform_mix`.
  """
  accuracy = accuracies(state)
  gap = jnp.max(accuracy) - accuracy + config.epsilon
  mix = config.uniform_mix
  return (1 - mix) * gap / jnp.sum(gap) + mix / config.levels


@functools.partial(jax.jit, static_argnames="config")
def distribution(
  state: CurriculumState, *, config: config_lib.CurriculumConfig
) -> chex.Array:
  """Returns the distribution from which Phase II draws a rollout's budgets.

  It is float32 `[L]`: uniform in the first rollout of Phase II and
  `probabilities` in all later ones. The rollout is the one at `state.step`.
  """
  c = config
  first = state.step // c.steps_per_rollout == (
    c.phase1_steps // c.steps_per_rollout
  )
  return jnp.where(first, 1 / c.levels, probabilities(state, config=c))


@functools.partial(jax.jit, static_argnames=("num_groups", "config"))
def assign(
  state: CurriculumState,
  *,
  num_groups: int,
  config: config_lib.CurriculumConfig,
) -> Assignment:
  """Returns budgets and scaffold of the rollout that starts at `state.step`.

  Phase II draws from `distribution`, independently for each group. The draw
  depends only on the state, so repeated calls give the same budgets.

  Args:
    state: the curriculum state.
    num_groups: Q, the number of groups in the rollout.
    config: if `fixed_budget` >= 0, every group gets it in both phases. The
      scaffold follows the phase's flag.
  """
  _assert_state(state)
  c = config
  phase1 = state.step < c.phase1_steps
  scaffold = jnp.where(phase1, c.phase1_scaffold, c.phase2_scaffold)
  if c.fixed_budget >= 0:
    return Assignment(jnp.full(num_groups, c.fixed_budget, jnp.int32), scaffold)
  rollout = state.step // c.steps_per_rollout
  p = distribution(state, config=c)
  seed = jax.random.wrap_key_data(state.key, impl=_PRNG)
  drawn = jax.random.categorical(
    jax.random.fold_in(seed, rollout), jnp.log(p), shape=(num_groups,)
  )
  # Phase I's budget falls from B_max to 1.
  level_steps = max(c.phase1_steps // c.max_budget, 1)
  annealed = jnp.maximum(c.max_budget - state.step // level_steps, 1)
  token_levels = len(c.token_levels) or 1
  budgets = jnp.where(phase1, annealed, 1 + drawn // token_levels).astype(
    jnp.int32
  )
  if not c.token_levels:
    return Assignment(budgets, scaffold)
  # T token levels share the B_max budgets as evenly as they divide; the
  # largest budget has the largest level.
  falling = (annealed * token_levels - 1) // c.max_budget
  level = jnp.where(phase1, falling, drawn % token_levels)
  caps = jnp.asarray(c.token_levels, jnp.int32)
  return Assignment(budgets, scaffold, caps[level])


@functools.partial(jax.jit, static_argnames="config")
def record(
  state: CurriculumState,
  budgets: chex.Array,
  em: chex.Array,
  valid: chex.Array,
  *,
  config: config_lib.CurriculumConfig,
  tokens: chex.Array | None = None,
) -> CurriculumState:
  """Returns the next state, with the outcomes of one rollout.

  Each level keeps its last W outcomes. Their order is that of the arguments,
  (question, sample), not the order in which episodes finished.

  Args:
    state: the curriculum state.
    budgets: int `[Q * G]`, the budget of each trajectory, as `assign` names it;
      budgets outside of [1, Bmax] have no window and are ignored.
    em: `[Q * G]` correctness in {0, 1}.
    valid: bool `[Q * G]`; only valid trajectories are recorded.
    config: `steps_per_rollout` is added to the step.
    tokens: int `[Q * G]`, each trajectory's cap, one of `token_levels`; None
      without them.
  """
  _assert_state(state)
  if tokens is not None:
    caps = jnp.asarray(config.token_levels)
    token_level = jnp.argmax(jnp.asarray(tokens)[:, None] == caps, -1)
    inside = (budgets >= 1) & (budgets <= config.max_budget)
    budgets = jnp.where(inside, (budgets - 1) * len(caps) + token_level + 1, 0)
  chex.assert_rank(budgets, 1)
  chex.assert_equal_shape([budgets, em, valid])
  chex.assert_type([budgets, valid], [int, bool])
  levels, window = state.windows.shape
  member = valid[:, None] & (budgets[:, None] == jnp.arange(1, levels + 1))
  ranks = jnp.cumsum(member, 0, dtype=jnp.int32)
  new_counts = jnp.sum(member, 0, dtype=jnp.int32)
  # Of each level only the last W outcomes of this call are written, so their
  # slots are distinct: the order of conflicting updates is undefined, see
  # https://docs.jax.dev/en/latest/_autosummary/jax.numpy.ndarray.at.html. All
  # other outcomes get slot W, which is out of range and dropped.
  write = member & (ranks > new_counts - window)
  slot = jnp.where(write, (state.counts + ranks - 1) % window, window)
  level = jnp.broadcast_to(jnp.arange(levels), slot.shape)
  outcome = jnp.broadcast_to((em != 0)[:, None], slot.shape)
  return state._replace(
    windows=state.windows.at[level, slot].set(
      outcome.astype(state.windows.dtype), mode="drop"
    ),
    counts=state.counts + new_counts,
    step=state.step + config.steps_per_rollout,
  )


def _assert_state(state: CurriculumState) -> None:
  ranks = CurriculumState(windows=2, counts=1, step=0, key=1)
  chex.assert_rank(state, ranks)
  chex.assert_equal_shape_prefix([state.windows, state.counts], 1)
