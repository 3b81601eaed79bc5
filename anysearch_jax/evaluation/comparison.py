"""Two rows on the same questions.

Follows the paper's early-stopping analysis: both discordant counts, how many
of the losses left budget unused, the net gain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from anysearch_jax.evaluation import intervals, metrics


@dataclasses.dataclass(frozen=True)
class Pairs:
  """Episodes of two rows that share question, budget and seed.

  Attributes:
    question: int `[P]`, index of the question in [0, questions).
    budget: int `[P]`.
    ours, theirs: float `[P]`, exact match.
    our_searches, their_searches: float `[P]`.
    questions: number of questions.
    failed: pairs left out because either episode failed.
    unpaired: episodes of one row that the other does not have.
  """

  question: np.ndarray
  budget: np.ndarray
  ours: np.ndarray
  theirs: np.ndarray
  our_searches: np.ndarray
  their_searches: np.ndarray
  questions: int
  failed: int
  unpaired: int


@dataclasses.dataclass(frozen=True)
class Comparison:
  """The paper's early-stopping table for one budget (None: B >= 1 pooled).

  wins: we are right, they are wrong. losses: the other way round;
  losses_unused: those where we left budget unused. net = wins - losses.
  difference: accuracy, ours minus theirs. tp_difference: likewise.
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
  """One number that a verdict rests on."""

  label: str
  estimate: intervals.Estimate
  n: int


def pair(ours: metrics.Row, theirs: metrics.Row) -> Pairs:
  """Pairs two rows by question, budget and seed.

  Rows need not have the same budgets or seeds: the common ones are compared.
  One row's questions must be a subset of the other's.

  Raises:
    ValueError: no common budget and seed, or question sets that differ both
      ways: a difference of accuracies over them would compare questions.
  """
  left = {metrics.key_of(e): e for e in ours.episodes}
  right = {metrics.key_of(e): e for e in theirs.episodes}
  cells = {k[1:] for k in left} & {k[1:] for k in right}
  if not cells:
    raise ValueError(
      f"{ours.label!r} and {theirs.label!r} have no budget and seed in common; "
      "evaluate both at the same budgets with the same seeds."
    )
  left = {k: e for k, e in left.items() if k[1:] in cells}
  right = {k: e for k, e in right.items() if k[1:] in cells}
  mine, others = {k[0] for k in left}, {k[0] for k in right}
  if not (mine <= others or others <= mine):
    raise ValueError(
      f"{ours.label!r} and {theirs.label!r} were measured on different "
      f"questions: {len(mine - others)} only in the first, "
      f"{len(others - mine)} only in the second, {len(mine & others)} in both. "
      "Expected the same questions, or one set inside the other; evaluate "
      "both on the same questions."
    )
  common = sorted(left.keys() & right.keys())
  return align(
    [(left[k], right[k]) for k in common],
    unpaired=len(left) + len(right) - 2 * len(common),
  )


def align(
  couples: Sequence[tuple[metrics.Episode, metrics.Episode]], *, unpaired: int
) -> Pairs:
  """Couples of episodes as arrays; a couple with a failed one is left out."""
  kept = [c for c in couples if len(metrics.scored(c)) == 2]
  ids, question = np.unique(
    [str(a["question_id"]) for a, _ in kept], return_inverse=True
  )

  def column(side: int, key: str) -> np.ndarray:
    return np.array([c[side][key] for c in kept], dtype=np.float64)

  return Pairs(
    question=question,
    budget=np.array([a["budget"] for a, _ in kept], dtype=np.int64),
    ours=column(0, "em"),
    theirs=column(1, "em"),
    our_searches=column(0, "searches"),
    their_searches=column(1, "searches"),
    questions=len(ids),
    failed=len(couples) - len(kept),
    unpaired=unpaired,
  )


def compare(pairs: Pairs, *, resamples: int = 10_000) -> list[Comparison]:
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
  tp = tp_differences(pairs, masks, resamples=resamples)
  table = []
  for (budget, mask), d_accuracy, d_tp in zip(cells, accuracy, tp, strict=True):
    wins = mask & (pairs.ours > pairs.theirs)
    losses = mask & (pairs.ours < pairs.theirs)
    unused = losses & (pairs.our_searches < pairs.budget)
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
  pairs: Pairs, masks: Sequence[np.ndarray], *, resamples: int = 10_000
) -> list[intervals.Estimate]:
  """Accuracy, ours minus theirs, inside each of S masks `[P]`."""
  sums = intervals.cluster_sums(
    pairs.question,
    [c * mask for mask in masks for c in (pairs.ours - pairs.theirs, 1.0)],
    clusters=pairs.questions,
  )
  return intervals.bootstrap(
    sums,
    lambda totals: intervals.ratio(totals[:, 0::2], totals[:, 1::2]),
    resamples=resamples,
  )


