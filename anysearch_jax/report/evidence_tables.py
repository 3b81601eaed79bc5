"""Tables of a study over trainings, and what becomes of each claim."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from anysearch_jax.evaluation import (
  inference,
  linear,
  measures,
  outcomes,
  significance,
)
from anysearch_jax.report import tables

ALPHA = 0.05
_DIGITS = {"accuracy": 3, "tp": 3, "searches": 2}
_MEASURES = tuple(_DIGITS)


@dataclasses.dataclass(frozen=True)
class Claim:
  """A claim that one row has more of a measure than another.

  Attributes:
    text: the claim, as a sentence.
    more, less: names of the two rows.
    measure: `accuracy`, `tp` or `searches`.
    budgets: the budgets to pool, those that both rows were asked at; empty: all
      that are at least 1.
  """

  text: str
  more: str
  less: str
  measure: str
  budgets: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What the trainings say of a claim.

  Attributes:
    claim: the claim.
    effect: the difference; None if a row is missing.
    p: two-sided, with Holm's correction over all claims whose rows have at
      least two trainings each; None for the others.
    trainings: how many pairs there are; without pairs, how many trainings the
      row with fewer has.
  """

  claim: Claim
  effect: inference.Effect | None
  p: float | None
  trainings: int

  @property
  def word(self) -> str:
    """`reproduced`, `refuted`, `not resolved`, `one training`, `not run`."""
    if self.effect is None:
      return "not run"
    if self.trainings < 2:
      return "one training"
    if self.p is None or self.p >= ALPHA or not self.effect.estimate.value:
      return "not resolved"
    return "reproduced" if self.effect.estimate.value > 0 else "refuted"


Trainings = Mapping[str, Sequence[outcomes.Outcomes]]


def accuracy(rows: Trainings, labels: Mapping[str, str]) -> tables.Table:
  """Tabulates accuracy by budget, and all measures pooled over B >= 1.

  Args:
    rows: the trainings of each row, by its name, in the order of the table.
    labels: labels of the rows.
  """
  budgets = sorted(
    {b for found in rows.values() for b in found[0].budgets if b >= 1}
  )
  lines = []
  for name, found in rows.items():
    sums = outcomes.sums(found)
    by_budget = dict(
      zip(
        [b for b in sums.budgets if b >= 1],
        measures.inferred(
          (each := _numbers(sums, "accuracy", _each(sums))),
          ["accuracy"] * len(each.value),
        ),
        strict=True,
      )
    )
    pooled = [
      measures.inferred(_numbers(sums, m, _pool(sums, ())), [m])[0]
      for m in _MEASURES
    ]
    lines.append(
      tables.Line(
        (labels[name],),
        (
          tables.Cell(len(found)),
          *(
            tables.Cell(by_budget[b].value) if b in by_budget else None
            for b in budgets
          ),
          *map(tables.cell, pooled),
        ),
      )
    )
  return tables.Table(
    "accuracy",
    "Accuracy by budget",
    "The last three columns pool all budgets of at least 1. Intervals of 95 % "
    "cover other questions and, with several trainings, other trainings.",
    ("row",),
    (
      tables.Column("trainings", digits=0),
      *(tables.Column(f"B = {b}", best=True) for b in budgets),
      tables.Column("pooled", best=True),
      tables.Column("TP", best=True),
      tables.Column("searches", digits=2),
    ),
    tuple(lines),
  )


def against(
  first: str, rows: Trainings, labels: Mapping[str, str]
) -> tables.Table:
  """Tabulates the differences of all rows from one, pooled over B >= 1.

  Args:
    first: name of that row, which `rows` has.
    rows, labels: as of `accuracy`.
  """
  others = [name for name in rows if name != first]
  found = {
    (name, m): difference(rows[name], rows[first], m)
    for name in others
    for m in _MEASURES
  }
  adjusted = {
    m: significance.holm(
      [_nan(found[name, m].p) for name in others] or [np.nan]
    )
    for m in _MEASURES
  }
  lines = []
  for place, name in enumerate(others):
    cells = []
    for m in _MEASURES:
      effect = found[name, m]
      cells += [
        tables.cell(effect.estimate),
        tables.Cell(_number(adjusted[m][place])),
        tables.Cell(effect.detectable),
      ]
    lines.append(tables.Line((labels[name],), tuple(cells)))
  return tables.Table(
    "against",
    f"Every row minus {labels[first]}",
    "All budgets of at least 1 pooled. p is two-sided, with Holm's correction "
    "over the rows; detectable is the smallest true difference that would be "
    "found with a probability of 80 %.",
    ("row",),
    tuple(
      column
      for m in _MEASURES
      for column in (
        tables.Column("difference", m, _DIGITS[m], signed=True),
        tables.Column("p", m, 4),
        tables.Column("detectable", m, _DIGITS[m]),
      )
    ),
    tuple(lines),
  )


