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
  inference,
  intervals,
  linear,
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
    detectable, tp_detectable: the smallest true difference that would be
      found, see `inference.Effect`.
  """

  budget: int | None
  n: int
  wins: int
  losses: int
  losses_unused: int
  net: int
  difference: intervals.Estimate
  tp_difference: intervals.Estimate
  detectable: float | None = None
  tp_detectable: float | None = None


@dataclasses.dataclass(frozen=True)
class Number:
  """A number that a verdict is based on, over `n` episodes or pairs.

  `detectable` is the smallest true effect that would be found; None for what
  is not an effect.
  """

  label: str
  estimate: intervals.Estimate
  n: int
  detectable: float | None = None


def compare(pairs: pairing.Pairs) -> list[Comparison]:
  """Compares two rows at every common budget, then pooled over B >= 1."""
  if not pairs.questions:
    return []
  cells: list[tuple[int | None, Sequence[int]]] = [
    (int(b), [int(b)]) for b in np.unique(pairs.budget)
  ]
  used = [b for b, _ in cells if b]
  if used:
    cells.append((None, used))
  pools = [pool for _, pool in cells]
  accuracy = differences(pairs, "accuracy", pools)
  tp = differences(pairs, "tp", pools)
  table = []
  for (budget, pool), d_accuracy, d_tp in zip(cells, accuracy, tp, strict=True):
    mask = np.isin(pairs.budget, pool)
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
        difference=d_accuracy.estimate,
        tp_difference=d_tp.estimate,
        detectable=d_accuracy.detectable,
        tp_detectable=d_tp.detectable,
      )
    )
  return table


def differences(
  pairs: pairing.Pairs,
  measure: str = "accuracy",
  pools: Sequence[Sequence[int]] | None = None,
) -> list[inference.Effect]:
  """Returns a measure, ours minus theirs.

  Episodes of several datasets are pooled with equal weights.

  Args:
    pairs: the episodes of both rows.
    measure: key of `measures.MEASURES`.
    pools: budgets to pool, one list for each difference; None: one pool of
      all, for rows that were played at different budgets.
  """
  sides = []
  for side in (pairs.ours, pairs.theirs):
    found = measures.sums(side, (measure,))
    masks = (
      None
      if pools is None
      else np.array([np.isin(found.budgets, pool) for pool in pools])
    )
    sides.append(found.linearised((measure,), masks))
  return inference.effects(linear.minus(*sides))


def productivities(
  measured: columns.Measured,
) -> dict[int | None, intervals.Estimate]:
  """Returns tool productivity by budget; the key None pools B >= 1."""
  found = measures.sums(measured, ("tp",))
  if not found.budgets:
    return {}
  each = np.eye(len(found.budgets), dtype=bool)
  used = np.array(found.budgets)[None] >= 1
  parts = found.linearised(("tp",), np.concatenate([each, used]))
  estimates = measures.inferred(parts, ["tp"] * (len(each) + 1))
  return dict(zip([*found.budgets, None], estimates, strict=True))


def knowledge(row: metrics.Row) -> dict[str, Number]:
  """Returns how often the first fact is searched, by the policy's memory of it.

  Returns:
    `known`, `unknown`, `stale`, `gap` (unknown minus known) and `half` (half of
    unknown minus known); empty if no question lists its facts.
  """
  table = row.columns.scored()
  table = table.where(table.kind != columns.NONE)
  if not len(table):
    return {}
  kinds = [
    (table.kind == kind).astype(float) for kind in range(len(columns.KINDS))
  ]
  found = measures.ratios(table, [table.asked * kind for kind in kinds], kinds)
  n = [int(kind.sum()) for kind in kinds]
  rates = inference.rates(found, n)
  # KINDS begins with known and unknown.
  contrasts = np.array([[-1.0, 1.0, 0.0], [-1.0, 0.5, 0.0]])
  gaps = inference.effects(found.combined(contrasts))
  out = {
    kind: Number(kind, rate.estimate, size)
    for kind, rate, size in zip(columns.KINDS, rates, n, strict=True)
  }
  return out | {
    name: Number(name, gap.estimate, n[0] + n[1], gap.detectable)
    for name, gap in zip(("gap", "half"), gaps, strict=True)
  }
