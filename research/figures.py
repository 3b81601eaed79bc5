"""Draws the figures of docs/evidence.md from the stored outcomes.

    python -m research.figures --output=docs/images

`budgets.svg` has accuracy and searches against the budget, beside the best
agent; `price.svg` the rows that change one part of the price at a time, beside
the best agents of every price (five minutes), without rows of fewer than five
trainings.
"""

from __future__ import annotations

import collections
import pathlib
import sys
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags

import anysearch_jax as aj
from research import ablations, claims, frontier, outcomes, study

_SHOWN = ("anysearch", "batch_anysearch", "priced", "no_tool", "search_r1")
_PARTS = (
  *("anysearch", "batch_anysearch", "batch_no_rel", "batch_gamma"),
  *("priced", "priced_group", "no_tool", "search_r1"),
)
_MARKERS = "os^DvPX*<"

Rows = Mapping[str, Sequence[outcomes.Outcomes]]


def means(found: Sequence[outcomes.Outcomes]) -> np.ndarray:
  """Returns accuracy and searches of a row by budget from 1, float `[2, B]`."""
  asked = np.asarray(found[0].budgets) >= 1
  return np.array(
    [
      np.mean([x[asked].mean(axis=1) for x in each], axis=0)
      for each in ([o.right for o in found], [o.searches for o in found])
    ]
  )


def by_budget(
  rows: Rows, labels: Mapping[str, str], world: aj.World
) -> plt.Figure:
  """Draws accuracy and searches of rows against the budget."""
  first = next(iter(rows.values()))[0]
  ids = [q.id for q in world.evaluation_questions(first.right.shape[1])]
  budgets = [b for b in first.budgets if b >= 1]
  agent = aj.optimum.Optimum(world)
  right = aj.optimum.accuracy(agent, ids, budgets).mean(axis=0)
  made = [np.mean([agent.play(i, b)[1] for i in ids]) for b in budgets]
  figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
  for place, (axis, best) in enumerate(zip(axes, (right, made), strict=True)):
    axis.plot(budgets, best, "k:", label="optimum")
    for (name, found), marker in zip(rows.items(), _MARKERS, strict=False):
      height = means(found)[place]
      axis.plot(budgets, height, marker=marker, label=labels[name], ms=4)
    axis.set(xlabel="budget", ylabel=("accuracy", "searches")[place])
  axes[0].legend()
  return figure


def by_price(
  rows: Rows, labels: Mapping[str, str], world: aj.World
) -> plt.Figure:
  """Draws accuracy against searches, pooled over budgets."""
  first = next(iter(rows.values()))[0]
  asked = frontier.asked(world, first.right.shape[1])
  budgets = [b for b in first.budgets if b >= 1]
  figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
  edge = np.array(frontier.points(world, asked, budgets))
  axis.plot(edge[:, 1], edge[:, 0], "k:", label="best agents")
  for (name, found), marker in zip(rows.items(), _MARKERS, strict=False):
    height, made = means(found).mean(axis=1)
    axis.plot(made, height, marker, ls="", label=labels[name])
  axis.set(xlabel="searches", ylabel="accuracy, B = 1 to 8", xlim=(1.5, None))
  axis.legend(loc="lower right")
  return figure


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  config = "configs/quickstart.py"
  known = ablations.rows(study.load_config(config))
  labels = {row.name: row.label for row in known}
  stored: dict[str, list[outcomes.Outcomes]] = collections.defaultdict(list)
  for one in outcomes.read(study.shipped("ablations", config)):
    stored[one.row].append(one)
  for name, draw, names in (
    ("budgets", by_budget, _SHOWN),
    ("price", by_price, _PARTS),
  ):
    first = {row: claims.first(stored[row], claims.TRAININGS) for row in names}
    rows = {r: own for r, own in first.items() if len(own) == claims.TRAININGS}
    if not rows:
      sys.exit(f"research.figures: found none of the rows {', '.join(names)}.")
    drawn = draw(rows, labels, aj.World())
    drawn.savefig(pathlib.Path(flags.FLAGS.output) / f"{name}.svg")


if __name__ == "__main__":
  flags.DEFINE_string("output", None, "Folder.", required=True)
  app.run(main)