def verdicts(claims: Sequence[Claim], rows: Trainings) -> list[Verdict]:
  """Returns what the trainings say of each claim.

  Raises:
    ValueError: a claim names budgets that one of its rows was not asked at.
  """
  effects = [
    difference(rows[c.more], rows[c.less], c.measure, c.budgets)
    if c.more in rows and c.less in rows
    else None
    for c in claims
  ]
  trainings = [
    min(map(len, _paired(rows.get(c.more, ()), rows.get(c.less, ()))))
    for c in claims
  ]
  # One training of a row tells nothing of its others.
  p = significance.holm(
    [
      np.nan if effect is None or count < 2 else _nan(effect.p)
      for effect, count in zip(effects, trainings)
    ]
    or [np.nan]
  )
  return [
    Verdict(claim, effect, _number(value), count)
    for claim, effect, value, count in zip(
      claims, effects, p, trainings, strict=False
    )
  ]


def claims_table(found: Sequence[Verdict]) -> str:
  """Returns the claims as a table in Markdown, a line each."""
  lines = ["| claim | difference | p | verdict |", "|---|---|---|---|"]
  for one in found:
    claim, effect = one.claim, one.effect
    told = p = ""
    if effect is not None:
      digits = _DIGITS[claim.measure]
      ends = [
        "?" if x is None else f"{x:+.{digits}f}"
        for x in (
          effect.estimate.value,
          effect.estimate.low,
          effect.estimate.high,
        )
      ]
      told = f"{ends[0]} [{ends[1]}, {ends[2]}]"
      p = "" if one.p is None else f"{one.p:.4f}"
    word = one.word
    if word == "not resolved" and effect and effect.detectable is not None:
      word += f" (detectable: {effect.detectable:.3f})"
    text = tables.escaped(f"{claim.text} ({claim.measure})")
    lines.append(f"| {text} | {told} | {p} | {word} |")
  return "\n".join(lines) + "\n"


def difference(
  ours: Sequence[outcomes.Outcomes],
  theirs: Sequence[outcomes.Outcomes],
  measure: str,
  budgets: Sequence[int] = (),
) -> inference.Effect:
  """Returns a measure of one row minus that of another.

  Questions are paired, and so are trainings with equal seeds, which see the
  same questions and share their random draws. Trainings whose seed the other
  row lacks count only if the rows have no seed in common.

  Args:
    ours, theirs: trainings of the rows.
    measure: key of `measures.MEASURES` that outcomes have.
    budgets: the budgets to pool; empty: all that are at least 1.

  Raises:
    ValueError: the rows were asked other questions, or not at these budgets.
  """
  if ours[0].questions != theirs[0].questions:
    raise ValueError(
      f"{ours[0].row} and {theirs[0].row} were asked different questions; "
      "expected the same. Run one of them again."
    )
  sides = (outcomes.sums(side) for side in _paired(ours, theirs))
  parts = [_numbers(side, measure, _pool(side, budgets)) for side in sides]
  return inference.effects(linear.minus(*parts))[0]


def _paired(
  ours: Sequence[outcomes.Outcomes], theirs: Sequence[outcomes.Outcomes]
) -> tuple[Sequence[outcomes.Outcomes], Sequence[outcomes.Outcomes]]:
  """Returns the trainings whose seed both have; all if there is none."""
  common = {one.seed for one in ours} & {one.seed for one in theirs}
  if not common:
    return ours, theirs
  paired = [
    [one for one in side if one.seed in common] for side in (ours, theirs)
  ]
  return paired[0], paired[1]


def _numbers(
  sums: measures.Sums, measure: str, pools: np.ndarray
) -> linear.Linear:
  return sums.linearised((measure,), pools)


def _each(sums: measures.Sums) -> np.ndarray:
  """Returns one pool for each budget of at least 1."""
  eye = np.eye(len(sums.budgets), dtype=bool)
  return eye[np.asarray(sums.budgets) >= 1]


def _pool(sums: measures.Sums, budgets: Sequence[int]) -> np.ndarray:
  """Returns the one pool of some budgets; empty: all of at least 1."""
  missing = set(budgets) - set(sums.budgets)
  if missing:
    raise ValueError(
      f"Found no answers at budgets {sorted(missing)}; expected some of "
      f"{', '.join(map(str, sums.budgets))}."
    )
  of = np.asarray(sums.budgets)
  return (np.isin(of, budgets) if budgets else of >= 1)[None]


def _nan(p: float | None) -> float:
  return np.nan if p is None else p


def _number(value: float) -> float | None:
  return None if np.isnan(value) else float(value)
