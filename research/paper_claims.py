"""Claims of the paper that stored outcomes decide without an interval.

    python -m research.paper_claims

The paper counts the questions that AnySearch lost or won at a budget of five
searches against the same training without the tool reward (paragraph
"Early-stopping analysis"), and shows curves that rise with the budget. Both are
counted here over the trainings of research/evidence/ablations.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from absl import app

from research import ablations, claims, outcomes, study

_BASE = "configs/quickstart.py"
BUDGET = 5  # Searches, as in the paper's table.


class EarlyStops(NamedTuple):
  """What became of the questions that two rows were asked with equal seeds.

  Attributes:
    questions: number of questions of all seeds.
    won: only the first row was right.
    lost: only the second row was right.
    lost_unused: of `lost`, those in which the first row left budget unused.
  """

  questions: int
  won: int
  lost: int
  lost_unused: int


def early_stops(
  ours: Iterable[outcomes.Outcomes],
  theirs: Iterable[outcomes.Outcomes],
  budget: int = BUDGET,
) -> EarlyStops:
  """Counts the questions that one row lost or won against another.

  Args:
    ours, theirs: trainings of the rows; those with equal seeds are compared.
    budget: searches that both were given.

  Raises:
    ValueError: a training was not asked at this budget, or other questions.
  """
  theirs_by_seed = {other.seed: other for other in theirs}
  counts = np.zeros(4, dtype=int)
  for one in ours:
    other = theirs_by_seed.get(one.seed)
    if other is None:
      continue
    for training in (one, other):
      if budget not in training.budgets:
        raise ValueError(
          f"{training.row}, seed {training.seed}: found budgets "
          f"{', '.join(map(str, training.budgets))}, expected {budget} among "
          "them. Evaluate it with this budget."
        )
    if one.questions != other.questions:
      raise ValueError(
        f"{one.row} and {other.row}, seed {one.seed}, were asked different "
        "questions; expected the same. Run one of them again."
      )
    right = one.right[one.budgets.index(budget)]
    other_right = other.right[other.budgets.index(budget)]
    lost = other_right & ~right
    unused = one.searches[one.budgets.index(budget)] < budget
    counts += [
      right.size,
      np.sum(right & ~other_right),
      np.sum(lost),
      np.sum(lost & unused),
    ]
  return EarlyStops(*counts.tolist())


def rising(trainings: Iterable[outcomes.Outcomes]) -> tuple[int, int]:
  """Returns how many trainings are more accurate at each larger budget.

  Returns:
    The number of trainings whose accuracy rises from each budget to the next,
    from 1 on, and the number of all.
  """
  rises = []
  for one in trainings:
    used = np.asarray(one.budgets) >= 1
    accuracy = one.right[used].mean(axis=1)
    rises.append(bool(np.all(np.diff(accuracy) > 0)))
  return sum(rises), len(rises)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  stored = outcomes.read(study.shipped("ablations", _BASE))
  # Rows that evaluate the policies of another are no trainings of their own.
  trained_rows = {
    row.name
    for row in ablations.rows(study.load_config(_BASE))
    if not row.policy_of
  }
  rows: dict[str, list[outcomes.Outcomes]] = {}
  for one in claims.first(stored, claims.TRAININGS):
    if one.row in trained_rows:
      rows.setdefault(one.row, []).append(one)
  for name in sorted(rows.keys() - {"no_tool"}):
    stops = early_stops(rows[name], rows["no_tool"])
    print(
      f"{name} at B = {BUDGET}, of {stops.questions}: won {stops.won}, lost "
      f"{stops.lost}, of which {stops.lost_unused} with unused budget"
    )
  for name, trainings in rows.items():
    rises, count = rising(trainings)
    print(f"{name}: {rises} of {count} curves rise at every budget")


if __name__ == "__main__":
  app.run(main)
