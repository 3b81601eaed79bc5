"""The world's expert as a policy to evaluate.

    python -m launch.evaluate --scripted=expert ...

The warm start learns from this expert's demonstrations, so its accuracy is what
imitation can reach. With another `ExpertConfig`, for example one that searches
every fact, it measures what a policy can reach in the world.
"""

from __future__ import annotations

import re

import numpy as np

from anysearch_jax import types
from anysearch_jax.policy import tokenizer as tokenizer_lib
from anysearch_jax.rollout import scripted
from anysearch_jax.world import expert, world_tokenizer
from anysearch_jax.world import world as world_lib

_PROMPT = re.compile(r"(guide )?budget (\d+) question (.*? \?)")
_AFTER_SEARCH = re.compile(
  r"</search>\s*(?:<information>(.*?)</information>)?", re.S
)
_PASSAGE = re.compile(
  r"Doc \d+\(Title: (\S+) \) (.*?)(?= Doc \d+\(Title:|\s*$)", re.S
)


def make(
  world: world_lib.World,
  config: expert.ExpertConfig | None = None,
) -> tuple[scripted.ScriptedEngine, types.TextCodec]:
  """Returns the expert's engine, and the tokenizer of its world.

  The engine keeps no state between turns: in each turn it replays the episode
  from the context, with the same random numbers.

  Args:
    world: its memory is the expert's.
    config: probabilities of decisions; None uses those of the demonstrations.
  """
  config = config or expert.ExpertConfig()
  codec = tokenizer_lib.Tokenizer(world_tokenizer.build_tokenizer(world))

  def say(request: types.GenerateRequest, context: str) -> str:
    prompt = _PROMPT.search(context)
    if prompt is None:
      raise ValueError(
        f"Found the context {context[:80]!r}, expected the prompt of a "
        "question of the world (episode.prompts 'world')."
      )
    turns = expert.Expert(
      types.Question("", prompt[3], ()),
      world=world,
      budget=int(prompt[2]),
      scaffold=bool(prompt[1]),
      config=config,
      rng=np.random.default_rng(request.address[:4]),
    ).turns()
    said = " ".join(next(turns).words)
    for found in _AFTER_SEARCH.finditer(context, prompt.end()):
      if said not in context:
        raise types.EngineError(
          "Found a turn that the scripted expert did not write; it can "
          "continue only its own episodes, so they cannot branch."
        )
      passages = None if found[1] is None else _passages(found[1])
      said = " ".join(turns.send(passages).words)
    return said

  return scripted.ScriptedEngine(say, codec), codec


def _passages(text: str) -> list[types.Passage]:
  return [
    types.Passage("", title, words) for title, words in _PASSAGE.findall(text)
  ]
