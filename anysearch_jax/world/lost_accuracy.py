"""Where an episode of the generated world loses accuracy, decision by decision.

Before an episode, the best agent is right with a probability V that
`optimum.Optimum` computes. Every decision to search or not, every slip of words
and every piece of luck changes what is still possible, so

    V - right = too few searches + too many + slips + luck

exactly, and luck is 0 on average.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import Any

from anysearch_jax.world import optimum as optimum_lib
from anysearch_jax.world import world as world_lib

TOO_FEW, TOO_MANY = "too few searches", "too many searches"
SLIPS, LUCK = "slips", "luck"


def lost(
  record: Mapping[str, Any],
  *,
  world: world_lib.World,
  best: optimum_lib.Optimum,
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
    world: world_lib.World,
    best: optimum_lib.Optimum,
  ):
    self.facts = record["metadata"]["facts"]
    self.losses: dict[tuple[str, str], float] = collections.defaultdict(float)
    self._relations = tuple(fact["relation"] for fact in self.facts)
    self._words = list(_words(record))
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
    if relation not in (
      fact["relation"],
      fact["alternative"],
      world_lib.VERDICT,
    ):
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


def _words(record: Mapping[str, Any]) -> Iterator[str]:
  for span in record["spans"]:
    if span["author"] == "model":
      yield from span["text"].split()
