"""Random weights of a policy's shape, and rollouts that benches time.

Imports JAX: import it after `jax_setup.configure`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import loop
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, hf, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.rollout import driver
from anysearch_jax.rollout.jax_engine import engine as engine_lib

_BUDGETS = 5


def weights_of(
  a: architecture_lib.Architecture, *, dtype: Any = jnp.float32
) -> decoder.Params:
  """Returns random weights for all rows of the table, adapters included."""
  return random_weights(table.rows(a), dtype=dtype)


def random_weights(
  rows: Sequence[weights.Weight], *, dtype: Any, where: Any = None
) -> decoder.Params:
  """Returns random weights; scales of norms are 1 and in float32.

  Args:
    rows: of the table.
    dtype: of the weights.
    where: their shardings; None leaves the placement to JAX.
  """

  def fresh() -> decoder.Params:
    keys = jax.random.split(jax.random.key(0), len(rows))
    named = dict(zip((row.path for row in rows), keys, strict=True))
    return weights.tree(
      rows,
      lambda row: (
        jnp.ones(row.shape, jnp.float32)
        if row.init is None
        else row.init * jax.random.normal(named[row.path], row.shape, dtype)
      ),
    )

  return jax.jit(fresh, out_shardings=where)()


def play(
  questions: Sequence[types.Question],
  parts: driver.EpisodeParts,
  *,
  group: int,
  rollout: int,
  concurrency: int | None = None,
) -> driver.Rollout:
  """Plays a group for each question, under budgets of 1 to 5 in turn."""
  return loop.run(
    driver.run_groups(
      [
        driver.Assignment(i, question, i % _BUDGETS + 1, False)
        for i, question in enumerate(questions)
      ],
      parts,
      group=group,
      rollout=rollout,
      max_concurrency=concurrency,
    )
  )


def trajectories(rollout: driver.Rollout) -> list[types.Trajectory]:
  return [t for group in rollout.groups for t in group.trajectories]


def generated(rollout: driver.Rollout) -> int:
  """Returns the number of sampled tokens of a rollout."""
  return sum(t.generated_tokens for t in trajectories(rollout))


def local_engine(
  policy: hf.Policy,
  engine: config_lib.EngineConfig,
  sampling: config_lib.SamplingConfig,
) -> engine_lib.JaxEngine:
  """Returns the in-process engine with a policy of `hf.load`."""
  return engine_lib.JaxEngine(policy, config=engine, sampling=sampling, seed=0)
