"""Puts the accuracy of the best agent beside rows of the generated world.

The questions of a row say all that the agent would see, so that its accuracy is
computed in about two milliseconds a question and budget; nothing is played.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings as config_settings
from anysearch_jax.evaluation import metrics
from anysearch_jax.host import json_files
from anysearch_jax.world import optimum
from anysearch_jax.world import world as world_lib


def add(row: metrics.Row, folders: Sequence[pathlib.Path]) -> metrics.Row:
  """Returns a row with the best agent's accuracy on each of its questions.

  Args:
    row: a row of a report.
    folders: its evaluations, whose `config.json` name the world.

  Returns:
    The row unchanged if its evaluations are not all of one generated world.

  Raises:
    ValueError: a question is not one of that world.
  """
  named = {_world(folder) for folder in folders}
  if len(named) != 1 or (world := named.pop()) is None:
    return row
  found = row.columns
  budgets = metrics.budgets(found)
  try:
    best = np.array(
      [
        [_right(world, name, budget) for budget in budgets]
        for name in found.ids
      ]
    )
  except ValueError as error:
    raise ValueError(f"Row {row.label!r}: {error}") from error
  return dataclasses.replace(row, table=found.with_optimum(best, budgets))


def _world(folder: pathlib.Path) -> int | None:
  """Returns the seed of an evaluation's world; None without one."""
  path = folder / "config.json"
  if not path.is_file():
    return None
  data: dict[str, Any] = config_settings.renamed(json_files.read(path)).get(
    "data", {}
  )
  default = config_lib.DataConfig()
  if data.get("source", default.source) != "world":
    return None
  return data.get("world_seed", default.world_seed)


@functools.cache
def _agent(seed: int) -> tuple[world_lib.World, optimum.Optimum]:
  made = world_lib.World(seed)
  return made, optimum.Optimum(made)


# Rows of a report share their questions.
@functools.cache
def _right(seed: int, question: str, budget: int) -> float:
  """Returns P(right answer) of the best agent."""
  found = optimum.accuracy(*_agent(seed), [question], [budget])
  return float(found[0, 0])