def tp_differences(
  pairs: Pairs, masks: Sequence[np.ndarray], *, resamples: int = 10_000
) -> list[intervals.Estimate]:
  """Tool productivity, ours minus theirs, inside each of S masks `[P]`."""
  columns = (
    pairs.ours,
    pairs.our_searches,
    pairs.theirs,
    pairs.their_searches,
  )
  sums = intervals.cluster_sums(
    pairs.question,
    [c * mask for mask in masks for c in columns],
    clusters=pairs.questions,
  )
  return intervals.bootstrap(
    sums,
    lambda t: (
      intervals.ratio(t[:, 0::4], t[:, 1::4])
      - intervals.ratio(t[:, 2::4], t[:, 3::4])
    ),
    resamples=resamples,
  )


def pooled_accuracy(
  episodes: Iterable[metrics.Episode], *, resamples: int = 10_000
) -> intervals.Estimate:
  """Accuracy over all budgets together, questions resampled whole."""
  kept = metrics.scored(episodes)
  if not kept:
    return intervals.Estimate(None, None, None)
  ids, question = np.unique(
    [str(e["question_id"]) for e in kept], return_inverse=True
  )
  em = np.array([e["em"] for e in kept], dtype=np.float64)
  (estimate,) = intervals.bootstrap(
    intervals.cluster_sums(question, [em, em * 0 + 1], clusters=len(ids)),
    lambda t: intervals.ratio(t[:, :1], t[:, 1:]),
    resamples=resamples,
  )
  return estimate


def productivities(
  episodes: Iterable[metrics.Episode], *, resamples: int = 10_000
) -> dict[int | None, intervals.Estimate]:
  """Tool productivity by budget, and pooled over all budgets under None."""
  kept = metrics.scored(episodes)
  if not kept:
    return {}
  ids, question = np.unique(
    [str(e["question_id"]) for e in kept], return_inverse=True
  )
  budget = np.array([e["budget"] for e in kept])
  cells = [int(b) for b in np.unique(budget)]
  masks = [budget == b for b in cells] + [np.ones_like(budget, dtype=bool)]
  em = np.array([e["em"] for e in kept], dtype=np.float64)
  searches = np.array([e["searches"] for e in kept], dtype=np.float64)
  estimates = intervals.bootstrap(
    intervals.cluster_sums(
      question,
      [c * mask for mask in masks for c in (em, searches)],
      clusters=len(ids),
    ),
    lambda t: intervals.ratio(t[:, 0::2], t[:, 1::2]),
    resamples=resamples,
  )
  return dict(zip([*cells, None], estimates, strict=True))


def knowledge(
  row: metrics.Row, *, resamples: int = 10_000
) -> dict[str, Number]:
  """How often the first fact is searched, by what the model remembers of it.

  Returns:
    `known`, `unknown`, `stale` and `gap` (unknown minus known); empty when no
    question lists its facts.
  """
  found = metrics.first_hop(row.episodes)
  if not found:
    return {}
  ids, question = np.unique([q for q, _, _ in found], return_inverse=True)
  kinds = ("known", "unknown", "stale")
  searched = np.array([s for _, _, s in found], dtype=np.float64)
  masks = [np.array([k == kind for _, k, _ in found]) for kind in kinds]

  def rates(t: np.ndarray) -> np.ndarray:
    by_kind = intervals.ratio(t[:, 0::2], t[:, 1::2])
    return np.column_stack([by_kind, by_kind[:, 1] - by_kind[:, 0]])

  estimates = intervals.bootstrap(
    intervals.cluster_sums(
      question,
      [c * mask for mask in masks for c in (searched, 1.0)],
      clusters=len(ids),
    ),
    rates,
    resamples=resamples,
  )
  counts = [int(mask.sum()) for mask in masks]
  return {
    kind: Number(kind, estimate, n)
    for kind, estimate, n in zip(
      (*kinds, "gap"), estimates, [*counts, counts[0] + counts[1]], strict=True
    )
  }
