"""The most accurate agents of the generated world, by how much they search.

Of all agents, `optimum.Optimum` with price p has the largest V(p) = A - p S,
where A is its accuracy and S its mean number of searches. V is convex, and its
slope is -S, so that both follow from V alone:

    S = -V'(p)        A = V(p) + p S

Over all prices, these points are the upper edge of what any agent can reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from anysearch_jax.world import optimum
from anysearch_jax.world import world as world_lib

Chain = tuple[str, ...]
# V is linear between a few prices, so the step has no error but at those.
_STEP = 1e-6
PRICES = (0.0, *np.geomspace(0.01, 0.3, 14))


class Point(NamedTuple):
  """An agent: its accuracy, and its mean searches an episode."""

  accuracy: float
  searches: float

  @property
  def tp(self) -> float:
    """Right answers per search."""
    return self.accuracy / self.searches if self.searches else float("inf")


def points(
  world: world_lib.World,
  chains: Mapping[Chain, int],
  budgets: Sequence[int],
  prices: Sequence[float] = PRICES,
) -> list[Point]:
  """Returns the best agent of each price.

  Args:
    world: its statistics are the agents'.
    chains: relations of the questions, and how many questions have them.
    budgets: the budgets that every question is asked at, pooled.
    prices: of a search, ascending, where a right answer is worth 1.
  """
  found = []
  for price in prices:
    low = max(price - _STEP, 0)
    ends = [_value(world, chains, budgets, p) for p in (low, price + _STEP)]
    searches = (ends[0] - ends[1]) / (price + _STEP - low)
    middle = ends[0] - (price - low) * searches
    found.append(Point(middle + price * searches, searches))
  return found


def accuracy(found: Sequence[Point], searches: float) -> float:
  """Returns the largest accuracy of any agent with this mean of searches.

  Args:
    found: `points` of ascending prices.
    searches: mean searches, >= 0; above the largest of them, more do not help.
  """
  edge = np.array(sorted((p.searches, p.accuracy) for p in found))
  return float(np.interp(searches, edge[:, 0], edge[:, 1]))


def searches(found: Sequence[Point], accuracy: float) -> float:
  """Returns the smallest mean of searches of any agent this accurate.

  Args:
    found: `points` of ascending prices.
    accuracy: above the largest of them, no number of searches is enough.
  """
  edge = np.array(sorted((p.accuracy, p.searches) for p in found))
  return float(np.interp(accuracy, edge[:, 0], edge[:, 1], right=np.inf))


def _value(
  world: world_lib.World,
  chains: Mapping[Chain, int],
  budgets: Sequence[int],
  price: float,
) -> float:
  """Returns V(price), the mean over questions and budgets."""
  best = optimum.Optimum(world, price=price)
  total = sum(
    count * best.value(chain, budget)
    for chain, count in chains.items()
    for budget in budgets
  )
  return total / (sum(chains.values()) * len(budgets))
