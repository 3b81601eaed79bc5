"""Compares two rows on the same questions.

This follows the paper's early-stopping analysis: both discordant counts, the
number of losses that left budget unused, and the net gain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from anysearch_jax.evaluation import (
  columns,
  intervals,
  measures,
  metrics,
  pairing,
)


@dataclasses.dataclass(frozen=True)
class Comparison:
  """The paper's early-stopping table for one budget.

  Attributes:
    budget: None: B >= 1 pooled.
    n: number of pairs.
    wins: number of pairs in which only we are right.
    losses: number of pairs in which only they are right.
    losses_unused: number of losses in which we left budget unused.
    net: wins - losses.
    difference: accuracy, ours minus theirs.
    tp_difference: tool productivity, ours minus theirs.
  """

  budget: int | None
  n: int
  wins: int
  losses: int
  losses_unused: int
  net: int
  difference: intervals.Estimate
  tp_difference: intervals.Estimate


@dataclasses.dataclass(frozen=True)
class Number:
  """A number that a verdict is based on, over `n` episodes or pairs."""

  label: str
  estimate: intervals.Estimate
  n: int


def compare(
  pairs: pairing.Pairs, *, resamples: int = 10_000
) -> list[Comparison]:
  """Compares two rows at every common budget, then pooled over B >= 1."""
  if not pairs.questions:
    return []
  cells: list[tuple[int | None, np.ndarray]] = [
    (int(b), pairs.budget == b) for b in np.unique(pairs.budget)
  ]
  if np.any(pairs.budget >= 1):
    cells.append((None, pairs.budget >= 1))
  masks = [mask for _, mask in cells]
  accuracy = differences(pairs, masks, resamples=resamples)
  tp = differences(pairs, masks, "tp", resamples=resamples)
  table = []
  for (budget, mask), d_accuracy, d_tp in zip(cells, accuracy, tp, strict=True):
    wins = mask & (pairs.ours.em > pairs.theirs.em)
    losses = mask & (pairs.ours.em < pairs.theirs.em)
    unused = losses & (pairs.ours.searches < pairs.budget)
    table.append(
      Comparison(
        budget=budget,
        n=int(mask.sum()),
        wins=int(wins.sum()),
        losses=int(losses.sum()),
        losses_unused=int(unused.sum()),
        net=int(wins.sum() - losses.sum()),
        difference=d_accuracy,
        tp_difference=d_tp,
      )
    )
  return table


def differences(
  pairs: pairing.Pairs,
  masks: Sequence[np.ndarray],
  measure: str = "accuracy",
  *,
  resamples: int = 10_000,
) -> list[intervals.Estimate]:
  """Returns a measure, ours minus theirs, inside each of S masks `[P]`.

  Episodes of several datasets are pooled with equal weights.
  """
  sides = [
    measures.columns_of(side)[part]
    for side in (pairs.ours, pairs.theirs)
    for part in measures.MEASURES[measure]
  ]
  sums = intervals.cluster_sums(
    pairs.question,
    [c * mask for mask in masks for c in sides],
    clusters=pairs.questions,
  )

  def difference(totals: np.ndarray) -> np.ndarray:
    t = totals.sum(axis=1)
    return intervals.ratio(t[:, 0::4], t[:, 1::4]) - intervals.ratio(
      t[:, 2::4], t[:, 3::4]
    )

  return intervals.bootstrap(
    sums, difference, stratum=pairs.stratum, resamples=resamples
  )


def productivities(
  measured: columns.Measured, *, resamples: int = 10_000
) -> dict[int | None, intervals.Estimate]:
  """Returns tool productivity by budget; the key None pools B >= 1."""
  found = measures.sums(measured, ("tp",))
  if not found.budgets:
    return {}
  parts = found.parts("tp")[:, :, 0]
  pooled = parts.sum(axis=1, keepdims=True)
  estimates = intervals.bootstrap(
    np.concatenate([parts, pooled], axis=1).reshape(len(parts), -1),
    lambda t: intervals.ratio(t[:, 0::2], t[:, 1::2]),
    resamples=resamples,
  )
  return dict(zip([*found.budgets, None], estimates, strict=True))


def knowledge(
  row: metrics.Row, *, resamples: int = 10_000
) -> dict[str, Number]:
  """Returns how often the first fact is searched, by the policy's memory of it.

  Returns:
    `known`, `unknown`, `stale` and `gap` (unknown minus known); empty if no
    question lists its facts.
  """
  table = row.columns.scored()
  table = table.where(table.kind != columns.NONE)
  if not len(table):
    return {}
  ids, question = np.unique(table.question, return_inverse=True)
  masks = [table.kind == kind for kind in range(len(columns.KINDS))]

  def rates(t: np.ndarray) -> np.ndarray:
    known, unknown, stale = intervals.ratio(t[:, 0::2], t[:, 1::2]).T
    return np.column_stack([known, unknown, stale, unknown - known])

  estimates = intervals.bootstrap(
    intervals.cluster_sums(
      question,
      [c * mask for mask in masks for c in (table.asked, 1.0)],
      clusters=len(ids),
    ),
    rates,
    resamples=resamples,
  )
  counts = [int(mask.sum()) for mask in masks]
  return {
    kind: Number(kind, estimate, n)
    for kind, estimate, n in zip(
      (*columns.KINDS, "gap"),
      estimates,
      [*counts, counts[0] + counts[1]],
      strict=True,
    )
  }
