r"""Agents of the noisy world that write what they decide: engines of episodes.

    python -m launch.evaluate --config=research/noisy_world.py \
        --scripted=research/noisy_agent.py:optimum \
        --output=runs/noisy-world/best

A turn states what is left of the budget, what memory holds, and, for each value
in the order in which passages stated it, how many cheap and how many dear ones
did:

    <think> budget 3 recall a found b 2 0 a 0 1 </think> <search> s r </search>

`optimum` plays the best decisions. `soft` is the expert of the warm start: it
knows this form and prefers the values and the silence that are worth more now,
but ignores what is left of its budget and what a search costs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import anysearch_jax as aj
from research import noisy_optimum
from research import noisy_world as world

_PROMPT = re.compile(r"budget (\d+) question (\w+) (\w+) \?")
# A search that was carried out: the last word of its query, and the value of
# its passage; what finds nothing has no value.
_SEARCH = re.compile(
  r"<search>[^<]*?(\w+)\s*</search>\s*<information>(?:.*?\) \w+ (\w+))?", re.S
)
# What the soft expert takes a search to be worth, and how soft it is.
_SEARCHES = {world.CHEAP: 0.75, world.DEAR: 0.6}
_TEMPERATURE = 0.15


class Situation(NamedTuple):
  """What an agent knows before a turn.

  Attributes:
    subject, relation: of the question.
    left: searches that are left.
    seen: (source, value) of the passages so far.
  """

  subject: str
  relation: str
  left: int
  seen: tuple[tuple[str, str], ...] = ()

  @property
  def memory(self) -> str | None:
    return world.remembered(self.subject, self.relation)

  def stated(self) -> dict[str, tuple[int, int]]:
    """Returns how often each search stated each value, by first mention."""
    return {
      value: (
        self.seen.count((world.CHEAP, value)),
        self.seen.count((world.DEAR, value)),
      )
      for _, value in self.seen
    }

  def belief(self) -> noisy_optimum.Belief:
    """Returns the counters without the names of the values."""
    named = self.counters()
    listed = sorted(each for each in named.values() if any(each))
    return noisy_optimum.Belief(world.TRUST[self.relation], tuple(listed))

  def counters(self) -> dict[str, tuple[int, int, int]]:
    """Returns the counters of all values, see `noisy_optimum.Belief`."""
    counts = self.stated()
    return {
      value: (int(value == self.memory), *counts.get(value, (0, 0)))
      for value in world.VALUES
    }

  def probabilities(self) -> dict[str, float]:
    """Returns P(answer) of each value."""
    belief = self.belief()
    known = noisy_optimum.posterior(belief)
    listed = dict(zip(belief.counters, known.listed))
    named = self.counters().items()
    return {value: listed.get(key, known.other) for value, key in named}


# Returns `cheap`, `dear`, `nothing` or the value that is answered.
Decide = Callable[[Situation, np.random.Generator], str]


def best(situation: Situation, rng: np.random.Generator) -> str:
  """Decides as the optimum does."""
  del rng
  decision = noisy_optimum.best(situation.belief(), situation.left)
  if decision == noisy_optimum.ANSWER:
    found = situation.probabilities()
    return max(found, key=found.__getitem__)
  silent = decision == noisy_optimum.STAY_SILENT
  return world.NOTHING if silent else decision


def softly(situation: Situation, rng: np.random.Generator) -> str:
  """Draws a decision, P ~ exp(worth / temperature).

  An answer is worth its probability, silence its reward, and a search a
  constant.
  """
  worth = situation.probabilities() | {world.NOTHING: world.ABSTAIN}
  if situation.left:
    worth |= _SEARCHES
  p = np.exp(np.array(list(worth.values())) / _TEMPERATURE)
  return str(rng.choice(list(worth), p=p / p.sum()))


def words(situation: Situation, decision: str) -> list[str]:
  """Returns the turn that says what is known, and acts."""
  thought = ["budget", str(situation.left)]
  if situation.memory:
    thought += ["recall", situation.memory]
  if situation.seen:
    thought.append("found")
    for value, counts in situation.stated().items():
      thought += [value, *map(str, counts)]
  wording = {world.CHEAP: situation.relation, world.DEAR: world.VERDICT}
  act = ["<answer>", decision, "</answer>"]
  if decision in wording:
    act = ["<search>", situation.subject, wording[decision], "</search>"]
  return ["<think>", *thought, "</think>", *act]


def read(text: str) -> Situation:
  """Returns the situation at the end of a context.

  Raises:
    ValueError: the context is not one of this world.
  """
  prompt = _PROMPT.search(text)
  if prompt is None or prompt[3] not in world.TRUST:
    raise ValueError(
      f"Found the context {text[:80]!r}, expected the prompt of a question of "
      "research/noisy_world.py (episode.prompts 'world', without the scaffold)."
    )
  searches = _SEARCH.findall(text, prompt.end())
  seen = tuple(
    (world.DEAR if word == world.VERDICT else world.CHEAP, value)
    for word, value in searches
    if value
  )
  left = int(prompt[1]) - len(searches)
  return Situation(prompt[2], prompt[3], left, seen)


class Agent:
  """An `aj.Engine` whose turns are `words` of what `decide` returns."""

  def __init__(self, decide: Decide, codec: aj.Tokenizer, seed: int):
    self._decide, self._codec, self._seed = decide, codec, seed

  async def generate(self, request: aj.GenerateRequest) -> aj.Generation:
    situation = read(self._codec.decode(request.token_ids))
    entropy = self._seed, *request.address, request.turn
    rng = np.random.default_rng(entropy)
    text = " ".join(words(situation, self._decide(situation, rng)))
    ids = self._codec.encode(text)
    n = len(ids)
    return aj.Generation(tuple(ids), (0.0,) * n, text, aj.Finish.STOP, (0,) * n)

  def release(self, address: aj.Address) -> None:
    """Does nothing: this engine keeps no cache."""


def codec() -> aj.Tokenizer:
  """Returns the tokenizer, which is that of the generated world."""
  return aj.Tokenizer(aj.world_tokenizer(world.NAMES))


def optimum(config: aj.ExperimentConfig, source: Any) -> aj.Player:
  """Returns the best agent, for `--scripted`."""
  del source
  made = codec()
  return aj.Player(Agent(best, made, config.seed), made)


def soft(config: aj.ExperimentConfig, source: Any) -> aj.Player:
  """Returns the warm start's expert, for `--scripted`."""
  del source
  made = codec()
  return aj.Player(Agent(softly, made, config.seed), made)
