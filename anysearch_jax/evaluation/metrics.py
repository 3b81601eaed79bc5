"""The rows of a report, and how they use what they may search.

Functions take `columns.Measured`: arrays, or episodes as plain records.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anysearch_jax.evaluation import (
  columns,
  inference,
  measures,
)


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of the report: a label and all its evaluated episodes.

  Attributes:
    label: name of the row.
    episodes: complete records, for reading; a sample if `table` is given,
      otherwise all of them.
    run: the folder of the training run that they are from, "" if unknown.
    table: all episodes, for measuring; None: `episodes` are all.
  """

  label: str
  episodes: tuple[columns.Episode, ...] = ()
  run: str = ""
  table: columns.Columns | None = None

  @functools.cached_property
  def columns(self) -> columns.Columns:
    """All episodes as arrays."""
    return columns.of(self.episodes) if self.table is None else self.table


def read_row(
  label: str,
  *paths: pathlib.Path,
  run: str = "",
  trainings: Sequence[str] | None = None,
  sample: int = 1000,
  seed: int = 0,
) -> Row:
  """Reads a row; all episodes are measured, a sample of them is kept.

  Args:
    label: name of the row.
    paths: `episodes.jsonl` of one method.
    run: the folder of the first training run.
    trainings: for each path, the training whose policy played it, see
      `columns.read`.
    sample: number of complete episodes to keep, see `columns.Sample`.
    seed: seed of the sample.

  Raises:
    ValueError: as `columns.read`.
  """
  kept = columns.Sample(sample, seed)
  table = columns.read(*paths, runs=trainings, sample=kept)
  return Row(label, tuple(kept.episodes()), run, table)


@dataclasses.dataclass(frozen=True)
class Training:
  """A training run: its rollout records, in order, and its resolved config."""

  label: str
  records: tuple[Mapping[str, Any], ...]
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def drawn(record: Mapping[str, Any]) -> dict[int, int]:
  """Returns the number of groups that a rollout played, by budget.

  The curriculum's probabilities (`curriculum/p1`, ...) cannot replace these
  counts: they are not used in Phase I or with a fixed budget.

  Args:
    record: record of a rollout; the result is empty if it has no counts.
  """
  prefix = "curriculum/count"
  return {
    int(key.removeprefix(prefix)): int(count)
    for key, count in record.items()
    if key.startswith(prefix) and key.removeprefix(prefix).isdigit()
  }


def budgets(measured: columns.Measured) -> list[int]:
  """Returns the budgets that occur, ascending."""
  return [int(b) for b in np.unique(columns.of(measured).budget)]


def over_sets(
  measured: columns.Measured,
  names: Sequence[str] = ("accuracy", "f1", "tp", "searches", "total_tokens"),
) -> dict[str, inference.Estimate]:
  """Returns averages over datasets, as in the paper's main table.

  Each measure is computed in each dataset (TP is pooled over its episodes), and
  all datasets have the same weight, whatever their size.

  Args:
    measured: episodes of all datasets to average, usually of one budget.
    names: keys of `measures.MEASURES`.

  Returns:
    An estimate for each name; its values are None if the measure is undefined
    in a dataset.
  """
  found = measures.sums(measured, names)
  if not found.datasets:
    return dict.fromkeys(names, inference.Estimate(*inference.NOTHING))
  return dict(zip(names, measures.set_means(found, names), strict=True))


def search_shares(
  measured: columns.Measured,
) -> dict[int, tuple[inference.Estimate, ...]]:
  """Returns `budget_use` as shares of each budget's episodes."""
  return {
    budget: _shares(
      part, [(part.searches == k).astype(float) for k in range(budget + 1)]
    )
    for budget, part in columns.by_budget(columns.of(measured).scored()).items()
  }


def budget_use(measured: columns.Measured) -> dict[int, tuple[int, ...]]:
  """Returns the distribution of searches under each budget.

  Returns:
    budget -> number of scored episodes with 0, 1, ..., `budget` searches.
  """
  kept = columns.of(measured).scored()
  return {
    budget: tuple(
      np.bincount(part.searches.astype(int), minlength=budget + 1).tolist()
    )
    for budget, part in columns.by_budget(kept).items()
  }


def _shares(
  table: columns.Columns, counted: Sequence[np.ndarray]
) -> tuple[inference.Estimate, ...]:
  """Returns the share of episodes that each of `counted`, 0 or 1, counts."""
  found = measures.ratios(table, counted, [np.ones(len(table))] * len(counted))
  rates = inference.rates(found, [len(table)] * len(counted))
  return tuple(rate.estimate for rate in rates)
