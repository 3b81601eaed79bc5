"""The state of an episode, and the requests and events that advance it.

An episode is a sequence of chunks. A chunk is what one author wrote at once:
the sampled ids of a turn, or the ids of a text of the environment. Sampled ids
are never encoded again. Tokens, authors and spans all derive from the chunks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.environment import spec, units
from anysearch_jax.methods import systems


@dataclasses.dataclass(frozen=True)
class Chunk:
  """Tokens that one author wrote at once, and their text."""

  author: types.Author
  token_ids: tuple[int, ...]
  logps: tuple[float, ...]
  versions: tuple[int, ...]
  text: str


def call_tokens(turn: Chunk, opens: str, codec: types.TextCodec) -> int:
  """Returns the number of last tokens of a turn that hold its call.

  Args:
    turn: a turn that ends with a call.
    opens: the opening mark of the call; its last occurrence counts.
    codec: decodes the tokens.

  Returns:
    The fewest last tokens whose text has the mark; all without one.
  """

  def has(count: int) -> bool:
    return opens in codec.decode(turn.token_ids[-count:])

  few, many = 0, len(turn.token_ids)
  if not has(many):
    return many
  while many - few > 1:
    middle = (few + many) // 2
    few, many = (few, middle) if has(middle) else (middle, many)
  return many


@dataclasses.dataclass(frozen=True)
class Done:
  """The last request of an episode: it is over and asks for nothing more."""

  trajectory: types.Trajectory


@dataclasses.dataclass(frozen=True)
class Retrieved:
  """The event that answers a `SearchRequest`; `passages` may be empty."""

  passages: tuple[types.Passage, ...]


@dataclasses.dataclass(frozen=True)
class Failure:
  """The event for a request that could not be answered, with the reason."""

  reason: str


Request = types.GenerateRequest | types.SearchRequest | Done
Event = types.Generation | Retrieved | Failure


@dataclasses.dataclass(frozen=True)
class Episode:
  """The history of an episode and the request that it waits for.

  Attributes:
    chunks: prompt, turns and environment texts in order.
    queries: the charged queries; their number is the budget used.
    observations: what each charged query showed.
    search_ends: index of the last token of each turn that searched.
    bad_turns: number of turns that were answered with an error line.
    violation: whether the policy tried to search beyond its budget.
    verifying: whether the next turn is the policy's verification of its answer.
    landing: whether the next turn is the last one, for the answer alone.
    caps: what else the episode may spend, without a cap on searches.
    elapsed: seconds since it began; the driver sets it if they are capped.
    stopped: whether further searches are refused as if the budget were used up.
    discarded: number of tokens of turns that were sampled and discarded.
    reread: total length of the contexts of those turns.
    answered: the finished episode whose answer is being sampled again.
    request: the request that the episode waits for; None only inside `start`.
  """

  address: types.Address
  question: types.Question
  budget: int
  scaffold: bool
  config: config_lib.EpisodeConfig
  codec: types.TextCodec
  chunks: tuple[Chunk, ...] = ()
  queries: tuple[str, ...] = ()
  observations: tuple[types.Observation, ...] = ()
  search_ends: tuple[int, ...] = ()
  bad_turns: int = 0
  violation: bool = False
  verifying: bool = False
  landing: bool = False
  caps: budgets.Budget = budgets.NO_CAPS
  elapsed: float = 0.0
  stopped: bool = False
  discarded: int = 0
  reread: int = 0
  answered: Episode | None = None
  request: Request | None = None

  @property
  def environment(self) -> spec.Environment:
    """The environment: its texts, and how it parses turns."""
    return systems.of_episode(self.config)

  @property
  def used(self) -> int:
    """Number of searches charged."""
    return len(self.queries)

  @property
  def left(self) -> int:
    """Number of searches that the budget still allows."""
    lost = self.bad_turns if self.environment.turns_are_budget else 0
    return self.allowed - self.used - lost

  @property
  def allowed(self) -> int:
    """The budget, or what is used of it if no more may be used."""
    return self.used if self.stopped else self.budget

  @property
  def turns(self) -> int:
    """Number of turns that the model has taken."""
    return sum(chunk.author is types.Author.MODEL for chunk in self.chunks)

  @property
  def shortest_turn(self) -> int:
    """Number of tokens of the shortest turn, 0 before the first one."""
    turns = (c for c in self.chunks if c.author is types.Author.MODEL)
    return min((len(chunk.token_ids) for chunk in turns), default=0)

  @property
  def tokens(self) -> int:
    """Number of tokens in the context."""
    return sum(len(chunk.token_ids) for chunk in self.chunks)

  @property
  def generated(self) -> int:
    """Number of tokens that the model wrote."""
    return sum(
      len(chunk.token_ids)
      for chunk in self.chunks
      if chunk.author is types.Author.MODEL
    )

  @property
  def written(self) -> int:
    """Number of tokens that the model wrote, with those of discarded turns."""
    return self.generated + self.discarded

  @property
  def read(self) -> int:
    """Total length of the contexts of all turns, as an API bills input."""
    total = length = 0
    for chunk in self.chunks:
      if chunk.author is types.Author.MODEL:
        total += length
      length += len(chunk.token_ids)
    return total + self.reread

  @property
  def tools(self) -> list[str]:
    """The tool of each charged call."""
    return [each.tool for each in self.observations]

  @property
  def dollars(self) -> float:
    """What the episode has cost by the prices of its budget."""
    return self.caps.prices.of_calls(
      self.tools,
      input_tokens=self.read,
      output_tokens=self.written,
    )

  @property
  def budget_line(self) -> str:
    """The text before the next turn while the scaffold is on."""
    env = self.environment
    line = env.before_turn(self.allowed, self.used)
    if not self.caps.units or not env.states_caps:
      return line
    used = {
      "tokens": self.written,
      "dollars": self.dollars,
      "seconds": self.elapsed,
    }
    return units.left(line, env.units, self.caps, used)

  def trajectory(
    self, outcome: types.Outcome, reason: str = ""
  ) -> types.Trajectory:
    """Returns the trajectory of an episode that ends now.

    Args:
      outcome: how it ends.
      reason: why, if it failed or is truncated.
    """
    chunks = self.chunks
    lengths = [len(chunk.token_ids) for chunk in chunks]

    def flat(values: Iterable[Sequence[float]], dtype: Any) -> np.ndarray:
      joined = itertools.chain.from_iterable(values)
      return np.fromiter(joined, dtype, count=sum(lengths))

    authors = np.array([chunk.author for chunk in chunks], np.int8)
    return types.Trajectory(
      address=self.address,
      question=self.question,
      budget=self.budget,
      scaffold=self.scaffold,
      token_ids=flat((c.token_ids for c in chunks), np.int32),
      authors=np.repeat(authors, lengths),
      logps=flat((c.logps for c in chunks), np.float32),
      versions=flat((c.versions for c in chunks), np.int32),
      spans=tuple(
        types.Span(c.author, c.text)
        for c in chunks
        if c.author is not types.Author.PROMPT
      ),
      searches=self.used,
      queries=self.queries,
      violation=self.violation,
      outcome=outcome,
      reason=reason,
      observations=self.observations,
      search_ends=self.search_ends,
      caps=self.caps,
      seconds=self.elapsed,
      discarded_tokens=self.discarded,
      discarded_input=self.reread,
    )
