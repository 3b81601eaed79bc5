"""The rows of a study, its tables over trainings, and its claims."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import anysearch_jax as aj
from research import outcomes

ALPHA = 0.05
# The rule by which trainings stop, fixed before them: a row gets five, and ten
# if a claim about it was named as such (`Claim.ten`) before the sixth.
FIRST_SEED, TRAININGS, MORE = 42, 5, 10
# As `policy_of`: the policy of the base configuration, before training.
UNTRAINED = "untrained"
_DIGITS = {"accuracy": 3, "tp": 3, "searches": 2}
_MEASURES = tuple(_DIGITS)

Trainings = Mapping[str, Sequence[outcomes.Outcomes]]


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of a table.

  Attributes:
    name: name in paths.
    label: label in the paper and the report.
    table: table of the report.
    overrides: `path=value` overrides of the training configuration.
    evaluation: `path=value` overrides of the evaluation only.
    config: configuration file of training and evaluation; "" is the study's.
    policy_of: the row whose policy this row evaluates, or `UNTRAINED`; "" means
      that this row trains its own.
    scaffold: whether the scaffold stays on at inference.
  """

  name: str
  label: str
  table: str
  overrides: tuple[str, ...] = ()
  evaluation: tuple[str, ...] = ()
  config: str = ""
  policy_of: str = ""
  scaffold: bool = False


class Claim(NamedTuple):
  """A claim that one row has more of a measure than another.

  Attributes:
    text: the claim, as a sentence.
    more, less: names of the two rows.
    measure: `accuracy`, `tp` or `searches`.
    budgets: the budgets to pool, those that both rows were asked at; empty: all
      that are at least 1.
    ten: whether it is decided with `MORE` trainings of each row.
  """

  text: str
  more: str
  less: str
  measure: str
  budgets: tuple[int, ...] = ()
  ten: bool = False


TIGHT, AMPLE = (1, 2, 3), (6, 7, 8)


def above(who: str, more: str, less: str, whom: str) -> list[Claim]:
  """Returns that row `more` (`who`) is above row `less` (`whom`).

  In accuracy at tight, at ample and at all budgets, and in TP.
  """
  of: list[tuple[str, str, tuple[int, ...]]] = [
    ("at B = 1 to 3", "accuracy", TIGHT),
    ("at B = 6 to 8", "accuracy", AMPLE),
    ("in all", "accuracy", ()),
    ("in all", "tp", ()),
  ]
  return [
    Claim(f"{who} is above {whom} {where}", more, less, measure, budgets)
    for where, measure, budgets in of
  ]


class Finding(NamedTuple):
  """What the trainings say of a claim.

  Attributes:
    claim: the claim.
    effect: the difference; None if trainings are missing.
    p: two-sided, with Holm's correction over the decided claims; nan for the
      others.
    word: `reproduced`, `refuted`, `not resolved`, or `not decided` with the
      number of trainings that there are.
  """

  claim: Claim
  effect: aj.inference.Effect | None
  p: float
  word: str


def decide(
  claims: Sequence[Claim],
  rows: Trainings,
  trainings: int = TRAININGS,
  trained_as: Mapping[str, str] = MappingProxyType({}),
) -> list[Finding]:
  """Returns what the trainings say of each claim of a family.

  A claim is decided with the first `trainings` seeds of both rows, or with the
  first `MORE`, once all of them are there: with fewer than three never.

  Args:
    claims: the family.
    rows: the trainings of each row, by its name.
    trainings: number of first seeds.
    trained_as: of rows that evaluate the policies of another, that one's name.

  Raises:
    ValueError: a claim names budgets that one of its rows was not asked at.
  """
  effects, words = [], []
  for c in claims:
    wanted = MORE if c.ten else trainings
    more, less = (first(rows.get(name, ()), wanted) for name in c[1:3])
    count = min(len(more), len(less))
    words.append(f"not decided: {count} of {wanted} trainings")
    whole = count == wanted
    effects.append(
      difference(more, less, c.measure, c.budgets, trained_as)
      if whole
      else None
    )
  p = _holm(effect.p if effect else None for effect in effects)
  return [
    Finding(claim, effect, value, _word(effect, value, word))
    for claim, effect, value, word in zip(
      claims, effects, p, words, strict=True
    )
  ]


