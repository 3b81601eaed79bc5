"""Exact agents of the generated world as policies to evaluate.

    python -m launch.evaluate --scripted=optimum ...

* `optimum`, `optimum:PRICE`: the best use of each budget, see
  `optimum.Optimum`; with a price, a search costs this much of a right answer.
* `unknown_only`: searches for every fact that memory does not hold.
* `everything`: searches for every fact.

The last two search again after a miss, and verify two values; all answer what
is most likely by all that they know.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from anysearch_jax import types
from anysearch_jax.policy import tokenizer as tokenizer_lib
from anysearch_jax.rollout import scripted
from anysearch_jax.world import optimum, world_tokenizer
from anysearch_jax.world import world as world_lib

_PROMPT = re.compile(r"budget (\d+) question (.*? \?)")
_SEARCHED = re.compile(
  r"<search> (\S+) (\S+) </search>\s*<information>(.*?)</information>", re.S
)
_PASSAGE = re.compile(
  r"Doc \d+\(Title: (\S+) \) (.*?)(?= Doc \d+\(Title:|\s*$)", re.S
)


Say = Callable[[types.GenerateRequest, str], str]


class ScriptedEngine:
  """A `types.Engine` whose turns come from a function, with log-prob 0.

  Args:
    say: returns the text of a turn, given the request and the decoded context.
      The text is cut after its first stop text; without one it gets an
      end-of-turn token.
    codec: encodes and decodes the tokens.
  """

  def __init__(self, say: Say, codec: types.TextCodec):
    self._say = say
    self._codec = codec
    self.counters: Counter[str] = Counter()

  async def generate(self, request: types.GenerateRequest) -> types.Generation:
    """Returns the scripted turn, truncated to `max_tokens`."""
    turn_text = self._say(request, self._codec.decode(request.token_ids))
    turn = scripted.generation(turn_text, request, self._codec)
    self.counters["sampled_tokens"] += len(turn.token_ids)
    return turn

  def release(self, address: types.Address) -> None:
    """Does nothing: this engine keeps no cache."""


NAMES = ("optimum", "unknown_only", "everything")


def from_name(
  name: str, world: world_lib.World
) -> tuple[ScriptedEngine, types.TextCodec]:
  """Returns the engine of one of `NAMES`, and the tokenizer of its world.

  Raises:
    ValueError: there is no such policy, or its price is not a number >= 0.
  """
  kind, _, price = name.partition(":")
  try:
    if name in ("everything", "unknown_only"):
      thorough = optimum.Thorough(world, search_known=name == "everything")
      return make_engine(world, thorough)
    if kind == "optimum":
      return make_engine(world, optimum.Optimum(world, price=float(price or 0)))
    raise ValueError("there is no such policy")
  except ValueError as error:
    raise ValueError(
      f"--scripted={name}: {error}; expected one of {', '.join(NAMES)}, "
      "optimum:0.05 (with a price), or module:function."
    ) from error


def make_engine(
  world: world_lib.World, agent: optimum.Optimum
) -> tuple[ScriptedEngine, types.TextCodec]:
  """Returns the engine of an agent, and the tokenizer of its world.

  The engine keeps no state between turns: it reads the context in each.
  """
  codec = tokenizer_lib.Tokenizer(world_tokenizer.build_tokenizer(world))

  def say(request: types.GenerateRequest, context: str) -> str:
    del request
    prompt = _PROMPT.search(context)
    if prompt is None:
      raise ValueError(
        f"Found the context {context[:80]!r}, expected the prompt of a "
        "question of the world (episode.prompts 'world')."
      )
    return turn(agent, prompt[2], int(prompt[1]), context)

  return ScriptedEngine(say, codec), codec


def turn(
  agent: optimum.Optimum, question: str, budget: int, context: str
) -> str:
  """Returns the next turn of an agent.

  Args:
    agent: decides the turn.
    question: the text of a question of the agent's world.
    budget: searches of the whole episode.
    context: the episode so far, with the searches of any agent.
  """
  start, *chain, _ = question.split()
  found_values: dict[optimum.Fact, list[int]] = {}
  searches = _SEARCHED.findall(context)
  for entity, wording, results in searches:
    subject = agent.world.index[entity]
    if wording == world_lib.VERDICT:
      facts = [
        fact
        for fact, values in found_values.items()
        if fact[0] == subject and len(values) > 1
      ]
    else:
      facts = [
        (subject, r)
        for r, relation in enumerate(world_lib.RELATIONS)
        if wording in (relation.name, relation.alternative)
      ]
    names = values_of(passages_of(results), entity, (wording,))
    found_values |= dict.fromkeys(
      facts, [agent.world.index[name] for name in names]
    )
  move = agent.moves(start, tuple(chain), budget - len(searches), found_values)[
    0
  ]
  if move.fact:
    entity = agent.world.entities[move.fact[0]]
    return (
      f"<think> need {entity} {move.relation} ; </think> "
      f"<search> {entity} {move.wording} </search>"
    )
  chances = agent.answers(start, tuple(chain), found_values)
  value = agent.world.entities[int(chances.argmax())]
  return f"<think> found {value} ; </think> <answer> {value} </answer>"


def passages_of(results: str) -> list[types.Passage]:
  """Parses the passages of a search's results, as an episode shows them."""
  return [
    types.Passage("", title, words)
    for title, words in _PASSAGE.findall(results)
  ]


def values_of(
  passages: Sequence[types.Passage], entity: str, wordings: Sequence[str]
) -> list[str]:
  """Returns the distinct values of an entity in passages.

  Args:
    passages: passages of the world.
    entity: the title of the passages that are read.
    wordings: the wordings of a relation that are read.
  """
  values: dict[str, None] = {}
  for passage in passages:
    wording, value, *_ = passage.text.split()
    if passage.title == entity and wording in wordings:
      values[value] = None
  return list(values)
