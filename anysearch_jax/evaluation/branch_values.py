"""The value of one more search, from the ends that `branching` plays.

Two numbers are defined over the cuts of a kind:

* `worth`: the mean over cuts, each of equal weight, of exact match if the
  search is granted minus exact match if it is refused, given that the policy
  asks at this cut;
* `gain` (`continue` only): the same mean of exact match if the search is
  granted minus that of the stored answer.

A cut's value is estimated by the mean of its ends that asked. Cuts at which no
end asked say nothing about their value, and these are the cuts at which the
policy seldom asks, so leaving them out depends on `tries`. The bounds give such
cuts the least and the most that exact match allows; they hold for any `tries`,
and meet when every cut is reached. Between them no data decide.

`asked` weighs a cut by the probability that the policy asks there: the worth of
the searches that it would make if its turns were sampled once more. It needs no
bounds, because cuts without asking have no weight.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from anysearch_jax.evaluation import inference, intervals, linear

KINDS = ("continue", "stop")
_AXES = ("hops", "budget_left", "searches_before")


class _Cut(NamedTuple):
  """The ends of a cut that did not fail.

  Attributes:
    question: id of the question.
    stored: exact match of the stored episode.
    share: share of the ends that asked at their first try.
    tries: number of tries of each end that asked.
    worth, gain: values of the ends that asked; `gain` is empty for `stop`.
  """

  question: str
  stored: float
  share: float
  tries: tuple[int, ...]
  worth: tuple[float, ...]
  gain: tuple[float, ...]


def summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
  """Summarises the value of one more search, by kind.

  Intervals are 95 %, clustered by question.

  Args:
    rows: rows of `branches.jsonl`.

  Returns:
    For each kind that occurs: the number of `ends`, of `failed` ones and of
    `reached` ones (those that asked and did not fail); `cuts`, the number of
    cuts with an end that did not fail, and `cuts_reached`; `tries`, the mean
    number of tries of a reached end; `gained` and `lost`, the number of ends
    right only if granted and only if refused; `questions`, the number of
    questions of the reached cuts; `worth`, and for `continue` `gain` and
    `asked`, with their intervals over reached cuts; `worth_bounds` and
    `gain_bounds`, an interval over all cuts: from the lower end for the lower
    bound to the upper end for the upper bound.
    `by_hops`, `by_budget_left` and `by_searches_before` hold the same for
    subsets: the last two by the budget left before the search and the number
    of searches before it.
  """
  light = [
    {
      "kind": row["kind"],
      "cut": (row["question_id"], row["budget"], row["seed"], row["cut"]),
      "failed": row["outcome"] == "failed",
      "tries": row["tries"],
      "stored": row["stored_em"],
      "worth": row["worth"],
      "gain": row["gain"],
      "hops": row["hops"],
      "budget_left": row["budget_left"],
      "searches_before": row["cut"],
    }
    for row in rows
  ]
  found = {}
  for kind in KINDS:
    own = [row for row in light if row["kind"] == kind]
    if own:
      found[kind] = _measured(own) | {
        f"by_{axis}": {
          str(value): _measured([row for row in own if row[axis] == value])
          for value in sorted({r[axis] for r in own if r[axis] is not None})
        }
        for axis in _AXES
      }
  return found


def _measured(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  cuts = _cuts(row for row in rows if not row["failed"])
  reached = [cut for cut in cuts if cut.worth]
  worths = [value for cut in reached for value in cut.worth]
  tries = [n for cut in reached for n in cut.tries]
  out = {
    "ends": len(rows),
    "failed": sum(row["failed"] for row in rows),
    "reached": len(worths),
    "cuts": len(cuts),
    "cuts_reached": len(reached),
    "tries": sum(tries) / len(tries) if tries else None,
    "gained": sum(value > 0 for value in worths),
    "lost": sum(value < 0 for value in worths),
    "questions": len({cut.question for cut in reached}),
    "worth": _mean(reached, lambda cut: statistics.fmean(cut.worth))._asdict(),
    "worth_bounds": _bounds(
      cuts,
      lambda cut: statistics.fmean(cut.worth) if cut.worth else -1.0,
      lambda cut: statistics.fmean(cut.worth) if cut.worth else 1.0,
    ),
  }
  if rows[0]["kind"] == "continue":
    out |= {
      "asked": _mean(
        [cut for cut in reached if cut.share],
        lambda cut: statistics.fmean(cut.worth),
        lambda cut: cut.share,
      )._asdict(),
      "gain": _mean(reached, lambda cut: statistics.fmean(cut.gain))._asdict(),
      "gain_bounds": _bounds(
        cuts,
        lambda cut: statistics.fmean(cut.gain) if cut.gain else -cut.stored,
        lambda cut: statistics.fmean(cut.gain) if cut.gain else 1 - cut.stored,
      ),
    }
  return out


def _cuts(rows: Iterable[Mapping[str, Any]]) -> list[_Cut]:
  """Collects the ends of each cut."""
  out = []
  ordered = sorted(rows, key=lambda row: row["cut"])
  for key, group in itertools.groupby(ordered, key=lambda row: row["cut"]):
    ends = list(group)
    asked = [end for end in ends if end["worth"] is not None]
    first = [end for end in asked if end["tries"] == 1]
    out.append(
      _Cut(
        str(key[0]),
        float(ends[0]["stored"]),
        len(first) / len(ends),
        tuple(end["tries"] for end in asked),
        tuple(end["worth"] for end in asked),
        tuple(end["gain"] for end in asked if end["gain"] is not None),
      )
    )
  return out


def _mean(
  cuts: Sequence[_Cut],
  value: Callable[[_Cut], float],
  weight: Callable[[_Cut], float] = lambda cut: 1.0,
) -> intervals.Estimate:
  """Returns the weighted mean over cuts; questions are independent."""
  if not cuts:
    return intervals.Estimate(*intervals.NOTHING)
  names, cluster = np.unique(
    [cut.question for cut in cuts], return_inverse=True
  )
  weights = np.array([weight(cut) for cut in cuts])
  values = np.array([value(cut) for cut in cuts])
  sums = intervals.cluster_sums(
    cluster, [weights * values, weights], clusters=len(names)
  )
  # A cut's exact match counts as one answer.
  counts = np.bincount(cluster, minlength=len(names))[:, None].astype(float)
  (found,) = inference.effects(
    linear.ratios(sums[None, :, :1], sums[None, :, 1:], trials=counts)
  )
  estimate = found.estimate
  if estimate.low is None or estimate.high is None:
    return estimate
  return estimate._replace(
    low=max(-1.0, estimate.low), high=min(1.0, estimate.high)
  )


def _bounds(
  cuts: Sequence[_Cut],
  least: Callable[[_Cut], float],
  most: Callable[[_Cut], float],
) -> dict[str, float | None]:
  """Returns an interval for the mean over all cuts, reached or not.

  It holds the true mean with a probability of at least 95 %: the bounds are
  known up to sampling error, which is added outside.
  """
  low, high = _mean(cuts, least), _mean(cuts, most)
  return {"low": low.low, "high": high.high}
