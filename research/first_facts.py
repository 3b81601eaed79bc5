"""Whether a policy searches the first fact of a question if it lacks it.

    python -m research.first_facts runs/a/evaluation/plain

The first fact of a chain of the generated world is the only one that every
episode reaches. It may be `known` to the policy, `unknown`, or `stale`: its
memory holds an old value. Each line has the share of episodes at B >= 1 that
searched it, with a 95 % interval over questions; `gap` is unknown minus known.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

import anysearch_jax as aj

KINDS = ("known", "unknown", "stale")


def asks_for(query: str, fact: Mapping[str, Any]) -> bool:
  """Whether `query` has the entity and either wording as whole words."""

  def words(text: str) -> str:
    return " " + " ".join(re.findall(r"\w+", text.lower())) + " "

  def mentions(phrase: str) -> bool:
    return bool(phrase.strip()) and words(phrase) in words(query)

  wordings = (fact.get(name) or "" for name in ("relation", "alternative"))
  return mentions(fact["entity"]) and any(map(mentions, wordings))


def first_hop(episode: aj.columns.Episode) -> tuple[str, bool] | None:
  """Returns the kind of an episode's first fact, and if it was searched.

  It is None if the budget is 0 or the question does not list its facts.
  """
  facts = episode.get("metadata", {}).get("facts")
  if episode["budget"] < 1 or not facts:
    return None
  fact = facts[0]
  kind = next((k for k in ("stale", "known") if fact.get(k)), "unknown")
  return kind, any(asks_for(query, fact) for query in episode["queries"])


def knowledge(
  episodes: Iterable[aj.columns.Episode],
) -> dict[str, tuple[aj.inference.Estimate, int]]:
  """Returns how often the first fact is searched, by the policy's memory of it.

  There are a rate and its number of episodes for each of `KINDS` and for `gap`,
  or nothing if no question lists its facts. The episodes are of one training.
  """
  episodes = [e for e in episodes if first_hop(e)]
  hops = {
    aj.columns.key_of(episode): hop
    for episode in episodes
    if (hop := first_hop(episode))
  }
  table = aj.columns.as_columns(episodes).scored()
  if not len(table):
    return {}
  keys = zip(
    table.ids[table.question],
    table.budget.tolist(),
    table.seed.tolist(),
    strict=True,
  )
  first_hops = [hops[key] for key in keys]
  searched = np.array([is_searched for _, is_searched in first_hops])
  kinds = [np.array([kind == k for kind, _ in first_hops]) for k in KINDS]
  counts = [int(kind.sum()) for kind in kinds]
  ratios = aj.measures.ratios(table, [searched * kind for kind in kinds], kinds)
  rates = aj.inference.rates(ratios, counts)
  # KINDS begins with known and unknown.
  (gap,) = aj.inference.effects(ratios.combined(np.array([[-1.0, 1.0, 0.0]])))
  return {
    kind: (rate.estimate, count)
    for kind, rate, count in zip(KINDS, rates, counts, strict=True)
  } | {"gap": (gap.estimate, counts[0] + counts[1])}


def main(folders: list[str]) -> None:
  for folder in folders:
    episodes = aj.read_episodes(pathlib.Path(folder) / "episodes.jsonl")
    for kind, (estimate, count) in knowledge(episodes).items():
      numbers = ["–" if x is None else f"{x:.3f}" for x in estimate]
      print(folder, kind, *numbers, f"n={count}", sep="\t")


if __name__ == "__main__":
  main(sys.argv[1:])
