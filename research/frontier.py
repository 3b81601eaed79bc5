"""Compares the rows of a study with the best agents of the generated world.

    python -m research.frontier --rows=anysearch,priced,search_r1_greedy

Of all agents, `optimum.Optimum` with price p has the largest V(p) = A - p S,
where A is its accuracy and S its mean number of searches. V is convex, and its
slope is -S, so that both follow from V alone:

    S = -V'(p)        A = V(p) + p S

Over all prices, these points are the upper edge of what any agent can reach.
Prints, over all budgets of at least 1, each row's accuracy and mean searches,
and what the best agents reach: the largest accuracy of any agent that searches
as much, and the most right answers per search of any agent that is as accurate.
"""

from __future__ import annotations

import collections
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import app, flags

import anysearch_jax as aj
from research import outcomes

Chain = tuple[str, ...]
# V is linear between a few prices, so the step has no error but at those.
_STEP = 1e-6
PRICES = (0.0, *np.geomspace(0.01, 0.3, 14))
_HEAD = (
  f"{'':34}{'accuracy':>9}{'searches':>9}{'TP':>7}{'best':>9}{'best TP':>9}"
)


class Point(NamedTuple):
  """An agent: its accuracy, and its mean searches an episode."""

  accuracy: float
  searches: float


def points(
  world: aj.World,
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
  world: aj.World,
  chains: Mapping[Chain, int],
  budgets: Sequence[int],
  price: float,
) -> float:
  """Returns V(price), the mean over questions and budgets."""
  best = aj.optimum.Optimum(world, price=price)
  total = sum(
    count * best.value(chain, budget)
    for chain, count in chains.items()
    for budget in budgets
  )
  return total / (sum(chains.values()) * len(budgets))


def define_flags() -> None:
  flags.DEFINE_string(
    "outcomes", "research/evidence/ablations.jsonl", "Of research.study."
  )
  flags.DEFINE_list("rows", ["anysearch", "no_tool"], "Names of rows.")


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  found: dict[str, list[outcomes.Outcomes]] = collections.defaultdict(list)
  for one in outcomes.read(pathlib.Path(f.outcomes)):
    found[one.row].append(one)
  if missing := [name for name in f.rows if name not in found]:
    sys.exit(
      f"research.frontier: {f.outcomes} has no row {missing[0]!r}; expected "
      f"some of {', '.join(sorted(found))}."
    )
  first = found[f.rows[0]][0]
  world = aj.World()
  questions = world.evaluation_questions(first.right.shape[1])
  budgets = [b for b in first.budgets if b >= 1]
  chains = collections.Counter(tuple(q.text.split()[1:-1]) for q in questions)
  edge = points(world, chains, budgets)
  print(_HEAD)
  for name in f.rows:
    asked = np.asarray(found[name][0].budgets) >= 1
    right = float(np.mean([one.right[asked] for one in found[name]]))
    made = float(np.mean([one.searches[asked] for one in found[name]]))
    print(
      f"{name:34}{right:9.3f}{made:9.2f}{right / made:7.3f}"
      f"{accuracy(edge, made):9.3f}{right / searches(edge, right):9.3f}"
    )


if __name__ == "__main__":
  define_flags()
  app.run(main)
