"""Judges a run by the paper's claims.

Each claim is stated so that measured numbers can establish or refute it. A
claim that two things are alike names a margin, and is met only if the data
show that the difference lies within it (Schuirmann's two one-sided tests); few
data leave it undecided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from anysearch_jax.evaluation import comparison, inference, metrics

_TIGHT = (1, 2, 3, 4)  # Budgets that must beat closed-book answers (B = 0).
_AMPLE = 4  # From this budget on, no control may be better.
_LEVEL = 0.05  # Of a one-sided test.

# The largest difference in accuracy that counts as none.
MARGIN = 0.02

Compared = tuple[comparison.Pairs, Sequence[comparison.Comparison]]


@dataclasses.dataclass(frozen=True)
class Verdict:
  """A claim and its measurement.

  Attributes:
    claim: the claim.
    met: None if it was not judged, or if the data leave it undecided.
    text: the verdict with its reason.
    numbers: what it is based on.
    scope: what it is about, if that is less than the method.
  """

  claim: str
  met: bool | None
  text: str
  numbers: tuple[comparison.Number, ...] = ()
  scope: str = ""


def verdicts(
  rows: Sequence[metrics.Row],
  controls: Sequence[str],
  *,
  compared: Mapping[str, Compared],
  recalled: Mapping[str, comparison.Number],
) -> list[Verdict]:
  """Judges the first row by the five claims.

  Args:
    rows: the first is the system under test.
    controls: labels of the rows that it must beat.
    compared: by label, the comparison of the system with each other row.
    recalled: `comparison.knowledge` of the system.
  """
  system = rows[0]
  scaffolded = [
    row.label
    for row in rows[1:]
    if row.label not in controls
    and _same_policy(row, system)
    and row.columns.scaffold.all()
  ]
  alone = _scope({system.label: len(system.columns.runs)})
  held = {control: compared[control][0] for control in controls}
  scaffold = {label: compared[label][0] for label in scaffolded}
  return [
    _beats_closed_book(system, alone),
    _beats_productivity(
      {control: compared[control][1] for control in controls},
      _scope(_trainings(system.label, held)),
    ),
    _searches_what_it_lacks(recalled, alone),
    _needs_no_scaffold(scaffold, _scope(_trainings(system.label, scaffold))),
    _keeps_ample(held, _scope(_trainings(system.label, held))),
  ]


def _trainings(
  system: str, others: Mapping[str, comparison.Pairs]
) -> dict[str, int]:
  """Returns the number of trainings that were compared, by label.

  A row may have more: a comparison uses the seeds that both rows have.
  """
  sides = {
    label: [len(np.unique(side.run)) for side in (pairs.ours, pairs.theirs)]
    for label, pairs in others.items()
  }
  ours = min((mine for mine, _ in sides.values()), default=0)
  return {system: ours} | {
    label: theirs for label, (_, theirs) in sides.items()
  }


def _scope(trainings: Mapping[str, int]) -> str:
  """Says of which rows a verdict is about one policy only."""
  single = [label for label, count in trainings.items() if count < 2]
  if not single:
    return ""
  if len(trainings) == 1:
    return "This policy only: one training says nothing about others."
  return (
    f"These policies only: {', '.join(single)} "
    f"{'have' if len(single) > 1 else 'has'} one training here, which says "
    "nothing about others."
  )


def _same_policy(row: metrics.Row, system: metrics.Row) -> bool:
  if row.run and system.run:
    return row.run == system.run
  return row.label.startswith(system.label)


def _verdict(
  claim: str,
  met: bool | None,
  text: str,
  numbers: Iterable[comparison.Number],
  scope: str,
) -> Verdict:
  prefix = {True: "Met: ", False: "Not met: ", None: "Undecided: "}[met]
  return Verdict(claim, met, prefix + text, tuple(numbers), scope)


def _number(label: str, effect: inference.Effect, n: int) -> comparison.Number:
  return comparison.Number(label, effect.estimate, n, effect.detectable)


def _beats_closed_book(row: metrics.Row, scope: str) -> Verdict:
  claim = "Searching pays: accuracy at B = 1 to 4 is above B = 0."
  numbers = []
  for budget in _TIGHT:
    pairs = comparison.budgets_of(row, budget, 0)
    if pairs.questions:
      (effect,) = comparison.differences(pairs)
      label = f"accuracy, B = {budget} minus B = 0"
      numbers.append(_number(label, effect, len(pairs)))
  if not numbers:
    return Verdict(
      claim, None, "Not judged: B = 0 or all of B = 1 to 4 were not evaluated."
    )
  above = [n for n in numbers if n.estimate.above()]
  text = (
    f"the 95 % interval of the paired difference lies above zero at "
    f"{len(above)} of {len(numbers)} evaluated budgets."
  )
  return _verdict(claim, len(above) == len(numbers), text, numbers, scope)


def _beats_productivity(
  controls: Mapping[str, Sequence[comparison.Comparison]], scope: str
) -> Verdict:
  claim = (
    "More per search: tool productivity pooled over B >= 1 is above every "
    "control."
  )
  numbers = [
    comparison.Number(
      f"TP minus {label}",
      table[-1].tp_difference,
      table[-1].n,
      table[-1].tp_detectable,
    )
    for label, table in controls.items()
    if table and table[-1].budget is None
  ]
  if not numbers:
    return Verdict(claim, None, "Not judged: no control was given with B >= 1.")
  above = [n for n in numbers if n.estimate.above()]
  undefined = [n for n in numbers if n.estimate.low is None]
  text = (
    f"the 95 % interval of the paired difference lies above zero against "
    f"{len(above)} of {len(controls)} controls"
    + (f"; {len(undefined)} have none, too few searches" if undefined else "")
    + "."
  )
  return _verdict(claim, len(above) == len(controls), text, numbers, scope)


def _searches_what_it_lacks(
  recalled: Mapping[str, comparison.Number], scope: str
) -> Verdict:
  claim = (
    "Searches what it does not know: P(search | known) is well below "
    "P(search | unknown), at most half of it."
  )
  known = recalled["known"].estimate.value if recalled else None
  unknown = recalled["unknown"].estimate.value if recalled else None
  if known is None or not unknown:
    return Verdict(
      claim,
      None,
      "Not judged: the questions do not tell which facts the model knows.",
    )
  met = recalled["half"].estimate.above()
  text = (
    f"{known:.3f} when known, {unknown:.3f} when unknown; the first is "
    f"{known / unknown:.2f} of the second, and the 95 % interval of half the "
    f"second minus the first {'lies' if met else 'does not lie'} above zero."
  )
  labels = {
    "known": "P(search | known)",
    "unknown": "P(search | unknown)",
    "gap": "unknown minus known",
    "half": "half of unknown minus known",
  }
  numbers = [
    dataclasses.replace(recalled[k], label=v) for k, v in labels.items()
  ]
  return _verdict(claim, met, text, numbers, scope)


def _needs_no_scaffold(
  scaffolded: Mapping[str, comparison.Pairs], scope: str
) -> Verdict:
  claim = (
    "Internalised: the scaffold at inference changes accuracy by less than "
    f"{MARGIN}, in either direction."
  )
  found = {
    label: (comparison.differences(pairs)[0], len(pairs))
    for label, pairs in scaffolded.items()
    if pairs.questions
  }
  if not found:
    return Verdict(
      claim, None, "Not judged: no row of this policy with the scaffold on."
    )
  shown = [_shown(effect.within(MARGIN)) for effect, _ in found.values()]
  outside = [
    effect.estimate.above(MARGIN) or effect.estimate.below(-MARGIN)
    for effect, _ in found.values()
  ]
  text = (
    f"two one-sided tests at 5 % place the difference within {MARGIN} for "
    f"{sum(shown)} of {len(shown)} rows; for {sum(outside)} its 95 % interval "
    "lies outside."
  )
  numbers = [
    _number(f"accuracy, without scaffold minus {label}", effect, n)
    for label, (effect, n) in found.items()
  ]
  return _verdict(claim, _decided(shown, outside), text, numbers, scope)


def _keeps_ample(
  controls: Mapping[str, comparison.Pairs], scope: str
) -> Verdict:
  claim = (
    f"No price at ample budgets: accuracy pooled over B >= {_AMPLE} is at most "
    f"{MARGIN} below every control."
  )
  numbers, readings, shown, outside = [], [], [], []
  for label, pairs in controls.items():
    ample = sorted({int(b) for b in pairs.budget if b >= _AMPLE})
    if not ample:
      continue
    (effect,) = comparison.differences(pairs, pools=[ample])
    n = int((pairs.budget >= _AMPLE).sum())
    numbers.append(_number(f"accuracy minus {label}", effect, n))
    shown.append(_shown(effect.not_below(-MARGIN)))
    outside.append(effect.estimate.below(-MARGIN))
    readings.append(
      f"more than {MARGIN} below {label}"
      if outside[-1]
      else f"at most {MARGIN} below {label}"
      if shown[-1]
      else f"no telling from {label}"
    )
  if not numbers:
    return Verdict(
      claim, None, f"Not judged: no control was given with B >= {_AMPLE}."
    )
  text = f"{', '.join(readings)} (one-sided tests at 5 %)."
  return _verdict(claim, _decided(shown, outside), text, numbers, scope)


def _shown(p: float | None) -> bool:
  return p is not None and p < _LEVEL


def _decided(shown: Sequence[bool], outside: Sequence[bool]) -> bool | None:
  """Returns True if all are shown, False if one is refuted, otherwise None."""
  if any(outside):
    return False
  return True if all(shown) else None
