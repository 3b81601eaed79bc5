"""Measures the rows of a study: alone, and against each other."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import config as config_lib
from anysearch_jax.evaluation import (
  columns,
  comparison,
  curves,
  inference,
  measures,
  metrics,
  verdicts,
)
from anysearch_jax.report import tables

# Draws for each test of a family, at least. Holm's correction multiplies a p
# value by up to the number of tests, and the smallest p value is about
# 1 / draws, so 1 / 40 remains reachable after the correction.
_DRAWS = 40
_LEVEL = 0.05  # Of a difference that the verdict calls resolved.
_TOLD = 4  # Rows that the verdict names for each outcome, at most.
# The paper's datasets, in its order, with the headings of its main table.
NAMES = {
  "nq": ("General QA", "NQ†"),
  "triviaqa": ("General QA", "TriviaQA*"),
  "popqa": ("General QA", "PopQA*"),
  "hotpotqa": ("Multi-hop QA", "HotpotQA†"),
  "2wikimultihopqa": ("Multi-hop QA", "2wiki*"),
  "musique": ("Multi-hop QA", "MuSiQue*"),
  "bamboogle": ("Multi-hop QA", "Bamboogle*"),
}
# Titles of the paper's ablations and of its comparison of systems; other groups
# use their names as titles.
GROUPS = {
  "methods": "Compared systems",
  "tool": "Tool reward",
  "format": "Format reward",
  "scaffold": "Scaffold",
  "sampling": "Sampling strategy",
  "phases": "Curriculum phases",
}


class Part:
  """Some episodes; its attributes are the measures of `measures.MEASURES`.

  They are estimated together, once one of them is asked.

  Attributes:
    table: the episodes, of which those that did not fail are measured.
    weigh_sets: whether a measure is the average over datasets with equal
      weights, as in the paper; otherwise episodes weigh alike.
  """

  def __init__(self, table: columns.Columns, *, weigh_sets: bool = False):
    self.table, self.weigh_sets = table.scored(), weigh_sets
    self.n, self.failed = len(self.table), len(table) - len(self.table)

  @functools.cached_property
  def _found(self) -> Mapping[str, inference.Estimate]:
    estimate = metrics.over_sets if self.weigh_sets else measures.estimates
    return estimate(self.table, tuple(measures.MEASURES))

  def __getattr__(self, measure: str) -> inference.Estimate:
    if measure not in measures.MEASURES:
      raise AttributeError(f"Found {measure!r}, expected a measure.")
    return self._found[measure]

  def cell(self, measure: str) -> tables.Cell:
    """Returns a measure with its number of episodes."""
    value, low, high = getattr(self, measure)
    return tables.Cell(value, low, high, self.n)

  def over(self, budgets: Iterable[int], *, weigh_sets: bool = False) -> Part:
    """Returns its episodes at some budgets."""
    chosen = np.isin(self.table.budget, list(budgets))
    return Part(self.table.where(chosen), weigh_sets=weigh_sets)


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
  """A row of the report and what is measured of it alone.

  Attributes:
    label: its name.
    index: its colour index.
    episodes: all its episodes.
    trained: the largest budget of the system's training.
  """

  label: str
  index: int
  episodes: columns.Columns
  trained: int

  @functools.cached_property
  def whole(self) -> Part:
    return Part(self.episodes)

  @functools.cached_property
  def mean(self) -> Part:
    """All episodes; datasets weigh alike."""
    return Part(self.episodes, weigh_sets=True)

  @functools.cached_property
  def by_budget(self) -> Mapping[int, Part]:
    parts = columns.by_budget(self.episodes)
    return {budget: Part(part) for budget, part in parts.items()}

  @functools.cached_property
  def cells(self) -> Mapping[tuple[str, int], Part]:
    """The scored episodes by dataset and budget; none is empty."""
    return {
      (dataset, budget): Part(part)
      for dataset, found in columns.by_dataset(self.whole.table).items()
      for budget, part in columns.by_budget(found).items()
    }

  @functools.cached_property
  def curve(self) -> curves.Curve:
    """The curve over all datasets."""
    return curves.curve(self.label, self.episodes, trained=self.trained)

  @functools.cached_property
  def curves(self) -> Mapping[str, curves.Curve]:
    """The curve of each dataset."""
    parts = columns.by_dataset(self.episodes)
    if len(parts) == 1:
      return dict.fromkeys(parts, self.curve)
    return {
      dataset: curves.curve(self.label, part, trained=self.trained)
      for dataset, part in parts.items()
    }

  @functools.cached_property
  def knowledge(self) -> Mapping[str, comparison.Number]:
    """How often the first fact is searched, by the policy's memory of it."""
    return comparison.knowledge(metrics.Row(self.label, table=self.episodes))

  @functools.cached_property
  def optimum(self) -> Mapping[int, float]:
    """The best agent's accuracy by budget, where every question has one."""
    parts = columns.by_budget(self.whole.table)
    means = {b: float(part.optimum.mean()) for b, part in parts.items()}
    return {b: mean for b, mean in means.items() if not np.isnan(mean)}


