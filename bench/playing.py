"""Plays rollouts of the quickstart's world, for the benches that time them.

Imports JAX: import it after `jax_setup.configure`.
"""

from __future__ import annotations

from collections.abc import Sequence

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import loop
from anysearch_jax.policy import hf
from anysearch_jax.rollout import driver
from anysearch_jax.rollout.jax_engine import engine as engine_lib

_BUDGETS = 5


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
  return engine_lib.JaxEngine(
    policy,
    config=engine,
    sampling=sampling,
    seed=0,
  )
