"""The value of one more search, from the ends that `branching` plays.

Two questions are asked, and neither answer depends on `tries`:

* What are the searches worth that the policy asks for? `worth` is the mean of
  exact match if the search is granted minus exact match if it is refused.
  `gained` and `lost` are its parts: the shares of searches that are right only
  if granted, and only if refused. `gain` (`continue` only) is the same mean of
  exact match if granted minus that of the stored answer. A search counts once:
  a cut of `stop` is a search that was made, and a cut of `continue` has as its
  weight the probability that the policy asks there. The share of its ends that
  asked at their first try estimates that weight without bias for any `tries`.
* What would a search be worth at every cut, also where the policy seldom asks?
  At cuts that no end reached no data say so. `worth_bounds` and `gain_bounds`
  give such cuts the least and the most that exact match allows. They hold for
  any `tries`; more tries narrow them, and they meet when every cut is reached.

The mean over the cuts that were reached is not among them: where a policy is
sure of its answer it seldom asks, so that mean depends on `tries`.
"""

from __future__ import annotations

import itertools
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import anysearch_jax as aj

KINDS = ("continue", "stop")
# What is read of a row.
_READ = (
  *("question_id", "budget", "seed", "cut", "outcome"),
  *("tries", "stored_em", "worth", "gain"),
)


class _Cut(NamedTuple):
  """The ends of a cut that did not fail.

  Attributes:
    question: id of the question.
    stored: exact match of the stored episode.
    share: share of the ends that asked at their first try.
    worth, gain: values of the ends that asked; `gain` is empty for `stop`.
  """

  question: str
  stored: float
  share: float
  worth: tuple[float, ...]
  gain: tuple[float, ...]


def summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
  """Summarises the value of one more search, by kind.

  Intervals are 95 %, clustered by question.

  Args:
    rows: rows of `branches.jsonl`.

  Returns:
    For each kind that occurs: the number of `ends` and of `failed` ones;
    `cuts`, the number of cuts with an end that did not fail; `worth` with its
    interval, and its parts `gained` and `lost`, shares in [0, 1]. For
    `continue` also `asks`, the mean probability of asking at a cut, and `gain`,
    both with intervals; `cuts_reached`, the number of cuts at which an end
    asked; `worth_bounds` and `gain_bounds`, an interval over all cuts: from the
    lower end for the lower bound to the upper end for the upper bound.
  """
  found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
  for row in rows:
    found[row["kind"]].append({name: row[name] for name in _READ})
  return {kind: _measured(kind, own) for kind, own in found.items() if own}


def _measured(kind: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  ended = [row for row in rows if row["outcome"] != "failed"]
  cuts = _cuts(ended)
  asked = [cut for cut in cuts if cut.share]

  def of_searches(value: Callable[[_Cut], float]) -> aj.inference.Estimate:
    return _mean(asked, value, lambda cut: cut.share)

  out = {
    "ends": len(rows),
    "failed": len(rows) - len(ended),
    "cuts": len(cuts),
    "worth": of_searches(lambda cut: statistics.fmean(cut.worth))._asdict(),
    "gained": of_searches(lambda cut: _share(cut.worth, 1)).value,
    "lost": of_searches(lambda cut: _share(cut.worth, -1)).value,
  }
  if kind == "continue":
    out |= {
      "asks": _mean(cuts, lambda cut: cut.share)._asdict(),
      "gain": of_searches(lambda cut: statistics.fmean(cut.gain))._asdict(),
      "cuts_reached": sum(bool(cut.worth) for cut in cuts),
      "worth_bounds": _bounds(cuts, lambda cut: (cut.worth, (-1.0,), (1.0,))),
      "gain_bounds": _bounds(
        cuts, lambda cut: (cut.gain, (-cut.stored,), (1 - cut.stored,))
      ),
    }
  return out


def _share(values: Sequence[float], wanted: float) -> float:
  """Returns the share of the values that are `wanted`."""
  return statistics.fmean(value == wanted for value in values)


def _cuts(rows: Iterable[Mapping[str, Any]]) -> list[_Cut]:
  """Collects the ends of each cut."""
  out, key = [], operator.itemgetter(*_READ[:4])
  for (question, *_), group in itertools.groupby(sorted(rows, key=key), key):
    ends = list(group)
    asked = [end for end in ends if end["worth"] is not None]
    first = [end for end in asked if end["tries"] == 1]
    out.append(
      _Cut(
        str(question),
        float(ends[0]["stored_em"]),
        len(first) / len(ends),
        tuple(end["worth"] for end in asked),
        tuple(end["gain"] for end in asked if end["gain"] is not None),
      )
    )
  return out


def _mean(
  cuts: Sequence[_Cut],
  value: Callable[[_Cut], float],
  weight: Callable[[_Cut], float] = lambda cut: 1.0,
) -> aj.inference.Estimate:
  """Returns the weighted mean over cuts; questions are independent."""
  if not cuts:
    return aj.inference.Estimate(None, None, None)
  names, cluster = np.unique(
    [cut.question for cut in cuts], return_inverse=True
  )
  weights = np.array([weight(cut) for cut in cuts])
  values = np.array([value(cut) for cut in cuts])
  sums = aj.inference.cell_sums(
    [cluster], [len(names)], [weights * values, weights]
  )
  # A cut's exact match counts as one answer.
  counts = np.bincount(cluster, minlength=len(names))[:, None].astype(float)
  (found,) = aj.inference.effects(
    aj.inference.ratios(sums[None, :, :1], sums[None, :, 1:], trials=counts)
  )
  estimate = found.estimate
  if estimate.low is None or estimate.high is None:
    return estimate
  return estimate._replace(
    low=max(-1.0, estimate.low), high=min(1.0, estimate.high)
  )


def _bounds(
  cuts: Sequence[_Cut],
  known: Callable[[_Cut], tuple[tuple[float, ...], ...]],
) -> dict[str, float | None]:
  """Returns an interval for the mean over all cuts, reached or not.

  `known` returns the values of a cut's ends, and the least and the most that
  they can be if there are none.

  It holds the true mean with a probability of at least 95 %: the bounds are
  known up to sampling error, which is added outside.
  """

  def of(place: int) -> aj.inference.Estimate:
    return _mean(
      cuts, lambda cut: statistics.fmean(known(cut)[0] or known(cut)[place])
    )

  return {"low": of(1).low, "high": of(2).high}