def datasets(rows: Sequence[Row]) -> list[str]:
  """Returns the datasets that any row has, in the paper's order."""
  found = {dataset for row in rows for dataset, _ in row.cells}
  return [name for name in NAMES if name in found] + sorted(found - set(NAMES))


def budgets(rows: Sequence[Row]) -> list[int]:
  """Returns the budgets that any row has, ascending."""
  return sorted({budget for row in rows for _, budget in row.cells})


def know_optimum(rows: Sequence[Row]) -> bool:
  """Whether the best agent's accuracy is known for any episode."""
  return any(not np.isnan(row.whole.table.optimum).all() for row in rows)


def complete(
  row: Row, rows: Sequence[Row], at: Iterable[int] | None = None
) -> bool:
  """Whether a row has every (dataset, budget) that any of `rows` has.

  Only such rows are comparable in a number that covers several datasets or
  budgets. `at` are the budgets that the number covers; None: all.
  """
  wanted = {cell for other in rows for cell in other.cells}
  if at is not None:
    wanted = {cell for cell in wanted if cell[1] in at}
  return wanted <= set(row.cells)


def lacks(row: Row, rows: Sequence[Row]) -> str:
  """Describes the budgets and datasets that only other rows have."""
  at = [str(b) for b in budgets(rows) if b not in budgets([row])]
  sets = [name for name in datasets(rows) if name not in datasets([row])]
  found = [f"B = {', '.join(at)}"] if at else []
  if sets:
    found.append(f"the sets {', '.join(sets)}" if len(sets) > 1 else sets[0])
  if not found and not complete(row, rows):
    found.append("some sets at some budgets")
  return " and ".join(found)


@dataclasses.dataclass(frozen=True, eq=False)
class Study:
  """The measurements of a study.

  Attributes:
    system: label of the first row, or of the first training run.
    controls: labels of the rows that the system must beat.
    trained: the largest budget of the system's training.
    rows: the rows; the first is the system.
    groups: by file name, the title and the rows that are shown together; the
      system is first.
    index: colour index of each row, training run and surface.
    training: the training runs of the rows.
    surfaces: accuracy over pairs of caps, of the rows that have it.
    compared: by label, the pairs of the system with each other row, and the
      paper's comparison of them.
    differences: by group of two or more rows, every pair in every measure.
    verdicts: the paper's claims on the system.
  """

  system: str
  controls: Sequence[str]
  trained: int
  rows: Sequence[Row]
  groups: Mapping[str, tuple[str, Sequence[Row]]]
  index: Mapping[str, int]
  training: Sequence[metrics.Training]
  surfaces: Sequence[curves.Surface]
  compared: Mapping[str, verdicts.Compared]
  differences: Mapping[str, Sequence[comparison.Difference]]
  verdicts: Sequence[verdicts.Verdict]


