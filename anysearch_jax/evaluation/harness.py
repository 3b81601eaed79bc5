"""Evaluation: the same questions under every budget, on one engine.

Budgets share their random numbers: an episode's key is its (seed, question),
whatever the budget, so differences between budgets and between policies are
paired.
"""

from __future__ import annotations

import asyncio
import itertools
import pathlib
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax import records, types
from anysearch_jax.policy import hf
from anysearch_jax.rollout import driver
from anysearch_jax.rollout import engine as engine_lib


def evaluate(
  config: config_lib.ExperimentConfig,
  *,
  policy: hf.Policy,
  questions: Sequence[types.Question],
  retriever: types.Retriever,
  path: pathlib.Path,
  on_done: Callable[[int, int], None] = lambda done, total: None,
) -> None:
  """Plays every (seed, budget, question) once and writes `episodes.jsonl`.

  Args:
    config: `evaluation` says which budgets, seeds and prompt; `episode`,
      `engine` and `sampling` how.
    policy: what is evaluated.
    questions: all of them are asked.
    retriever: answers the searches.
    path: the file, written whole at the end.
    on_done: called with (episodes done, episodes in all).
  """
  e = config.evaluation
  total = len(e.seeds) * len(e.budgets) * len(questions)
  rows = []
  for seed in e.seeds:
    engine = engine_lib.JaxEngine(
      policy.params,
      policy.architecture,
      policy.tokenizer,
      config=config.engine,
      sampling=config.sampling,
      seed=seed,
      dtype=jnp.dtype(config.compute_dtype),
    )
    for budget in e.budgets:
      finished = itertools.count(len(rows) + 1)

      def tick(trajectory, finished=finished):
        del trajectory
        on_done(next(finished), total)

      rollout = asyncio.run(
        driver.run_groups(
          [
            driver.Assignment(i, question, budget, e.scaffold)
            for i, question in enumerate(questions)
          ],
          group=1,
          rollout=0,
          engine=engine,
          retriever=retriever,
          config=config.episode,
          codec=policy.tokenizer,
          max_concurrency=config.engine.slots,
          on_done=tick,
        )
      )
      rows += [
        records.episode(group.trajectories[0], seed=seed)
        for group in rollout.groups
      ]
  records.write(path, rows)
