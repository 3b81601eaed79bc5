"""Demonstrations with a cheap and a dear search under budgets in cents.

The demonstrator uses both searches without being thrifty: which it asks depends
on what it has found of a fact, and not on the fact. It plays the real episode
state machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import priced_tools, protocol
from anysearch_jax.rollout import episode, episode_state
from anysearch_jax.world import demonstrations, priced_expert
from anysearch_jax.world import world as world_lib

SETTLE, RECALL, CHEAP, DEAR = priced_expert.ACTIONS
# Probability of asking a search that the money does not pay for, at a decision.
_BEYOND = 0.05
# The prompt's largest number; a policy of the world reads no larger one.
MOST_CENTS = 20
KINDS = (
  *("nothing", "conflict", "found", "copy", "memory", "relation", "money"),
  *("recall_known", "recall_unknown", "tool"),
)
_WEIGHTED = frozenset(KINDS) - {"relation"} | {"choice", "answer"}


def wasteful(situation: priced_expert.Situation) -> Mapping[str, float]:
  """Returns the demonstrator's probabilities of actions."""
  fact = situation.fact
  if fact.dear == "conflict":
    return {SETTLE: 0.5, CHEAP: 0.1, DEAR: 0.4}
  if fact.has_value:
    return {SETTLE: 0.75, RECALL: 0.1, DEAR: 0.15}
  if fact.dear or fact.cheap:
    return {RECALL: 0.3, CHEAP: 0.2, DEAR: 0.5}
  search = 0.3 if fact.known else 0.4
  return {RECALL: 1 - 2 * search, CHEAP: search, DEAR: search}


@dataclasses.dataclass(frozen=True)
class Setting:
  """What all demonstrations have in common.

  Attributes:
    world: its memory is the expert's.
    dear: returns the passages of the dear search for (query, k, corpus).
    cheap: the same of the cheap one.
    codec: a tokenizer with one token for every word of the world.
    episode: configuration of the episodes, with the `world_priced` prompts.
    prices: of the tools `cheap` and `search`.
    strategy: decides.
  """

  world: world_lib.World
  dear: demonstrations.Search
  cheap: demonstrations.Search
  codec: types.TextCodec
  episode: config_lib.EpisodeConfig
  prices: budgets_lib.Prices
  strategy: priced_expert.Strategy = wasteful

  @property
  def cents(self) -> priced_expert.Cents:
    """The prices in cents; raises ValueError if they are no whole numbers."""
    return cents(self.prices)


def cents(
  prices: budgets_lib.Prices, tools: Sequence[str] = (CHEAP, DEAR)
) -> priced_expert.Cents:
  """Returns the prices of the searches in cents.

  Args:
    prices: of the tools `cheap` and `search`.
    tools: which of them need a price, `cheap` and `dear`.

  Raises:
    ValueError: a price is missing or is no whole number of cents from 1 on.
  """
  found = dict(prices.tools)
  made = []
  for tool, name in ((CHEAP, priced_tools.CHEAP.name), (DEAR, protocol.SEARCH)):
    cost = found.get(name, 0.0 if tool in tools else 10.0) / 10
    if cost < 1 or cost != int(cost):
      raise ValueError(
        f"evaluation.tool_prices: found {cost * 10:g} for {name!r}; expected a "
        "multiple of 10, whole cents a call: the world's prompts state cents."
      )
    made.append(int(cost))
  return priced_expert.Cents(*made)


def demonstrate(
  question: types.Question,
  setting: Setting,
  *,
  money: int,
  rng: np.random.Generator,
  decision_weight: float = 3.0,
) -> tuple[types.Trajectory, np.ndarray]:
  """Plays one episode as the expert.

  Args:
    question: one of the setting's world.
    setting: the world, its searches and the expert.
    money: cents assigned, from 1 to `MOST_CENTS`.
    rng: the expert's random numbers.
    decision_weight: loss weight of the tokens of decisions.

  Returns:
    The trajectory, and float32 `[T]` loss weights: `decision_weight` on
    decisions and on copied, recalled and answered values, 1 on the model's
    other tokens, 0 elsewhere.
  """
  trajectory, marks = play(question, setting, money=money, rng=rng)
  weights = (trajectory.authors == types.Author.MODEL).astype(np.float32)
  weights[[at for at, kind in marks if kind in _WEIGHTED]] = decision_weight
  return trajectory, weights


def play(
  question: types.Question,
  setting: Setting,
  *,
  money: int,
  rng: np.random.Generator,
) -> tuple[types.Trajectory, list[tuple[int, str]]]:
  """Plays an episode; returns it with (position, kind) of its decisions."""
  turns = priced_expert.PricedExpert(
    question,
    world=setting.world,
    money=money,
    cents=setting.cents,
    strategy=setting.strategy,
    rng=rng,
    p_beyond=_BEYOND if setting.strategy is wasteful else 0.0,
  ).turns()
  state, request = episode.start(
    question,
    budget=budgets_lib.Budget(dollars=money / 100, prices=setting.prices),
    scaffold=False,
    address=types.Address(rollout=0, question=0, sample=0),
    config=setting.episode,
    codec=setting.codec,
  )
  passages: Sequence[types.Passage] | None = None
  marks: list[tuple[int, str]] = []
  event: episode_state.Retrieved | types.Generation
  while not isinstance(request, episode_state.Done):
    if isinstance(request, types.SearchRequest):
      asks_cheap = request.tool == priced_tools.CHEAP.name
      search = setting.cheap if asks_cheap else setting.dear
      passages = search(request.query, request.k, request.corpus)
      event = episode_state.Retrieved(tuple(passages))
    else:
      turn = turns.send(passages)
      passages = None
      start = len(request.token_ids)
      marks += [(start + at, kind) for at, kind in turn.marks]
      event = demonstrations.generation(turn.words, setting.codec)
    state, request = episode.step(state, event)
  return request.trajectory, marks


def probe_sets(
  setting: Setting, split: str, *, count: int, seed: int
) -> demonstrations.Probes:
  """Makes the probes of `count` demonstrations of a split.

  Returns:
    As `demonstrations.probe_sets`, with kinds of `KINDS`; `features` and
    `searches` are 0.
  """
  rng = np.random.Generator(np.random.PCG64(seed))
  recall, tight = (
    setting.codec.encode(word)[0] for word in ("recall", priced_tools.MARK)
  )
  label = {"recall_known": recall, "recall_unknown": recall, "tool": tight}
  rows, probes = [], []
  for row, question in enumerate(setting.world.questions(split, count, seed)):
    money = int(rng.integers(1, MOST_CENTS + 1))
    trajectory, marks = play(question, setting, money=money, rng=rng)
    rows.append(trajectory.token_ids)
    probes += [
      (row, at, label.get(kind, int(rows[-1][at])), KINDS.index(kind))
      for at, kind in marks
      if kind in KINDS
    ]
  return demonstrations.packed(rows, probes, np.zeros((len(probes), 3)))
