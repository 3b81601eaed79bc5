"""Says where policies lose accuracy in the generated world.

    python -m bench.lost_accuracy runs/anysearch/evaluation/plain ...

Every argument is the folder of an evaluation with the prompts `world`, without
the scaffold. Prints, by budget, what the best agent is right more often, and
what that comes from: searches that were not made, searches that were wasted,
slips of words, luck. The lines of a kind add up to its first line, and all
kinds to the difference.
"""

from __future__ import annotations

import collections
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl import app

from anysearch_jax import config as config_lib
from anysearch_jax.config import values as config_values
from anysearch_jax.evaluation import journal
from anysearch_jax.host import json_files
from anysearch_jax.world import lost_accuracy, optimum, versions
from anysearch_jax.world import world as world_lib

_SMALL = 0.0005  # Lines below it at every budget are not printed.


def main(argv: Sequence[str]) -> None:
  if len(argv) < 2:
    raise app.UsageError("Name at least one folder of an evaluation.")
  for name in argv[1:]:
    folder = pathlib.Path(name)
    if not (folder / "episodes.jsonl").is_file():
      sys.exit(f"{folder}: no episodes.jsonl; expected an evaluation's folder.")
    data = config_values.renamed(json_files.read(folder / "config.json"))
    default = config_lib.DataConfig()
    data = data.get("data", {})
    world = world_lib.World(
      versions.config(
        data.get("world", default.world),
        data.get("world_seed", default.world_seed),
      )
    )
    episodes = journal.read(folder / "episodes.jsonl")
    print(f"{folder}\n{page(episodes, world)}\n")


def page(episodes: Iterable[Mapping[str, Any]], world: world_lib.World) -> str:
  """Returns the table of one evaluation; failed episodes are left out."""
  best = optimum.Optimum(world)
  sums: dict[tuple[str, str], dict[int, float]] = collections.defaultdict(
    lambda: collections.defaultdict(float)
  )
  counts: collections.Counter[int] = collections.Counter()
  for episode in episodes:
    if episode["failed"] or episode["scaffold"] or not episode["budget"]:
      continue
    budget = episode["budget"]
    counts[budget] += 1
    found = lost_accuracy.lost(episode, world=world, best=best)
    for (kind, place), loss in found.items():
      for key in {("all", ""), (kind, ""), (kind, place)}:
        sums[key][budget] += loss
  budgets = sorted(counts)

  def line(label: str, of: Mapping[int, float]) -> str:
    means = [of[b] / counts[b] for b in budgets]
    pooled = sum(of.values()) / max(counts.total(), 1)
    return f"{label:28}" + "".join(f"{x:8.4f}" for x in (*means, pooled))

  head = "".join(f"{f'B={b}':>8}" for b in budgets)
  out = [
    f"{'lost accuracy':28}{head}{'pooled':>8}",
    line("all", sums["all", ""]),
  ]
  for kind in (
    lost_accuracy.TOO_FEW,
    lost_accuracy.TOO_MANY,
    lost_accuracy.SLIPS,
    lost_accuracy.LUCK,
  ):
    out.append(line(kind, sums[kind, ""]))
    places = [p for k, p in sums if k == kind and p]
    for place in sorted(places, key=lambda p: -sum(sums[kind, p].values())):
      of = sums[kind, place]
      if max(of[b] / counts[b] for b in budgets) >= _SMALL:
        out.append(line(f"  {place}", of))
  return "\n".join(out)


if __name__ == "__main__":
  app.run(main)
