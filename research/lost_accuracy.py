"""Where policies lose accuracy in the generated world, decision by decision.

    python -m research.lost_accuracy runs/anysearch/evaluation/plain ...

Every argument is the folder of an evaluation with the prompts `world`. Before
an episode, the best agent is right with a probability V that `optimum.Optimum`
computes. Every search, the answer and every piece of luck change what is still
possible, so

    V - right = too few searches + too many + worse searches + answers + luck

exactly, and luck is 0 on average but for what the optimum neglects. A search
that is not for a fact of the most likely chain counts as one that shows
nothing. Prints these means by budget. The lines of a kind add up to its first
line, and all kinds to the difference.
"""

from __future__ import annotations

import collections
import json
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl import app

import anysearch_jax as aj

_SMALL = 0.0005  # Lines below it at every budget are not printed.

TOO_FEW, TOO_MANY = "too few searches", "too many searches"
WORSE, ANSWERS, LUCK = "worse searches", "answers", "luck"
KINDS = (TOO_FEW, TOO_MANY, WORSE, ANSWERS, LUCK)
_ACTS = re.compile(r"<(search|answer)>(.*?)</(?:search|answer)>", re.S)


def lost(
  record: Mapping[str, Any], best: aj.optimum.Optimum
) -> dict[tuple[str, str], float]:
  """Returns what an episode loses against the best agent.

  Args:
    record: an episode of `episodes.jsonl`.
    best: the best agent in the world of its question, without a price.

  Returns:
    Losses of P(right answer), which sum to V - right. Keys are a kind, one of
    the constants of this module, and its place: of a search its situation
    (`unknown`; `known` with the reliability of the memory; `miss` after a
    search that found nothing; `conflict` after one that found two values), or
    `off the chain`; of answers and luck "".
  """
  world, left = best.world, record["budget"]
  _, snapshot_name, start, names = record["question_id"].split("/")
  snapshot, chain = world.snapshot(int(snapshot_name)), tuple(names.split("-"))
  found: dict[aj.optimum.Fact, Sequence[int]] = {}
  losses: dict[tuple[str, str], float] = collections.defaultdict(float)

  def place(move: aj.optimum.Move) -> str:
    assert move.fact
    if move.fact in found:
      return "conflict" if found[move.fact] else "miss"
    if not world.known[move.fact]:
      return "unknown"
    return f"known {world.reliability(move.relation):.2g}"

  said = [s["text"] for s in record["spans"] if s["author"] == "model"]
  answer = ""
  for act, words in _ACTS.findall(" ".join(said)):
    if act == "answer":
      answer = words.strip()
      break
    if not left:
      continue  # Such a search is refused.
    moves = best.moves(start, chain, left, found)
    left -= 1
    seen = aj.optimum.visible_values(world, snapshot, words)
    made = [m for m in moves if m.fact and (m.fact, m.wording) in seen]
    value = (made or best.moves(start, chain, left, found))[0].value
    if moves[0].value > value:
      kind = WORSE if moves[0].fact else TOO_MANY
      where = place(made[0]) if made else "off the chain"
      losses[kind, where] += moves[0].value - value
    for (fact, _), values in seen.items():
      if len(found.get(fact, ())) != 1:
        found[fact] = values or found.get(fact, ())
  moves = best.moves(start, chain, left, found)
  stop = next(move for move in moves if not move.fact)
  if moves[0].fact:
    losses[TOO_FEW, place(moves[0])] += moves[0].value - stop.value
  chances = best.answers(start, chain, found)
  right = chances[world.index[answer]] if answer in world.index else 0.0
  if chances.max() > right:
    losses[ANSWERS, ""] += chances.max() - right
  whole = best.value(start, chain, record["budget"])
  losses[LUCK, ""] = whole - record["em"] - sum(losses.values())
  return dict(losses)


def page(episodes: Iterable[Mapping[str, Any]], world: aj.World) -> str:
  """Returns the table of one evaluation; failed episodes are left out."""
  best = aj.optimum.Optimum(world)
  sums: dict[tuple[str, str], dict[int, float]] = collections.defaultdict(
    lambda: collections.defaultdict(float)
  )
  counts: collections.Counter[int] = collections.Counter()
  for episode in episodes:
    if episode["failed"] or episode["scaffold"] or not episode["budget"]:
      continue
    budget = episode["budget"]
    counts[budget] += 1
    found = lost(episode, best)
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
  for kind in KINDS:
    out.append(line(kind, sums[kind, ""]))
    places = [p for k, p in sums if k == kind and p]
    for place in sorted(places, key=lambda p: -sum(sums[kind, p].values())):
      of = sums[kind, place]
      if max(of[b] / counts[b] for b in budgets) >= _SMALL:
        out.append(line(f"  {place}", of))
  return "\n".join(out)


def main(argv: Sequence[str]) -> None:
  if len(argv) < 2:
    raise app.UsageError("Name at least one folder of an evaluation.")
  for name in argv[1:]:
    folder = pathlib.Path(name)
    if not (folder / "episodes.jsonl").is_file():
      sys.exit(f"{folder}: no episodes.jsonl; expected an evaluation's folder.")
    data = json.loads((folder / "config.json").read_text()).get("data", {})
    world = aj.World(
      data.get("world_seed", 0), data.get("world_reliability", 0.0)
    )
    episodes = aj.read_episodes(folder / "episodes.jsonl")
    print(f"{folder}\n{page(episodes, world)}\n")


if __name__ == "__main__":
  app.run(main)
