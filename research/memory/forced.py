"""Plays a policy whose decisions are forced: an episode of every depth.

    MEMORY_POLICY=R/warm_start/policy anysearch evaluate \
        --scripted=research/memory/forced.py:player \
        --config.evaluation.seeds=0,1,2,3,4 --budgets=4 ...

The evaluation's seed is the depth d: d turns begin with "Search.", the next
with "Answer.". The policy writes the rest of each turn itself.
"""

from __future__ import annotations

import dataclasses
import os

import anysearch_jax as aj
from research.memory import memories

_VARIABLE = "MEMORY_POLICY"
OPENED = "<think>"


class Forced:
  """An engine that writes the decisions of another one's turns.

  Args:
    engine: samples what follows a decision.
    codec: of its tokens.
  """

  def __init__(self, engine: aj.Engine, codec: aj.Tokenizer):
    self._engine = engine
    self._codec = codec

  async def generate(self, request: aj.GenerateRequest) -> aj.Generation:
    """Returns the next turn, which begins with the forced decision."""
    depth = request.address.rollout
    decision = memories.SEARCH if request.turn < depth else memories.ANSWER
    words = OPENED + decision
    prefix = tuple(self._codec.encode(words))
    turn = await self._engine.generate(
      dataclasses.replace(
        request,
        token_ids=(*request.token_ids, *prefix),
        max_tokens=max(request.max_tokens - len(prefix), 1),
      )
    )
    return dataclasses.replace(
      turn,
      token_ids=(*prefix, *turn.token_ids),
      logps=(*[0.0] * len(prefix), *turn.logps),
      versions=(*[0] * len(prefix), *turn.versions),
      text=words + turn.text,
    )

  def release(self, address: aj.Address) -> None:
    """Forgets an episode's cache."""
    self._engine.release(address)


def player(config: aj.ExperimentConfig, source) -> aj.Player:
  """Returns the forced policy, as `anysearch evaluate --scripted` calls it.

  Raises:
    ValueError: the variable names no policy.
  """
  folder = os.environ.get(_VARIABLE)
  if not folder:
    raise ValueError(
      f"{_VARIABLE}: found nothing, expected the folder of the policy whose "
      "decisions are forced. Set it before the command."
    )
  policy = aj.load_policy(folder)
  engine = aj.make_engine(policy, config, seed=0, trains=False)
  return aj.Player(Forced(engine, policy.tokenizer), policy.tokenizer)
