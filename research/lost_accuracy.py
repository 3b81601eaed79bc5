"""Where policies lose accuracy in the generated world, decision by decision.

    python -m research.lost_accuracy runs/anysearch/evaluation/plain ...

Every argument is the folder of an evaluation with the prompts `world`, without
the scaffold. Before an episode, the best agent is right with a probability V
that `optimum.Optimum` computes. Every decision to search or not, every slip of
words and every piece of luck changes what is still possible, so

    V - right = too few searches + too many + slips + luck

exactly, and luck is 0 on average. Prints these means by budget. The lines of a
kind add up to its first line, and all kinds to the difference.
"""

from __future__ import annotations

import collections
import json
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl import app

import anysearch_jax as aj

_SMALL = 0.0005  # Lines below it at every budget are not printed.

TOO_FEW, TOO_MANY = "too few searches", "too many searches"
SLIPS, LUCK = "slips", "luck"
KINDS = (TOO_FEW, TOO_MANY, SLIPS, LUCK)


def lost(
  record: Mapping[str, Any],
  *,
  world: aj.World,
  best: aj.optimum.Optimum,
) -> dict[tuple[str, str], float]:
  """Returns what an episode loses against the best agent.

  Args:
    record: an episode of `episodes.jsonl`, played without the scaffold in the
      prompts `world`.
    world: the one of its question.
    best: the best agent in this world, without a price.

  Returns:
    Losses of P(right answer), which sum to V - right. Keys are a kind, one of
    the constants of this module, and its place. A decision's place is its
    situation (`expert.Situation.decision`; `known` with the reliability of the
    memory; `found` after a value was found), a slip's says what the policy did,
    and luck has "".
  """
  walk = _Walk(record, world, best)
  walk.read()
  relations = tuple(fact["relation"] for fact in walk.facts)
  start = best.value(relations, record["budget"])
  found = dict(walk.losses)
  found[LUCK, ""] = start - record["em"] - sum(found.values())
  return found


class _SlipError(Exception):
  """The policy wrote what no decision explains; says what."""


class _Walk:
  """Reads what the policy wrote, up to the first value that is wrong."""

  def __init__(
    self,
    record: Mapping[str, Any],
    world: aj.World,
    best: aj.optimum.Optimum,
  ):
    self.facts = record["metadata"]["facts"]
    self.losses: dict[tuple[str, str], float] = collections.defaultdict(float)
    self._relations = tuple(fact["relation"] for fact in self.facts)
    spans = record["spans"]
    said = [each["text"] for each in spans if each["author"] == "model"]
    self._words = " ".join(said).split()
    self._world, self._best = world, best
    self._left = record["budget"]
    self._hop = 0
    # The decision that is open, and the value of the present fact if settled.
    self._decision = ""
    self._settled: tuple[str, str] | None = None

  def read(self) -> None:
    try:
      for at, word in enumerate(self._words):
        after = [*self._words[at + 1 : at + 3], "", ""][:2]
        if not self._step(word, *after):
          return
    except _SlipError as slip:
      self.losses[SLIPS, str(slip)] += self._still_possible()

  def _step(self, word: str, first: str, second: str) -> bool:
    """Reads one word; returns whether the answer may still be right."""
    match word:
      case "need":
        return self._need(first, second)
      case "nothing":
        self._decision = "miss"
      case "conflict":
        self._decision = "conflict"
      case "<search>":
        self._decide(search=True)
        self._left = max(self._left - 1, 0)
      case "recall" | "guess":
        self._decide(search=False)
        self._settled = (word, first)
      case "found":
        self._settled = (word, first)
      case "<answer>":
        return self._answer(first)
    return True

  def _need(self, entity: str, relation: str) -> bool:
    if self._settled and entity != self._fact["entity"]:
      if not self._moves_on():
        return False
      if self._hop == len(self.facts):
        raise _SlipError("goes on after the last fact")
    fact = self._fact
    if entity != fact["entity"]:
      raise _SlipError("needs another entity")
    if relation not in (fact["relation"], fact["alternative"], "verdict"):
      raise _SlipError("needs another relation")
    if self._settled:
      self._decision = "found"
    elif not self._decision:
      self._decision = "known" if fact["known"] else "unknown"
    return True

  def _answer(self, answer: str) -> bool:
    if self._settled is None:
      raise _SlipError("answers without a value")
    value = self._settled[1]
    if self._moves_on():
      if self._hop < len(self.facts):
        raise _SlipError("answers too early")
      if answer != value:
        raise _SlipError("answers another value")
    return False

  def _moves_on(self) -> bool:
    """Goes to the next fact; returns False if the present value is wrong."""
    assert self._settled
    how, value = self._settled
    fact = self._fact
    if value != fact["value"]:
      if how == "found":
        raise _SlipError("misreads a passage")
      memory = self._world.recall(fact["entity"], fact["relation"])
      if how == "recall" and value != memory:
        raise _SlipError("misremembers")
      return False
    self._hop += 1
    self._decision, self._settled = "", None
    return True

  @property
  def _fact(self) -> Mapping[str, Any]:
    return self.facts[self._hop]

  def _still_possible(self) -> float:
    """Returns the best P(right answer) from here on."""
    done = self._settled is not None and self._hop < len(self.facts)
    return self._best.value(self._relations[self._hop + done :], self._left)

  def _decide(self, *, search: bool) -> None:
    """Adds what a decision loses against the better one."""
    if not self._left or not self._decision:
      return
    rest = self._relations[self._hop :]
    if self._decision == "found":  # Nothing is left to be found out.
      if search:
        loss = self._best.value(rest[1:], self._left)
        loss -= self._best.value(rest[1:], self._left - 1)
        self.losses[TOO_MANY, "found"] += loss
      return
    fact = self._fact
    values = self._best.options(self._decision, fact["known"], rest, self._left)
    loss = max(values) - values[0 if search else 1]
    if loss > 0:
      place = self._decision
      if place == "known":
        place += f" {self._world.reliability(fact['relation']):.2g}"
      self.losses[TOO_MANY if search else TOO_FEW, place] += loss


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
    found = lost(episode, world=world, best=best)
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