def first(
  found: Iterable[outcomes.Outcomes], trainings: int
) -> list[outcomes.Outcomes]:
  """Returns the trainings of the first seeds."""
  seeds = range(FIRST_SEED, FIRST_SEED + trainings)
  return [one for one in found if one.seed in seeds]


def _word(effect: aj.inference.Effect | None, p: float, otherwise: str) -> str:
  if effect is None or effect.p is None:
    return otherwise
  if not p < ALPHA or not effect.estimate.value:
    return "not resolved"
  return "reproduced" if effect.estimate.value > 0 else "refuted"


def _holm(found: Iterable[float | None]) -> list[float]:
  """Returns p values with Holm's correction; those that are None become nan."""
  p = [np.nan if one is None else one for one in found]
  return aj.inference.holm(p).tolist()


def difference(
  ours: Sequence[outcomes.Outcomes],
  theirs: Sequence[outcomes.Outcomes],
  measure: str,
  budgets: Sequence[int] = (),
  trained_as: Mapping[str, str] = MappingProxyType({}),
) -> aj.inference.Effect:
  """Returns a measure of one row minus that of another.

  Questions are paired. Trainings are paired if the rows evaluate the same
  policies; otherwise they are independent draws, also with equal seeds.

  Args:
    ours, theirs: trainings of the rows.
    measure: `accuracy`, `tp` or `searches`.
    budgets: the budgets to pool; empty: all that are at least 1.
    trained_as: as of `decide`.

  Raises:
    ValueError: the rows were asked other questions, or not at these budgets.
  """
  if ours[0].questions != theirs[0].questions:
    raise ValueError(
      f"{ours[0].row} and {theirs[0].row} were asked different questions; "
      "expected the same. Run one of them again."
    )
  sides = [
    outcomes.sums(side, trained_as.get(side[0].row, ""))
    for side in (ours, theirs)
  ]
  parts = [
    side.linearised((measure,), _pool(side.budgets, budgets)) for side in sides
  ]
  return aj.inference.effects(aj.inference.minus(*parts))[0]


def _pool(known: Sequence[int], budgets: Sequence[int]) -> np.ndarray:
  """Returns the one pool of some budgets, bool `[1, B]`; empty: all from 1."""
  if missing := set(budgets) - set(known):
    raise ValueError(
      f"Found no answers at budgets {sorted(missing)}; expected some of "
      f"{', '.join(map(str, known))}."
    )
  of = np.asarray(known)
  return (np.isin(of, budgets) if budgets else of >= 1)[None]


def page(
  title: str,
  rows: Sequence[Row],
  families: Mapping[str, Sequence[Claim]],
  found: Iterable[outcomes.Outcomes],
  trainings: int = TRAININGS,
) -> str:
  """Returns the tables and the claims of a study as Markdown.

  Args:
    title: of the page.
    rows: of the study, the one that others are compared with first.
    families: the claims, by the heading under which they are decided.
    found: outcomes of any rows of the study.
    trainings: number of first seeds that every row of the page has.
  """
  by_row: dict[str, list[outcomes.Outcomes]] = {row.name: [] for row in rows}
  for one in sorted(found, key=lambda one: one.seed):
    by_row.setdefault(one.row, []).append(one)
  labels = {row.name: row.label for row in rows}
  whole = {
    name: own
    for name, some in by_row.items()
    for own in [first(some, trainings)]
    if len(own) == trainings
  }
  trained_as = {row.name: row.policy_of for row in rows if row.policy_of}
  base = rows[0].name
  seeds = map(str, range(FIRST_SEED, FIRST_SEED + trainings))
  parts = [
    f"# {title}\n",
    f"Every row has a training with each of the seeds {', '.join(seeds)}.\n",
  ]
  if lacking := [
    f"{labels.get(name, name)} ({len(first(some, trainings))})"
    for name, some in by_row.items()
    if some and name not in whole
  ]:
    parts.append(
      f"Left out, with fewer of these trainings: {', '.join(lacking)}.\n"
    )
  for table in dict.fromkeys(row.table for row in rows):
    shown = {
      row.name: whole[row.name]
      for row in rows
      if row.name in whole and (row.table == table or row.name == base)
    }
    if not shown.keys() - {base} and table != rows[0].table:
      continue
    parts += [f"## {table}\n", accuracy(shown, labels)]
    if base in shown and len(shown) > 1:
      words = "Holm's correction is over these rows, in each measure."
      parts += [
        f"Minus {labels[base]}. {words}\n",
        against(base, shown, labels, trained_as),
      ]
  for heading, claims in families.items():
    decided = decide(claims, by_row, trainings, trained_as)
    count = sum(not np.isnan(one.p) for one in decided)
    parts += [
      f"## Claims: {heading}\n",
      f"Holm's correction is over the {count} claims of this table that are "
      f"decided, with {trainings} trainings of each row"
      f"{f' ({MORE} where noted)' if any(c.ten for c in claims) else ''}.\n",
      claims_table(decided),
    ]
  return "\n".join(parts)


