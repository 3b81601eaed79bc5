"""Compares the rows of a study with the best agents of the generated world.

    python -m bench.frontier --rows=anysearch,priced,search_r1_greedy
    python -m bench.frontier --rows=anysearch,priced --figure=frontier.svg

Prints, over all budgets of at least 1, each row's accuracy and mean searches,
and what the best agents reach: the largest accuracy of any agent that searches
as much, and the most right answers per search of any agent that is as accurate.
"""

from __future__ import annotations

import collections
import pathlib
import sys
from collections.abc import Sequence

import numpy as np
from absl import app, flags

from anysearch_jax.evaluation import outcomes
from anysearch_jax.report import picture
from anysearch_jax.world import frontier
from configs import ablations
from launch import flags as launch_flags
from launch import world_source

_HEAD = (
  f"{'':34}{'accuracy':>9}{'searches':>9}{'TP':>7}{'best':>9}{'best TP':>9}"
)


def define_flags() -> None:
  flags.DEFINE_string(
    "outcomes", "docs/evidence/ablations.jsonl", "Of launch.study."
  )
  flags.DEFINE_list("rows", ["anysearch", "no_tool"], "Names of rows.")
  flags.DEFINE_string("figure", None, "An SVG file to draw.")


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  base = launch_flags.load_config("configs/quickstart.py")
  labels = {row.name: row.label for row in ablations.rows(base)}
  found: dict[str, list[outcomes.Outcomes]] = collections.defaultdict(list)
  for one in outcomes.read(pathlib.Path(f.outcomes)):
    found[one.row].append(one)
  if missing := [name for name in f.rows if name not in found]:
    sys.exit(
      f"bench.frontier: {f.outcomes} has no row {missing[0]!r}; expected some "
      f"of {', '.join(sorted(found))}."
    )
  source = world_source.make(base.data, base.retrieval.kind)
  first = found[f.rows[0]][0]
  questions = source.evaluation_questions(each=first.right.shape[1])
  budgets = [b for b in first.budgets if b >= 1]
  chains = collections.Counter(tuple(q.text.split()[1:-1]) for q in questions)
  edge = frontier.points(source.world, chains, budgets)
  rows = {labels[name]: _point(found[name]) for name in f.rows}
  print(_HEAD)
  for label, row in rows.items():
    best = frontier.accuracy(edge, row.searches)
    tp = row.accuracy / frontier.searches(edge, row.accuracy)
    print(
      f"{label:34}{row.accuracy:9.3f}{row.searches:9.2f}{row.tp:7.3f}"
      f"{best:9.3f}{tp:9.3f}"
    )
  if f.figure:
    pathlib.Path(f.figure).write_text(picture.frontier(rows, edge))


def _point(trainings: Sequence[outcomes.Outcomes]) -> frontier.Point:
  """Returns a row's means over trainings, questions and budgets."""
  asked = np.asarray(trainings[0].budgets) >= 1
  return frontier.Point(
    float(np.mean([one.right[asked] for one in trainings])),
    float(np.mean([one.searches[asked] for one in trainings])),
  )


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main)
