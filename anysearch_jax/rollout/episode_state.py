"""The state of an episode, and the requests and events that advance it.

An episode is a sequence of chunks. A chunk is what one author wrote at once:
the sampled ids of a turn, or the ids of a text of the environment. Sampled ids
are never encoded again. Tokens, authors and spans all derive from the chunks,
and so does what the episode may still spend, and keeps for its answer. Seconds
are the driver's.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.environment import protocol, spec, units
from anysearch_jax.policy import experts as experts_lib

# Tokens of an answer where `episode.answer_room` does not say.
_ANSWER = 128
# The largest share of a cap that is then kept. The same share of a cap on
# seconds is, see `driver.LANDING`.
_SHARE = 4


@dataclasses.dataclass(frozen=True)
class Chunk:
  """Tokens that one author wrote at once, and their text.

  server: see `types.Generation`.
  """

  author: types.Author
  token_ids: tuple[int, ...]
  logps: tuple[float, ...]
  versions: tuple[int, ...]
  text: str
  server: str = ""


def call_tokens(turn: Chunk, opens: str, codec: types.TextCodec) -> int:
  """Returns the number of last tokens of a turn that hold its call.

  They are the fewest whose text has the opening mark `opens`, of which the last
  occurrence counts; all without one.
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


class Done(NamedTuple):
  """The last request of an episode: it is over and asks for nothing more."""

  trajectory: types.Trajectory


class Retrieved(NamedTuple):
  """The event that answers a `SearchRequest`; `passages` may be empty."""

  passages: tuple[types.Passage, ...]


class Failure(NamedTuple):
  """The event for a request that could not be answered, with the reason."""

  reason: str


class Aside(NamedTuple):
  """What an episode spent on turns and searches that are not in its chunks.

  searches: number of searches charged.
  written: number of tokens of turns that were sampled and discarded.
  read: total length of the contexts of those turns, in tokens.
  """

  searches: int = 0
  written: int = 0
  read: int = 0


Request = types.GenerateRequest | types.SearchRequest | Done
Event = types.Generation | Retrieved | Failure


def priced(budget: budgets.Budget, env: spec.Environment) -> budgets.Budget:
  """Returns a budget of dollars with the prices of the environment's tools.

  Raises:
    ValueError: it has dollars, and nothing has a price.
  """
  if budget.dollars == math.inf:
    return budget
  prices = env.prices(budget.prices)
  if not prices:
    raise ValueError(
      f"Found a budget of {budget.dollars:g} dollars where nothing has a "
      "price; expected --prices=input=0.15,output=0.60, or search_price, "
      "input_price, output_price or tool_prices in config.evaluation."
    )
  return dataclasses.replace(budget, prices=prices)