def accuracy(rows: Trainings, labels: Mapping[str, str]) -> str:
  """Tabulates accuracy by budget, and all measures pooled over B >= 1.

  Intervals of 95 % cover other questions and, with several trainings, other
  trainings.

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
    each = np.eye(len(sums.budgets), dtype=bool)
    heights = sums.linearised(("accuracy",), each).value
    by_budget = dict(zip(sums.budgets, heights, strict=True))
    pool = _pool(sums.budgets, ())
    pooled = [
      aj.measures.inferred(sums.linearised((m,), pool), [m])[0]
      for m in _MEASURES
    ]
    lines.append(
      [labels[name]]
      + [f"{by_budget[b]:.3f}" if b in by_budget else "" for b in budgets]
      + [_shown(one, m) for one, m in zip(pooled, _MEASURES, strict=True)]
    )
  head = ["row", *(f"B = {b}" for b in budgets)]
  return _table([*head, "pooled", "TP", "searches"], lines)


def against(
  base: str,
  rows: Trainings,
  labels: Mapping[str, str],
  trained_as: Mapping[str, str] = MappingProxyType({}),
) -> str:
  """Tabulates the differences of all rows from one, pooled over B >= 1.

  p is two-sided, with Holm's correction over the rows; detectable is the
  smallest true difference that would be found with a probability of 80 %.

  Args:
    base: name of that row, which `rows` has.
    rows, labels: as of `accuracy`.
    trained_as: as of `decide`.
  """
  others = [name for name in rows if name != base]
  lines: list[list[str]] = [[labels[name]] for name in others]
  for m in _MEASURES:
    effects = [
      difference(rows[name], rows[base], m, trained_as=trained_as)
      for name in others
    ]
    p = _holm(effect.p for effect in effects)
    for line, effect, value in zip(lines, effects, p, strict=True):
      line += [
        _shown(effect.estimate, m, signed=True),
        _number(value, 4),
        _number(effect.detectable, _DIGITS[m]),
      ]
  head = [f"{m}{part}" for m in _MEASURES for part in ("", " p", " detectable")]
  return _table(["row", *head], lines)


def claims_table(found: Sequence[Finding]) -> str:
  """Tabulates what became of claims, a line each."""
  lines = []
  for claim, effect, p, word in found:
    if word == "not resolved" and effect and effect.detectable is not None:
      word += f" (detectable: {effect.detectable:.3f})"
    lines.append(
      [
        f"{claim.text} ({claim.measure}"
        f"{f', {MORE} trainings' if claim.ten else ''})",
        _shown(effect.estimate, claim.measure, signed=True) if effect else "",
        _number(p, 4),
        word,
      ]
    )
  return _table(["claim", "difference", "p", "verdict"], lines)


def _shown(
  estimate: aj.inference.Estimate, measure: str, *, signed: bool = False
) -> str:
  """Returns an estimate with its interval."""
  form = f"{'+' if signed else ''}.{_DIGITS[measure]}f"
  if estimate.value is None:
    return ""
  ends = ("?" if x is None else f"{x:{form}}" for x in estimate[1:])
  return f"{estimate.value:{form}} [{', '.join(ends)}]"


def _number(value: Any, digits: int) -> str:
  return "" if value is None or np.isnan(value) else f"{value:.{digits}f}"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
  """Returns a table in Markdown."""
  rows = [head, ["---"] * len(head), *lines]
  return "".join(f"| {' | '.join(row)} |\n" for row in rows)
