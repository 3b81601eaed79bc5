"""Compares SAAS's boundary with what memory holds in the generated world.

    python -m launch.evaluate --config=configs/quickstart.py \
        --policy=configs/graded_world_policy --budgets=0,8 --seeds=4 \
        --output=runs/boundary
    python -m research.boundary --evaluation=runs/boundary

The episodes of a question at the smallest budget are its trajectories without
searches, those at the largest the others; a seed is a sample. A question is
`known` if at least delta of the former are right, and `needed` if none is, and
one of the latter (methods/saas.py). The world has the truth: memory is *right*
if it holds all facts of the question and none is stale, and *sure* if none ever
becomes stale. Only the latter can a policy tell before it searches.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import app, flags

import anysearch_jax as aj


def boundary(rows: Iterable[Mapping[str, Any]], delta: int) -> dict[str, float]:
  """Returns what the boundary of one delta gets right; nan without a case.

  `accuracy`, `precision` and `recall` are of `known` as a test for a memory
  that is right. `unsure` is the share of the known questions whose memory may
  be stale, `false_need` that of the needed ones whose memory is right. `excess`
  is by how much the fewest searches of a right answer exceed, in needed
  questions, those of an agent that knows which memories are stale.
  """
  groups: dict[str, list[Mapping[str, Any]]] = {}
  for row in rows:
    groups.setdefault(row["question_id"], []).append(row)
  table = []
  for group in groups.values():
    least = min(row["budget"] for row in group)
    without = [row["em"] for row in group if row["budget"] == least]
    found = [r["searches"] for r in group if r["budget"] > least and r["em"]]
    told = group[0]["metadata"]
    sure = all(f["known"] and f["reliability"] == 1 for f in told["facts"])
    needed = not any(without) and bool(found)
    excess = min(found) - told["min_searches"] if needed else np.nan
    right = told["min_searches"] == 0
    table.append((sum(without) >= delta, needed, right, sure, excess))
  known, needed, right, sure = np.array(table)[:, :4].astype(bool).T

  def share(what: np.ndarray, where: np.ndarray) -> float:
    return float(np.mean(what[where])) if where.any() else float("nan")

  return {
    "known": float(np.mean(known)),
    "needed": float(np.mean(needed)),
    "right": float(np.mean(right)),
    "accuracy": float(np.mean(known == right)),
    "precision": share(right, known),
    "recall": share(known, right),
    "unsure": share(~sure, known),
    "false_need": share(right, needed),
    "excess": share(np.array(table)[:, 4].astype(float), needed),
  }


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  path = pathlib.Path(flags.FLAGS.evaluation) / "episodes.jsonl"
  rows = list(aj.read_episodes(path))
  for delta in range(1, flags.FLAGS.deltas + 1):
    found = boundary(rows, delta)
    print(f"delta {delta}:", *(f"{k} {v:.3f}" for k, v in found.items()))


if __name__ == "__main__":
  flags.DEFINE_string("evaluation", None, "Its folder.", required=True)
  flags.DEFINE_integer("deltas", 4, "Up to which delta.", lower_bound=1)
  app.run(main)
