"""Rows of a report and what is measured of them, cell by cell.

Everything takes `columns.Measured`: arrays, or episodes as plain records.
Intervals of the same measures are in `measures.estimates`.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anysearch_jax.evaluation import columns, episodes, intervals, measures

Episode = episodes.Episode
key_of = episodes.key_of


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of the report: a label and all its evaluated episodes.

  Attributes:
    label: how the row is called.
    episodes: whole, to be read: all of them, or some where `table` has all.
    run: the folder of the training run they come from, "" if unknown.
    table: all of them, to be measured; None: the same as `episodes`.
  """

  label: str
  episodes: tuple[Episode, ...] = ()
  run: str = ""
  table: columns.Columns | None = None

  @functools.cached_property
  def columns(self) -> columns.Columns:
    """All episodes, to be measured."""
    return columns.of(self.episodes) if self.table is None else self.table


def read_row(
  label: str,
  *paths: pathlib.Path,
  run: str = "",
  sample: int = 1000,
  seed: int = 0,
) -> Row:
  """A row of one or more `episodes.jsonl`; all are measured, a sample kept.

  Args:
    label: how the row is called.
    paths: of one method; several are runs with different seeds.
    run: the folder of the training run.
    sample: whole episodes kept of all files; see `episodes.Sample`.
    seed: of the sample.

  Raises:
    ValueError: as `columns.read`.
  """
  kept = episodes.Sample(sample, seed)
  table = columns.read(*paths, sample=kept)
  return Row(label, tuple(kept.episodes()), run, table)


@dataclasses.dataclass(frozen=True)
class Training:
  """One training run: its rollout records, in order, and resolved config."""

  label: str
  records: tuple[Mapping[str, Any], ...]
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def drawn(record: Mapping[str, Any]) -> dict[int, int]:
  """Returns the groups of each budget that a rollout played, by budget.

  The curriculum's probabilities (`curriculum/p1`, ...) are no substitute: in
  Phase I, and with a fixed budget, nothing is drawn by them.

  Args:
    record: of a rollout; the result is empty where it holds no counts.
  """
  prefix = "curriculum/count"
  return {
    int(key.removeprefix(prefix)): int(count)
    for key, count in record.items()
    if key.startswith(prefix) and key.removeprefix(prefix).isdigit()
  }


@dataclasses.dataclass(frozen=True)
class Cell:
  """The measurements of some episodes; None where nothing defines a value.

  Attributes:
    n: scored episodes; failed: left out of everything else.
    correct, searches_total: sums over the scored episodes. tool_correct: the
      correct ones of them that had a budget, B >= 1.
    accuracy, f1, searches, unused, format_rate, *_tokens, cost: means over
      scored episodes; unused is the budget left, cost in US dollars.
    official_accuracy, official_f1: means of what the published scripts of the
      data sets give (`official`); None where a question's set has none.
    tp: tool productivity, tool_correct / searches_total; None without any
      search. It is defined over B >= 1: what was answered with no search
      allowed is no product of searching.
    *_spread: sample standard deviation over seeds; None under two seeds.
    retrieval_share: retrieved / total tokens, in [0, 1].
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


def budgets(measured: columns.Measured) -> list[int]:
  """The budgets that occur, ascending."""
  return [int(b) for b in np.unique(columns.of(measured).budget)]


def productivity(correct: float, searches: float) -> float | None:
  """Tool productivity: correct answers per search (the paper's TP).

  Returns:
    correct / searches, or None when no search was made: the ratio is not
    defined then, neither 0 nor infinite.
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
  if len(values) < 2 or None in values:
    return None
  return float(np.std(values, ddof=1))


def by_budget(measured: columns.Measured) -> dict[int, Cell]:
  """One cell for each budget that occurs, ascending."""
  parts = columns.by_budget(measured)
  return {budget: cell(part) for budget, part in parts.items()}


def by_dataset(measured: columns.Measured) -> dict[str, dict[int, Cell]]:
  """Dataset -> budget -> cell, datasets in the paper's order."""
  parts = columns.by_dataset(measured)
  return {dataset: by_budget(part) for dataset, part in parts.items()}


def average(cells: Sequence[Cell]) -> Cell:
  """The average over budgets: every budget weighs the same.

  Counts are added; tool productivity is pooled (all correct answers over all
  searches, of B >= 1), because a mean of ratios is ruled by the budgets that
  search least; spreads over seeds are not averaged.
  """

  def combine(name: str) -> int | float | None:
    values = [getattr(c, name) for c in cells]
    if all(isinstance(value, int) for value in values):
      return sum(values)
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None

  pooled = {f.name: combine(f.name) for f in dataclasses.fields(Cell)}
  pooled["tp"] = productivity(pooled["tool_correct"], pooled["searches_total"])
  return Cell(**pooled | {"accuracy_spread": None, "tp_spread": None})


def over_sets(
  measured: columns.Measured,
  names: Sequence[str] = ("accuracy", "f1", "tp", "searches", "total_tokens"),
  *,
  resamples: int = 10_000,
) -> dict[str, intervals.Estimate]:
  """The average over datasets, as in the paper's main table.

  Each measure is taken in each set (there, TP is pooled over its episodes) and
  the sets weigh the same, whatever their size. Usually of one budget.

  Args:
    measured: episodes of all the sets to average.
    names: of `measures.MEASURES`.
    resamples: of the bootstrap, stratified by set, clustered by question.

  Returns:
    By name; nothing where a set does not define the measure.
  """
  found = measures.sums(measured, names)
  if not found.datasets:
    return dict.fromkeys(names, intervals.Estimate(*intervals.NOTHING))
  parts = found.parts(*names).sum(axis=1)
  estimates = measures.set_means(found.stratum, parts, resamples=resamples)
  return dict(zip(names, estimates, strict=True))


def by_hops(
  measured: columns.Measured,
) -> dict[int, dict[int, tuple[int, int]]]:
  """Accuracy by the number of hops of the question.

  Returns:
    hops -> budget -> (correct, scored); empty when no episode tells its hops.
  """
  return {
    hops: {
      budget: (round(at.em.sum()), len(at))
      for budget, at in columns.by_budget(part).items()
    }
    for hops, part in columns.by_hops(columns.of(measured).scored()).items()
  }


def budget_use(measured: columns.Measured) -> dict[int, tuple[int, ...]]:
  """How many searches were made of each budget.

  Returns:
    budget -> scored episodes with 0, 1, ... budget searches.
  """
  kept = columns.of(measured).scored()
  return {
    budget: tuple(
      np.bincount(part.searches.astype(int), minlength=budget + 1).tolist()
    )
    for budget, part in columns.by_budget(kept).items()
  }