def measure(
  rows: Sequence[metrics.Row],
  controls: Sequence[str] = (),
  training: Sequence[metrics.Training] = (),
  *,
  groups: Mapping[str, str] | None = None,
  prices: budgets_lib.Prices | None = None,
  surfaces: Mapping[str, columns.Columns] | None = None,
  draws: int = 10_000,
) -> Study:
  """Measures rows on their own and against each other.

  Args:
    rows: the first is the system under test; empty if nothing was evaluated
      yet, then the study is of the training runs only.
    controls: labels of the rows that it must beat.
    training: the training runs of the rows.
    groups: by label, the ablation that the row belongs to: a key of `GROUPS`,
      or any name. If empty, all rows are one group.
    prices: prices for costs; None keeps the costs recorded in the episodes.
    surfaces: by label, episodes under pairs of caps on searches and tokens.
    draws: number of draws of each test by flipped signs, at least.

  Raises:
    ValueError: a row has budgets in more units than searches, or one of
      `surfaces` has none; there is neither a row nor a training run, a label
      occurs twice, a control or a label of `groups` is not a row, or rows were
      measured on different questions.
  """
  groups, paired = groups or {}, surfaces or {}
  labels = [row.label for row in rows]
  _check(labels, controls, training, groups)
  if prices:
    paired = {name: part.priced(prices) for name, part in paired.items()}
    rows = [
      dataclasses.replace(row, table=row.columns.priced(prices)) for row in rows
    ]
  system = labels[0] if rows else training[0].label
  trained = trained_budget(system, training)
  named = _groups(labels, groups)
  index = _colours(labels, named, [*(t.label for t in training), *paired])
  compared = {}
  for row in rows[1:]:
    pairs = comparison.pair(rows[0], row)
    compared[row.label] = pairs, comparison.compare(pairs)
  shown = [Row(r.label, index[r.label], r.columns, trained) for r in rows]
  return Study(
    system=system,
    controls=controls,
    trained=trained,
    rows=shown,
    groups={
      name: (title, [row for row in shown if row.label in members])
      for name, (title, members) in named.items()
    },
    index=index,
    training=training,
    surfaces=[curves.surface(*of) for of in paired.items()],
    compared=compared,
    differences={
      name: _differences([r for r in rows if r.label in members], draws)
      for name, (_, members) in named.items()
      if len(members) > 1
    },
    verdicts=verdicts.verdicts(
      rows, controls, compared=compared, recalled=shown[0].knowledge
    )
    if rows
    else (),
  )


def _check(
  labels: Sequence[str],
  controls: Sequence[str],
  training: Sequence[metrics.Training],
  groups: Mapping[str, str],
) -> None:
  """Checks that labels are unique, and that the others name rows."""
  if not labels and not training:
    raise ValueError(
      "Found no row and no training run; name at least the system under test."
    )
  if len(set(labels)) < len(labels):
    raise ValueError(f"Found two rows of one label in {labels}; rename one.")
  for label in controls:
    if label not in labels[1:]:
      raise ValueError(
        f"Control {label!r} is not a row after the first; expected one of "
        f"{labels[1:]}."
      )
  for label, title in groups.items():
    if label not in labels:
      raise ValueError(
        f"Table {title!r} names {label!r}, which is not a row; expected one "
        f"of {labels}."
      )


def trained_budget(label: str, training: Sequence[metrics.Training]) -> int:
  """Returns the largest training budget; the default one if unknown."""
  own = [run for run in training if run.label == label] or training[:1]
  default = config_lib.CurriculumConfig()
  curriculum = own[0].config.get("curriculum", {}) if own else {}
  fixed = curriculum.get("fixed_budget", default.fixed_budget)
  largest = curriculum.get("max_budget", default.max_budget)
  return fixed if fixed >= 0 else largest


def _groups(
  labels: Sequence[str], groups: Mapping[str, str]
) -> dict[str, tuple[str, list[str]]]:
  """Returns file name -> (title, labels), with the system first in each."""
  if not labels:
    return {}
  members: dict[str, list[str]] = {}
  for label in labels[1:] if groups else ():
    members.setdefault(groups.get(label, "other"), [labels[0]]).append(label)
  if not members:
    return {"rows": ("All rows", list(labels))}
  found: dict[str, tuple[str, list[str]]] = {}
  for title, together in members.items():
    name = re.sub(r"[^\w-]+", "_", title, flags=re.ASCII)[:40]
    name = f"{name}_{len(found)}" if name in found else name
    found[name] = (GROUPS.get(title, title), together)
  return found


