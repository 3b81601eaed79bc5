"""Compares the rows of a study with the best agents of the generated world.

    python -m research.frontier --rows=anysearch,priced,search_r1_greedy

`optimum.Optimum` with price p has the largest V(p) = A - p S of all agents, but
for what it neglects; A is its accuracy and S its mean number of searches. Over
all prices, these points are the upper edge of what any agent can reach.
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

# The first entity of a question and its relations.
Asked = tuple[str, tuple[str, ...]]
PRICES = (0.0, 0.01, 0.02, 0.04, 0.06, 0.09, 0.13, 0.2, 0.3)
_RISE = 1e-6  # Of a price, which shows how much is searched at it.
_HEAD = (
  f"{'':34}{'accuracy':>9}{'searches':>9}{'TP':>7}{'best':>9}{'best TP':>9}"
)


class Point(NamedTuple):
  """An agent: its accuracy, and its mean searches an episode."""

  accuracy: float
  searches: float


def asked(world: aj.World, count: int) -> collections.Counter[Asked]:
  """Returns the first `count` held-out questions of evaluations."""
  words = [q.text.split()[:-1] for q in world.evaluation_questions(count)]
  return collections.Counter((start, tuple(rest)) for start, *rest in words)


def points(
  world: aj.World,
  questions: Mapping[Asked, int],
  budgets: Sequence[int],
  prices: Sequence[float] = PRICES,
) -> list[Point]:
  """Returns the best agent of each price; 600 questions take a minute each.

  Args:
    world: its memory and its statistics are the agents'.
    questions: what is asked, and how often each is asked.
    budgets: the budgets that every question is asked at, pooled.
    prices: of a search, ascending, where a right answer is worth 1.
  """
  found = []
  for price in prices:
    value = mean_value(world, questions, budgets, price)
    dearer = mean_value(world, questions, budgets, price + _RISE)
    # The best agent stays the same, so the value falls by its searches.
    made = (value - dearer) / _RISE
    found.append(Point(value + price * made, made))
  return found


def mean_value(
  world: aj.World,
  questions: Mapping[Asked, int],
  budgets: Sequence[int],
  price: float,
) -> float:
  """Returns the largest A - price S of any agent; arguments as of `points`."""
  best = aj.optimum.Optimum(world, price=price)
  total = 0.0
  # Chains with equal ends share what is computed.
  for start, chain in sorted(questions, key=lambda each: each[1][::-1]):
    for budget in budgets:
      total += questions[start, chain] * best.value(start, chain, budget)
  return total / (sum(questions.values()) * len(budgets))


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
  budgets = [b for b in first.budgets if b >= 1]
  edge = points(world, asked(world, first.right.shape[1]), budgets)
  print(_HEAD)
  for name in f.rows:
    some = np.asarray(found[name][0].budgets) >= 1
    right = float(np.mean([one.right[some] for one in found[name]]))
    made = float(np.mean([one.searches[some] for one in found[name]]))
    print(
      f"{name:34}{right:9.3f}{made:9.2f}{right / made:7.3f}"
      f"{accuracy(edge, made):9.3f}{right / searches(edge, right):9.3f}"
    )


if __name__ == "__main__":
  define_flags()
  app.run(main)
