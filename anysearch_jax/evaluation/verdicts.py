"""Judges a run by the paper's claims.

Each claim is stated so that measured numbers can refute it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from anysearch_jax.evaluation import comparison, intervals, metrics, pairing

_TIGHT = (1, 2, 3, 4)  # Budgets that must beat closed-book answers (B = 0).
_AMPLE = 4  # From this budget on, no control may be better.
_WELL_BELOW = 0.5  # Largest P(search | known) / P(search | unknown).

Compared = tuple[pairing.Pairs, Sequence[comparison.Comparison]]


@dataclasses.dataclass(frozen=True)
class Verdict:
  """A claim and its measurement; `met` is None if it cannot be judged."""

  claim: str
  met: bool | None
  text: str
  numbers: tuple[comparison.Number, ...] = ()


def verdicts(
  rows: Sequence[metrics.Row],
  controls: Sequence[str],
  *,
  compared: Mapping[str, Compared],
  recalled: Mapping[str, comparison.Number],
  resamples: int = 10_000,
) -> list[Verdict]:
  """Judges the first row by the five claims.

  Args:
    rows: the first is the system under test.
    controls: labels of the rows that it must beat.
    compared: by label, the comparison of the system with each other row.
    recalled: `comparison.knowledge` of the system.
    resamples: number of bootstrap resamples.
  """
  system = rows[0]
  scaffolded = [
    row.label
    for row in rows[1:]
    if row.label not in controls
    and _same_policy(row, system)
    and row.columns.scaffold.all()
  ]
  return [
    _beats_closed_book(system, resamples),
    _beats_productivity({c: compared[c][1] for c in controls}),
    _searches_what_it_lacks(recalled),
    _needs_no_scaffold({s: compared[s][0] for s in scaffolded}, resamples),
    _keeps_ample({c: compared[c][0] for c in controls}, resamples),
  ]


def _same_policy(row: metrics.Row, system: metrics.Row) -> bool:
  if row.run and system.run:
    return row.run == system.run
  return row.label.startswith(system.label)


def _verdict(
  claim: str, met: bool, text: str, numbers: Iterable[comparison.Number]
) -> Verdict:
  prefix = "Met: " if met else "Not met: "
  return Verdict(claim, met, prefix + text, tuple(numbers))


def _beats_closed_book(row: metrics.Row, resamples: int) -> Verdict:
  claim = "Searching pays: accuracy at B = 1 to 4 is above B = 0."
  numbers = []
  for budget in _TIGHT:
    pairs = pairing.budgets_of(row, budget, 0)
    if pairs.questions:
      everything = np.ones_like(pairs.budget, dtype=bool)
      (estimate,) = comparison.differences(
        pairs, [everything], resamples=resamples
      )
      label = f"accuracy, B = {budget} minus B = 0"
      numbers.append(comparison.Number(label, estimate, len(pairs.budget)))
  if not numbers:
    return Verdict(
      claim, None, "Not judged: B = 0 or all of B = 1 to 4 were not evaluated."
    )
  above = [n for n in numbers if n.estimate.above()]
  text = (
    f"the 95 % interval of the paired difference lies above zero at "
    f"{len(above)} of {len(numbers)} evaluated budgets."
  )
  return _verdict(claim, len(above) == len(numbers), text, numbers)


def _beats_productivity(
  controls: Mapping[str, Sequence[comparison.Comparison]],
) -> Verdict:
  claim = (
    "More per search: tool productivity pooled over B >= 1 is above every "
    "control."
  )
  numbers = [
    comparison.Number(f"TP minus {label}", table[-1].tp_difference, table[-1].n)
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
  return _verdict(claim, len(above) == len(controls), text, numbers)


def _searches_what_it_lacks(
  recalled: Mapping[str, comparison.Number],
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
  low = recalled["gap"].estimate.above()
  text = (
    f"{known:.3f} when known, {unknown:.3f} when unknown; the interval of the "
    f"gap {'lies' if low else 'does not lie'} above zero and the first is "
    f"{known / unknown:.2f} of the second."
  )
  labels = {
    "known": "P(search | known)",
    "unknown": "P(search | unknown)",
    "gap": "unknown minus known",
  }
  numbers = [
    dataclasses.replace(recalled[k], label=v) for k, v in labels.items()
  ]
  return _verdict(claim, low and known <= _WELL_BELOW * unknown, text, numbers)


def _needs_no_scaffold(
  scaffolded: Mapping[str, pairing.Pairs], resamples: int
) -> Verdict:
  claim = (
    "Internalised: the scaffold at inference changes accuracy by less than "
    "the interval tells apart from nothing."
  )
  numbers = []
  for label, pairs in scaffolded.items():
    mask = pairs.budget >= 0
    if pairs.questions:
      (e,) = comparison.differences(pairs, [mask], resamples=resamples)
      without = f"accuracy, without scaffold minus {label}"
      numbers.append(comparison.Number(without, e, int(mask.sum())))
  if not numbers:
    return Verdict(
      claim, None, "Not judged: no row of this policy with the scaffold on."
    )
  held = [
    n for n in numbers if not n.estimate.above() and not n.estimate.below()
  ]
  widest = max(_half_width(n.estimate) for n in numbers)
  text = (
    f"the 95 % interval of the difference holds zero for {len(held)} of "
    f"{len(numbers)} rows; an effect under about {widest:.3f} would not show."
  )
  return _verdict(claim, len(held) == len(numbers), text, numbers)


def _half_width(difference: intervals.Estimate) -> float:
  """Returns half the width of an interval; 1, the largest, without one."""
  if difference.low is None or difference.high is None:
    return 1.0
  return (difference.high - difference.low) / 2


def _keeps_ample(
  controls: Mapping[str, pairing.Pairs], resamples: int
) -> Verdict:
  claim = (
    f"No price at ample budgets: accuracy pooled over B >= {_AMPLE} is not "
    "below any control."
  )
  numbers, readings = [], []
  for label, pairs in controls.items():
    mask = pairs.budget >= _AMPLE
    if mask.any():
      (e,) = comparison.differences(pairs, [mask], resamples=resamples)
      numbers.append(
        comparison.Number(f"accuracy minus {label}", e, int(mask.sum()))
      )
      readings.append(
        f"below {label}"
        if e.below()
        else f"above {label}"
        if e.above()
        else f"no difference resolved from {label}"
      )
  if not numbers:
    return Verdict(
      claim, None, f"Not judged: no control was given with B >= {_AMPLE}."
    )
  met = not any(n.estimate.below() for n in numbers)
  text = f"{', '.join(readings)} (95 % intervals of the paired difference)."
  return _verdict(claim, met, text, numbers)
