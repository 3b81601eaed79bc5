"""One ranking of several: how scores of different kinds are added."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

# The weight of vectors beside words, as `bench.document_search` chose it.
DENSE_WEIGHT = 0.4


def scaled(scores: Mapping[Key, float]) -> dict[Key, float]:
  """Returns scores between 0, that of the last, and 1, that of the first."""
  least = min(scores.values(), default=0.0)
  width = max(scores.values(), default=0.0) - least
  if not width:
    return dict.fromkeys(scores, 1.0)
  return {key: (score - least) / width for key, score in scores.items()}


def added(
  rankings: Sequence[Mapping[Key, float]], weights: Sequence[float]
) -> dict[Key, float]:
  """Returns the weighted sums of scores, best first.

  A key that a ranking lacks has 0 there. Equal sums keep the order of the first
  ranking, then of the second, and so on.

  Args:
    rankings: by key, scores of one kind, in descending order.
    weights: the weight of each ranking.
  """
  sums: dict[Key, float] = {}
  for ranking, weight in zip(rankings, weights, strict=True):
    for key, score in ranking.items():
      sums[key] = sums.get(key, 0.0) + weight * score
  return dict(sorted(sums.items(), key=lambda item: -item[1]))
