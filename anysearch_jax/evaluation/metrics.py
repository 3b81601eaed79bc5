"""The rows of a report, and the measurements of their cells.

Functions take `columns.Measured`: arrays, or episodes as plain records.
`measures.estimates` computes intervals of the same measures.
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
  episodes,
  inference,
  intervals,
  measures,
)

Episode = episodes.Episode


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
  episodes: tuple[Episode, ...] = ()
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
    sample: number of complete episodes to keep, see `episodes.Sample`.
    seed: seed of the sample.

  Raises:
    ValueError: as `columns.read`.
  """
  kept = episodes.Sample(sample, seed)
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


@dataclasses.dataclass(frozen=True)
class Cell:
  """The measurements of some episodes; None where a value is undefined.

  Attributes:
    n: number of scored episodes, those that did not fail.
    failed: number of failed episodes, which enter no other value.
    truncated, invalid, violations: number of scored episodes of each kind.
    correct, searches_total: sums over the scored episodes.
    tool_correct: number of correct scored episodes with a budget B >= 1.
    accuracy, f1, searches, unused, format_rate, *_tokens, cost: means over
      scored episodes; `unused` is the remaining budget, `cost` is in US
      dollars.
    official_accuracy, official_f1: mean scores of the datasets' published
      scripts (`environment/official_scoring`); None if a question's dataset
      has no script.
    tp: tool productivity, tool_correct / searches_total; None without a
      search. Only episodes with B >= 1 count, because an answer that was given
      without a permitted search is not a product of searching.
    *_spread: sample standard deviation over seeds; None with fewer than two.
    retrieval_share: retrieved / total tokens, in [0, 1].
    regret: accuracy of the best agent minus that of these episodes; None where
      the former is unknown.
  """

  n: int
  failed: int
  truncated: int
  invalid: int
  violations: int
  correct: int
  tool_correct: int
  searches_total: int
  accuracy: float | None
  accuracy_spread: float | None
  f1: float | None
  official_accuracy: float | None
  official_f1: float | None
  searches: float | None
  unused: float | None
  tp: float | None
  tp_spread: float | None
  format_rate: float | None
  generated_tokens: float | None
  retrieved_tokens: float | None
  total_tokens: float | None
  input_tokens: float | None
  retrieval_share: float | None
  cost: float | None
  regret: float | None


def budgets(measured: columns.Measured) -> list[int]:
  """Returns the budgets that occur, ascending."""
  return [int(b) for b in np.unique(columns.of(measured).budget)]


def productivity(correct: float, searches: float) -> float | None:
  """Returns tool productivity: correct answers per search (the paper's TP).

  Returns:
    correct / searches; None if there was no search, because the ratio is
    undefined.
  """
  return None if searches == 0 else correct / searches


def cell(measured: columns.Measured) -> Cell:
  """Measures some episodes together, usually those of one budget."""
  table = columns.of(measured)
  kept = table.scored()
  totals = measures.totals(kept)
  means = {
    name: _ratio(*(totals[part] for part in measures.MEASURES[name]))
    for name in measures.MEASURES
  }
  seeds = [measures.totals(part) for part in columns.by_seed(kept).values()]
  fields = {f.name for f in dataclasses.fields(Cell)}
  return Cell(
    **{name: value for name, value in means.items() if name in fields},
    n=len(kept),
    failed=len(table) - len(kept),
    truncated=round(totals["truncated"]),
    invalid=round(totals["invalid"]),
    violations=round(totals["violation"]),
    correct=round(totals["em"]),
    tool_correct=round(totals["tool_em"]),
    searches_total=round(totals["searches"]),
    accuracy_spread=_spread([_ratio(s["em"], s["n"]) for s in seeds]),
    tp_spread=_spread([_ratio(s["tool_em"], s["searches"]) for s in seeds]),
  )


def _ratio(numerator: float, denominator: float) -> float | None:
  value = productivity(numerator, denominator)
  return None if value is None or np.isnan(value) else value


def _spread(values: Sequence[float | None]) -> float | None:
  defined = [value for value in values if value is not None]
  if len(values) < 2 or len(defined) < len(values):
    return None
  return float(np.std(defined, ddof=1))


def by_budget(measured: columns.Measured) -> dict[int, Cell]:
  """Returns one cell for each budget that occurs, ascending."""
  parts = columns.by_budget(measured)
  return {budget: cell(part) for budget, part in parts.items()}


def by_dataset(measured: columns.Measured) -> dict[str, dict[int, Cell]]:
  """Returns dataset -> budget -> cell, with datasets in the paper's order."""
  parts = columns.by_dataset(measured)
  return {dataset: by_budget(part) for dataset, part in parts.items()}


def average(cells: Sequence[Cell]) -> Cell:
  """Returns the average over budgets; every budget has the same weight.

  Counts are added. Tool productivity is pooled (all correct answers over all
  searches, for B >= 1), because the budgets with the fewest searches would
  dominate a mean of ratios. Spreads over seeds are None.
  """

  def mean(name: str) -> float | None:
    values = [getattr(c, name) for c in cells]
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None

  fields = [f.name for f in dataclasses.fields(Cell)]
  means = [name for name in fields if name in measures.MEASURES]
  tool_correct = sum(c.tool_correct for c in cells)
  searches_total = sum(c.searches_total for c in cells)
  return Cell(
    **{name: mean(name) for name in means if name != "tp"},
    n=sum(c.n for c in cells),
    failed=sum(c.failed for c in cells),
    truncated=sum(c.truncated for c in cells),
    invalid=sum(c.invalid for c in cells),
    violations=sum(c.violations for c in cells),
    correct=sum(c.correct for c in cells),
    tool_correct=tool_correct,
    searches_total=searches_total,
    accuracy_spread=None,
    tp=productivity(tool_correct, searches_total),
    tp_spread=None,
  )


def over_sets(
  measured: columns.Measured,
  names: Sequence[str] = ("accuracy", "f1", "tp", "searches", "total_tokens"),
) -> dict[str, intervals.Estimate]:
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
    return dict.fromkeys(names, intervals.Estimate(*intervals.NOTHING))
  return dict(zip(names, measures.set_means(found, names), strict=True))


def by_hops(
  measured: columns.Measured,
) -> dict[int, dict[int, tuple[int, int]]]:
  """Returns counts for accuracy by the number of hops of the question.

  Returns:
    hops -> budget -> (correct, scored); empty if no episode records its hops.
  """
  return {
    hops: {
      budget: (round(at.em.sum()), len(at))
      for budget, at in columns.by_budget(part).items()
    }
    for hops, part in columns.by_hops(columns.of(measured).scored()).items()
  }


def search_shares(
  measured: columns.Measured,
) -> dict[int, tuple[intervals.Estimate, ...]]:
  """Returns `budget_use` as shares of each budget's episodes."""
  kept = columns.of(measured).scored()
  out = {}
  for budget, part in columns.by_budget(kept).items():
    made = [(part.searches == k).astype(float) for k in range(budget + 1)]
    found = measures.ratios(part, made, [np.ones(len(part))] * len(made))
    rates = inference.rates(found, [len(part)] * len(made))
    out[budget] = tuple(rate.estimate for rate in rates)
  return out


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
