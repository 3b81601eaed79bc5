"""Collecting a rollout: each process plays a share, all of them get it whole.

Every draw is addressed by rollout, question and sample, so who plays what
changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import curriculum, processes, types
from anysearch_jax.rollout import driver
from anysearch_jax.rollout import engine as engine_lib


class Collected(NamedTuple):
  """A rollout of all processes.

  groups: one a question; None where it was dropped.
  dropped, resampled, failed: as in `driver.Rollout`.
  engine: what the engines counted meanwhile.
  """

  groups: list[types.Group | None]
  dropped: int
  resampled: int
  failed: int
  engine: Counter[str]


def collect(
  rollout: int,
  assignment: curriculum.Assignment,
  *,
  config: config_lib.ExperimentConfig,
  questions: Sequence[types.Question],
  engine: engine_lib.JaxEngine,
  retriever: types.Retriever,
  codec: types.TextCodec,
) -> Collected:
  """Plays the questions of one rollout.

  Args:
    rollout: takes the rollout-th `config.questions` of the questions.
    assignment: a budget for each of them, and the prompt.
    config: of the run.
    questions: the training stream; after the last comes the first.
    engine: this process's own; its counters are taken from it.
    retriever: answers the searches.
    codec: the text side of the engine's policy.
  """
  start, scaffold = rollout * config.questions, bool(assignment.scaffold)
  assignments = [
    driver.Assignment(
      i, questions[(start + i) % len(questions)], int(budget), scaffold
    )
    for i, budget in enumerate(np.asarray(assignment.budgets))
  ]

  def play() -> tuple[driver.Rollout, Counter[str]]:
    played = asyncio.run(
      driver.run_groups(
        assignments[jax.process_index() :: jax.process_count()],
        group=config.group,
        rollout=rollout,
        engine=engine,
        retriever=retriever,
        config=config.episode,
        codec=codec,
        max_concurrency=config.engine.slots,
      )
    )
    counts = Counter(engine.counters)
    engine.counters.clear()
    return played, counts

  shares = processes.share(play)
  groups: list[types.Group | None] = [None] * config.questions
  engine_counts: Counter[str] = Counter()
  for played, counts in shares:
    engine_counts.update(counts)
    for group in played.groups:
      groups[group.trajectories[0].address.question] = group
  dropped, resampled, failed = (
    sum(getattr(played, name) for played, _ in shares)
    for name in ("dropped", "resampled", "failed")
  )
  return Collected(groups, dropped, resampled, failed, engine_counts)