def _colours(
  labels: Sequence[str],
  groups: Mapping[str, tuple[str, Sequence[str]]],
  others: Sequence[str],
) -> dict[str, int]:
  """Returns a colour index for each label, unique within its group."""
  index = {
    label: place
    for _, members in groups.values()
    for place, label in enumerate(members)
  }
  for label in others:
    index.setdefault(label, len(labels) + len(index))
  return index


def _differences(
  rows: Sequence[metrics.Row], draws: int
) -> Sequence[comparison.Difference]:
  """Compares every two rows of a group: a family of tests."""
  free = not any(np.nansum(row.columns.cost) for row in rows)
  cells = len({b for row in rows for b in metrics.budgets(row.columns)}) * len(
    {name for row in rows for name in row.columns.datasets}
  )
  return comparison.pairwise(
    rows,
    [m for m in comparison.MEASURES if not (free and m == "cost")],
    draws=max(draws, _DRAWS * cells * math.comb(len(rows), 2)),
  )


def offers(
  found: Sequence[curves.Curve],
) -> dict[str, tuple[curves.Offer, ...]]:
  """Returns offers by kind of price; without `cost` if all costs are 0."""
  offered = {
    against: curves.pareto(found, against)
    for against in ("searches", "tokens", "cost")
  }
  if not any(offer.price for offer in offered["cost"]):
    del offered["cost"]
  return offered


def verdict(study: Study) -> str:
  """Says in one sentence which rows the system beats, and by how much.

  Differences are in exact match over all B >= 1 and all datasets, with 95 %
  intervals. One counts as resolved if its p value, after Holm's correction over
  the pairs of its group, is below .05.
  """
  if not study.rows:
    return f"{study.system} was not evaluated yet."
  if len(study.rows) == 1:
    mean = study.rows[0].mean
    return (
      f"{study.system} answers {_with_interval(mean.accuracy)} of the "
      f"questions right with {_with_interval(mean.searches)} searches "
      "each, over all budgets; there is no other row to hold it against."
    )
  whole = {
    (d.theirs, d.measure): d
    for found in study.differences.values()
    for d in found
    if (d.ours, d.dataset, d.budget) == (study.system, None, None)
  }
  said: dict[str, list[str]] = {
    "is more accurate than": [],
    "is less accurate than": [],
    "cannot be told in accuracy from": [],
    "cannot be compared with": [],
  }
  for row in study.rows[1:]:
    difference = whole.get((row.label, "accuracy"))
    if difference is None or difference.estimate.value is None:
      said["cannot be compared with"].append(row.label)
      continue
    gain = difference.estimate
    made = whole[row.label, "searches"]
    outcome = "cannot be told in accuracy from"
    if _resolved(difference):
      outcome = (
        f"is {'more' if (gain.value or 0) > 0 else 'less'} accurate than"
      )
    text = f"{row.label} ({_with_interval(gain, sign='+')}"
    if _resolved(made) and (more := made.estimate.value):
      word = "fewer" if more < 0 else "more"
      text += f", with {abs(more):.2f} {word} searches"
    said[outcome].append(f"{text})")
  clauses = []
  for outcome, others in said.items():
    if not others:
      continue
    told = others[:_TOLD]
    if rest := len(others) - len(told):
      told.append(f"{rest} more")
    listed = " and ".join([*(", ".join(told[:-1]),) * bool(told[1:]), told[-1]])
    clauses.append(f"{outcome} {listed}")
  return f"{study.system} {'; it '.join(clauses)}."


def _resolved(difference: comparison.Difference) -> bool:
  return difference.adjusted is not None and difference.adjusted < _LEVEL


def _with_interval(found: inference.Estimate, sign: str = "") -> str:
  if found.value is None:
    return "an unknown share"
  text = f"{found.value:{sign}.3f}"
  if found.low is not None and found.high is not None:
    text += f" [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"
  return text.replace("-", "−")
