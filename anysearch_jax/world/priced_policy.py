"""The expert with two searches as a policy to evaluate.

    python -m launch.evaluate --config=configs/priced_tools.py \
        --scripted=priced_optimum ...

* `priced_optimum`, `priced_optimum:PRICE`: the best use of a budget of cents,
  see `priced_optimum`; with a price, a cent costs this much of a right answer.
* `cheap_optimum`, `dear_optimum`: the same with one of the searches alone.
"""

from __future__ import annotations

import re

import numpy as np

from anysearch_jax import budgets, types
from anysearch_jax.policy import tokenizer as tokenizer_lib
from anysearch_jax.rollout import scripted
from anysearch_jax.world import (
  expert_policy,
  priced_demonstrations,
  priced_expert,
  priced_optimum,
  world_tokenizer,
)
from anysearch_jax.world import world as world_lib

_PROMPT = re.compile(r"ample (\d+) ; budget ample question (.*? \?)")
TOOLS = {
  "priced_optimum": (priced_expert.CHEAP, priced_expert.DEAR),
  "cheap_optimum": (priced_expert.CHEAP,),
  "dear_optimum": (priced_expert.DEAR,),
}
NAMES = tuple(TOOLS)


def named(
  name: str, world: world_lib.World, prices: budgets.Prices
) -> tuple[scripted.ScriptedEngine, types.TextCodec]:
  """Returns the engine of one of `NAMES`, and the tokenizer of its world.

  Args:
    name: may end with a price, as in `priced_optimum:0.02`.
    world: its statistics are the agent's.
    prices: of the tools `cheap` and `search`, see
      `priced_demonstrations.cents`.

  Raises:
    ValueError: the price of a cent is no number from 0, or prices do not fit.
  """
  kind, _, price = name.partition(":")
  tools = TOOLS[kind]
  cents = priced_demonstrations.cents(prices, tools)
  try:
    strategy = priced_optimum.PricedOptimum(
      world, cents=cents, tools=tools, price=float(price or 0)
    )
  except ValueError as error:
    raise ValueError(
      f"--scripted={name}: {error}; expected a price as in {kind}:0.02."
    ) from error
  return make(world, cents, strategy)


def make(
  world: world_lib.World,
  cents: priced_expert.Cents,
  strategy: priced_expert.Strategy,
) -> tuple[scripted.ScriptedEngine, types.TextCodec]:
  """Returns the engine of an expert that keeps no state between turns.

  In each turn it replays the episode from the context, with the same random
  numbers.
  """
  codec = tokenizer_lib.Tokenizer(world_tokenizer.build_tokenizer(world))

  def say(request: types.GenerateRequest, context: str) -> str:
    prompt = _PROMPT.search(context)
    if prompt is None:
      raise ValueError(
        f"Found the context {context[:80]!r}, expected the prompt of a "
        "question of the world with a budget of dollars alone "
        "(episode.prompts 'world_priced', --budgets=dollars=0.06)."
      )
    turns = priced_expert.PricedExpert(
      types.Question("", prompt[2], ()),
      world=world,
      money=int(prompt[1]),
      cents=cents,
      strategy=strategy,
      rng=np.random.default_rng(request.address[:4]),
    ).turns()
    return expert_policy.replayed(turns, context, prompt.end())

  return scripted.ScriptedEngine(say, codec), codec