@dataclasses.dataclass(frozen=True)
class Episode:
  """The history of an episode and the request that it waits for.

  Attributes:
    environment: its texts, and how turns are parsed.
    chunks: prompt, turns and environment texts in order.
    observations: what each charged query showed.
    bad_turns: number of turns that were answered with an error line.
    violation: whether the policy tried to search beyond its budget.
    landing: whether the next turn is the last one, for the answer alone.
    caps: what else the episode may spend, without a cap on searches.
    elapsed: seconds since it began; the driver sets it if they are capped.
    stopped: whether further searches are refused as if the budget were used up.
    aside: what was spent besides.
    memory: what the environment's own `step` keeps; None without one.
    request: the request that the episode waits for; None only inside `start`.
    experts: those of the newest turn, see `types.Generation`.
  """

  address: types.Address
  question: types.Question
  budget: int
  scaffold: bool
  config: config_lib.EpisodeConfig
  codec: types.TextCodec
  environment: spec.Environment
  chunks: tuple[Chunk, ...] = ()
  observations: tuple[types.Observation, ...] = ()
  bad_turns: int = 0
  violation: bool = False
  landing: bool = False
  caps: budgets.Budget = budgets.NO_CAPS
  elapsed: float = 0.0
  stopped: bool = False
  aside: Aside = Aside()
  memory: Any = None
  request: Request | None = None
  experts: np.ndarray | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  @property
  def queries(self) -> tuple[str, ...]:
    """The charged queries."""
    return tuple(each.argument for each in self.observations)

  @property
  def used(self) -> int:
    """Number of searches charged."""
    return len(self.observations) + self.aside.searches

  @property
  def left(self) -> int:
    """Number of searches that the budget still allows."""
    lost = self.bad_turns if self.environment.turns_are_budget else 0
    return 0 if self.stopped else self.budget - self.used - lost

  @property
  def turn_lengths(self) -> list[int]:
    """Number of tokens of each turn that the model has taken."""
    by_model = (c for c in self.chunks if c.author is types.Author.MODEL)
    return [len(chunk.token_ids) for chunk in by_model]

  @property
  def turns(self) -> int:
    """Number of turns that the model has taken."""
    return len(self.turn_lengths)

  @property
  def context(self) -> tuple[int, ...]:
    """The tokens that the next turn reads."""
    ids = (chunk.token_ids for chunk in self.chunks)
    return tuple(itertools.chain.from_iterable(ids))

  @property
  def tokens(self) -> int:
    """Number of tokens in the context."""
    return sum(len(chunk.token_ids) for chunk in self.chunks)

  @property
  def written(self) -> int:
    """Number of tokens that the model wrote, with those of discarded turns."""
    return sum(self.turn_lengths) + self.aside.written

  @property
  def token_cap(self) -> int:
    """The cap on `written`: the budget's, or `max_generated` if it is less."""
    return min(self.caps.tokens, self.config.max_generated)

  @property
  def read(self) -> int:
    """Total length of the contexts of all turns, as an API bills input."""
    total = length = 0
    for chunk in self.chunks:
      if chunk.author is types.Author.MODEL:
        total += length
      length += len(chunk.token_ids)
    return total + self.aside.read

  @property
  def budget_line(self) -> str:
    """The text before the next turn while the scaffold is on."""
    env = self.environment
    # After a refusal the budget is stated as used up.
    ended = self.stopped and self.budget < budgets.UNCAPPED
    made = self.budget if ended else self.used
    line = env.before_turn(self.budget, made)
    if not self.caps.units or not env.states_caps:
      return line
    used = {
      "tokens": self.written,
      "dollars": self.cost(),
      "seconds": self.elapsed,
    }
    return units.state_remaining(line, env.units, self.caps, used)

  @property
  def most_tokens(self) -> int:
    """Limit on the tokens of the next turn; may be <= 0.

    Three limits bound them: the configuration's (`max_generated`,
    `max_context`), the budget's cap on tokens, and what its dollars still buy.
    """
    return min(self._configured, self._capped, self._affordable())

  @property
  def before_landing(self) -> int | None:
    """Limit on the tokens of a turn after which the episode can still land.

    It can while each limit has just enough left for an answer. None if nothing
    is kept for the answer, or it is being asked for; a number of 0 or below if
    the episode must land now.
    """
    caps, kept = self.caps, self._reserve
    limits = []
    if kept:
      limits.append(self._configured - kept)
    if not self.landing:
      if caps.tokens < budgets.UNCAPPED and self.environment.keeps_room:
        limits.append(self._capped - self._answer(caps.tokens))
      if caps.dollars < math.inf:
        limits.append(self._affordable(lands=True))
    return min([*limits, self.most_tokens]) if limits else None

  @property
  def is_spent(self) -> bool:
    """Whether the next turn has to be the answer.

    It has if a turn as short as the episode's shortest would take what is kept
    for the answer. Before the first turn nothing is known of its length.
    """
    most = self.before_landing
    return most is not None and most < min(self.turn_lengths, default=1)

  @property
  def reads_all(self) -> bool:
    """Whether an episode that lands can still read all of its context."""
    limits = [self._configured - max(self._reserve, self._line)]
    if self.caps.dollars < math.inf:
      limits.append(self._affordable(lands=True))
    return min(limits) > 0 and self._capped > 0

  def affords(self, tool: str) -> bool:
    """Returns whether the budget has a call of a tool left, and an answer."""
    if self.left <= 0 or self.caps.dollars == math.inf:
      return self.left > 0
    return self.cost(tool, **self._landing) <= self.caps.dollars

  @property
  def _reserve(self) -> int:
    """Returns the tokens that turns leave free for `land` by configuration."""
    if not self.config.answer_room or self.landing:
      return 0
    return self.config.answer_room + self._line

  @property
  def full(self) -> str:
    """The limit that leaves no room for a token, "" if there is room."""
    config, caps = self.config, self.caps
    if self.written >= config.max_generated:
      return (
        f"The model wrote all of its {config.max_generated} tokens "
        "(max_generated)."
      )
    if self.tokens >= config.max_context:
      return (
        f"The context of {config.max_context} tokens has no room to write "
        f"after {self.tokens} (max_context)."
      )
    if self._capped <= 0:
      return f"The model wrote all of the {caps.tokens} tokens of its budget."
    if self._affordable() <= 0:
      return (
        f"Of a budget of {caps.dollars:g} dollars {self.cost():g} are spent, "
        "and the rest does not pay for another turn."
      )
    return ""

  @property
  def _configured(self) -> int:
    return min(
      self.config.max_generated - self.written,
      self.config.max_context - self.tokens,
    )

  @property
  def _capped(self) -> int:
    return self.caps.tokens - self.written

  def _affordable(self, *, lands: bool = False) -> int:
    """Returns the tokens of a turn that the budget's dollars pay for.

    With `lands`, landing after the turn has to be paid for as well.
    """
    caps = self.caps
    if caps.dollars == math.inf:
      return budgets.UNCAPPED
    # A landing after the turn reads the turn's tokens too.
    after = self._landing if lands else {"read": 0, "written": 0}
    read = after["read"] + self.tokens

    def cost(tokens: int) -> float:
      return self.cost(
        read=read + (tokens if lands else 0), written=after["written"] + tokens
      )

    each = caps.prices.output + (caps.prices.input if lands else 0)
    if cost(1) > caps.dollars:
      return 0
    if not each:
      return budgets.UNCAPPED
    tokens = int((caps.dollars - cost(0)) * 1e6 / each) + 1
    # Rounding must not buy a token too many.
    while cost(tokens) > caps.dollars:
      tokens -= 1
    return tokens

  @property
  def _landing(self) -> dict[str, int]:
    """Returns what landing now reads and writes."""
    price = self.caps.prices.output
    most = self.caps.dollars * 1e6 / price if price else math.inf
    return {
      "read": self.tokens + self._line,
      "written": self._answer(most) if price else 0,
    }

  def _answer(self, cap: float) -> int:
    """Returns the tokens kept for an answer where `cap` may be written."""
    if room := self.config.answer_room:
      return max(1, int(min(room, cap // 2)))
    return max(1, int(min(_ANSWER, cap // _SHARE)))

  @property
  def _line(self) -> int:
    """Returns the length of the texts that ask for the answer, in tokens."""
    line = self.environment.over_budget
    if self.scaffold:
      line += self.budget_line
    return len(self.codec.encode(line))

  def cost(self, *calls: str, read: int = 0, written: int = 0) -> float:
    """Returns the dollars spent, with these calls and tokens more."""
    return self.caps.prices.of_calls(
      [
        *(each.tool for each in self.observations),
        *[protocol.SEARCH] * self.aside.searches,
        *calls,
      ],
      input_tokens=self.read + read,
      output_tokens=self.written + written,
    )

  def trajectory(
    self, outcome: types.Outcome, reason: str = ""
  ) -> types.Trajectory:
    """Returns the trajectory of an episode that ends now."""
    chunks = self.chunks
    lengths = [len(chunk.token_ids) for chunk in chunks]

    def flat(values: Iterable[Sequence[float]], dtype: Any) -> np.ndarray:
      joined = itertools.chain.from_iterable(values)
      return np.fromiter(joined, dtype, count=sum(lengths))

    chosen = self.experts
    if chosen is not None:
      # Nobody computed the tokens after the newest turn.
      rest = experts_lib.unrecorded(sum(lengths) - len(chosen), chosen)
      chosen = np.concatenate([chosen, rest])
    authors = np.array([chunk.author for chunk in chunks], np.int8)
    turns = np.flatnonzero(authors == types.Author.MODEL)
    served = any(chunk.server for chunk in chunks)
    ends = np.cumsum(lengths, dtype=int)[turns] - 1
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
      search_ends=tuple(int(ends[each.turn]) for each in self.observations),
      caps=self.caps,
      seconds=self.elapsed,
      discarded_tokens=self.aside.written,
      discarded_input=self.aside.read,
      servers=tuple(chunks[turn].server for turn in turns) if served else (),
      experts=chosen,
    )
