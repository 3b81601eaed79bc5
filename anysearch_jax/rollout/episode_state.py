"""The state of an episode, and the requests and events that advance it.

An episode is a sequence of chunks. A chunk holds the tokens that one author
wrote at once: the sampled ids of a turn, or the ids of an environment text.
Sampled ids are never encoded again. Tokens, authors and spans all derive from
the chunks, and so do the spent and the remaining budget. Only seconds do not:
the driver measures them.

**Landing.** An episode lands when it is asked for its answer before a limit
stops it. Each limit (the configuration's tokens, the budget's tokens, its
dollars) therefore keeps a reserve that pays for one last turn. Before a turn,
the episode compares what it may still write (`limit_before_landing`) with its
shortest turn so far; if that turn would use the reserve, the episode lands.
docs/budgets.md has the rules for users.
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

# Tokens kept for the answer if `episode.answer_room` is 0, but at most the cap
# divided by `_RESERVE_DIVISOR`, so that small caps leave most tokens to search.
# `driver.LANDING` keeps the same quarter of a cap on seconds.
_ANSWER_TOKENS = 128
_RESERVE_DIVISOR = 4


@dataclasses.dataclass(frozen=True)
class Chunk:
  """Tokens that one author wrote at once, and their text.

  Attributes:
    author: the prompt, the model or the environment.
    token_ids: `T` ids.
    logps: their log-probabilities; 0 unless the model sampled them.
    versions: policy version that sampled each; -1 unless the model did.
    text: what the ids decode to.
    server: address of the server that sampled them, see `types.Generation`.
  """

  author: types.Author
  token_ids: tuple[int, ...]
  logps: tuple[float, ...]
  versions: tuple[int, ...]
  text: str
  server: str = ""


def call_tokens(turn: Chunk, opens: str, codec: types.TextCodec) -> int:
  """Returns the number of tokens at the end of a turn that hold its call.

  The call is the shortest suffix of the ids whose text contains the opening
  mark. The mark's tokens are unknown, because a policy may spell it with any
  tokens, so a binary search decodes suffixes.

  Args:
    turn: the turn that calls a tool.
    opens: the tool's opening mark; its last occurrence counts.
    codec: decodes the ids.

  Returns:
    The length of that suffix; the whole turn's length without a mark.
  """

  def has_mark(count: int) -> bool:
    return opens in codec.decode(turn.token_ids[-count:])

  # The shortest suffix is longer than `too_short`, at most `long_enough`.
  too_short = 0
  long_enough = len(turn.token_ids)
  if not has_mark(long_enough):
    return long_enough
  while long_enough - too_short > 1:
    middle = (too_short + long_enough) // 2
    if has_mark(middle):
      long_enough = middle
    else:
      too_short = middle
  return long_enough


class Done(NamedTuple):
  """The last request of an episode: it is over and asks for nothing more."""

  trajectory: types.Trajectory


class Retrieved(NamedTuple):
  """The event that answers a `SearchRequest`; `passages` may be empty."""

  passages: tuple[types.Passage, ...]


class Scored(NamedTuple):
  """The event that answers a `ScoreRequest`.

  Attributes:
    logps: for each of its sequences, the log-probabilities of all tokens but
      the first, at temperature 1.
  """

  logps: tuple[tuple[float, ...], ...]


class Failure(NamedTuple):
  """The event for a request that could not be answered, with the reason."""

  reason: str


class Spending(NamedTuple):
  """What turns and searches cost.

  Attributes:
    searches: number of searches.
    written_tokens: tokens of the turns.
    read_tokens: total length of the contexts of the turns, in tokens.
  """

  searches: int = 0
  written_tokens: int = 0
  read_tokens: int = 0


Request = (
  types.GenerateRequest | types.SearchRequest | types.ScoreRequest | Done
)
Event = types.Generation | Retrieved | Scored | Failure


def priced(budget: budgets.Budget, env: spec.Environment) -> budgets.Budget:
  """Returns a dollar budget with the prices of the environment's tools.

  Raises:
    ValueError: the budget is in dollars, and nothing has a price.
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
    address: identifies the episode and seeds its draws.
    question: the question to answer.
    budget: number of searches allowed.
    scaffold: whether the budget is stated before every turn (Phase I).
    config: the limits of turns and contexts.
    codec: encodes and decodes texts.
    environment: its texts, and how turns are parsed.
    chunks: prompt, turns and environment texts in order.
    observations: the passages that each charged query showed.
    bad_turns: number of turns that were answered with an error line.
    violation: whether the policy tried to search beyond its budget.
    landing: whether the next turn is the last one, for the answer alone.
    caps: the budget's caps on tokens, dollars and seconds.
    elapsed: seconds since the start; the driver sets it if seconds are capped.
    stopped: whether further searches are refused as if the budget were used up.
    discarded: charged for turns and searches that are not in `chunks`, because
      the environment's own `step` discarded them.
    opened: the `<think>` with which a chat template ends, if it does; it stands
      directly before the first turn.
    memory: state of the environment's own `step`; None without one.
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
  discarded: Spending = Spending()
  opened: str = ""
  memory: Any = None
  request: Request | None = None
  experts: np.ndarray | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  @property
  def queries(self) -> tuple[str, ...]:
    """The charged queries."""
    return tuple(observation.argument for observation in self.observations)

  @property
  def searches_used(self) -> int:
    """Number of searches charged."""
    return len(self.observations) + self.discarded.searches

  @property
  def searches_left(self) -> int:
    """Number of searches that the budget still allows."""
    if self.stopped:
      return 0
    spent = self.searches_used
    if self.environment.turns_are_budget:
      spent += self.bad_turns
    return self.budget - spent

  @property
  def turn_lengths(self) -> list[int]:
    """Number of tokens of each turn that the model has taken."""
    return [
      len(chunk.token_ids)
      for chunk in self.chunks
      if chunk.author is types.Author.MODEL
    ]

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
  def written_tokens(self) -> int:
    """Number of tokens that the model wrote, discarded turns included."""
    return sum(self.turn_lengths) + self.discarded.written_tokens

  @property
  def token_cap(self) -> int:
    """The cap on `written_tokens`: the budget's or a lower `max_generated`."""
    return min(self.caps.tokens, self.config.max_generated)

  @property
  def read_tokens(self) -> int:
    """Total length of the contexts of all turns, as an API bills input."""
    billed = 0
    context_length = 0
    for chunk in self.chunks:
      if chunk.author is types.Author.MODEL:
        billed += context_length
      context_length += len(chunk.token_ids)
    return billed + self.discarded.read_tokens

  @property
  def budget_line(self) -> str:
    """The text before the next turn while the scaffold is on."""
    env = self.environment
    # After a refusal the budget is stated as used up.
    is_refused = self.stopped and self.budget < budgets.UNCAPPED
    searches = self.budget if is_refused else self.searches_used
    line = env.before_turn(self.budget, searches)
    if not self.caps.units or not env.states_caps:
      return line
    spent = {
      "tokens": self.written_tokens,
      "dollars": self.cost(),
      "seconds": self.elapsed,
    }
    return units.state_remaining(line, env.units, self.caps, spent)

  @property
  def turn_limit(self) -> int:
    """Limit on the tokens of the next turn; may be <= 0.

    Three limits bound them: the configuration's (`max_generated`,
    `max_context`), the budget's cap on tokens, and the budget's dollars.
    """
    return min(self._configured_tokens, self._capped_tokens, self._affordable())

  @property
  def limit_before_landing(self) -> int | None:
    """Limit on the tokens of a turn after which the episode can still land.

    It can land while each limit leaves enough tokens for an answer. None if no
    limit keeps a reserve, or if the answer is being asked for; 0 or below if
    the episode must land now.
    """
    caps = self.caps
    limits = []
    if self._reserve:
      limits.append(self._configured_tokens - self._reserve)
    if not self.landing:
      if caps.tokens < budgets.UNCAPPED and self.environment.keeps_room:
        limits.append(self._capped_tokens - self._answer_tokens(caps.tokens))
      if caps.dollars < math.inf:
        limits.append(self._affordable(lands=True))
    return min([*limits, self.turn_limit]) if limits else None

  @property
  def is_spent(self) -> bool:
    """Whether the next turn has to be the answer.

    It has to if even a turn as short as the shortest one so far would use the
    reserve. Before the first turn, any room at all suffices.
    """
    limit = self.limit_before_landing
    return limit is not None and limit < min(self.turn_lengths, default=1)

  @property
  def reads_all(self) -> bool:
    """Whether an episode that lands can still read all of its context."""
    limits = [self._configured_tokens - max(self._reserve, self._line_tokens)]
    if self.caps.dollars < math.inf:
      limits.append(self._affordable(lands=True))
    return min(limits) > 0 and self._capped_tokens > 0

  def affords(self, tool: str, calls: int = 1) -> bool:
    """Returns whether the budget pays for calls of a tool and an answer."""
    if self.searches_left < calls:
      return False
    if self.caps.dollars == math.inf:
      return True
    landing = self._landing_cost
    dollars = self.cost(
      *[tool] * calls,
      read_tokens=landing.read_tokens,
      written_tokens=landing.written_tokens,
    )
    return dollars <= self.caps.dollars

  @property
  def _reserve(self) -> int:
    """Tokens that turns leave free for landing, by `episode.answer_room`."""
    if not self.config.answer_room or self.landing:
      return 0
    return self.config.answer_room + self._line_tokens

  @property
  def reached_limit(self) -> str:
    """The limit that leaves no room for a token, "" if there is room."""
    config = self.config
    caps = self.caps
    if self.written_tokens >= config.max_generated:
      return (
        f"The model wrote all of its {config.max_generated} tokens "
        "(max_generated)."
      )
    if self.tokens >= config.max_context:
      return (
        f"The context of {config.max_context} tokens has no room to write "
        f"after {self.tokens} (max_context)."
      )
    if self._capped_tokens <= 0:
      return f"The model wrote all of the {caps.tokens} tokens of its budget."
    if self._affordable() <= 0:
      return (
        f"Of a budget of {caps.dollars:g} dollars {self.cost():g} are spent, "
        "and the rest does not pay for another turn."
      )
    return ""

  @property
  def _configured_tokens(self) -> int:
    """Tokens that the configuration still allows the model to write."""
    return min(
      self.config.max_generated - self.written_tokens,
      self.config.max_context - self.tokens,
    )

  @property
  def _capped_tokens(self) -> int:
    """Tokens that the budget's cap still allows the model to write."""
    return self.caps.tokens - self.written_tokens

  def _affordable(self, *, lands: bool = False) -> int:
    """Returns the tokens of a turn that the budget's dollars pay for.

    With `lands`, landing after the turn has to be paid for as well.
    """
    caps = self.caps
    if caps.dollars == math.inf:
      return budgets.UNCAPPED
    landing = self._landing_cost if lands else Spending()

    def dollars(tokens: int) -> float:
      read_tokens = self.tokens + landing.read_tokens
      if lands:
        read_tokens += tokens  # The answer's turn reads this turn's tokens.
      return self.cost(
        read_tokens=read_tokens, written_tokens=landing.written_tokens + tokens
      )

    token_price = caps.prices.output + (caps.prices.input if lands else 0)
    if dollars(1) > caps.dollars:
      return 0
    if not token_price:
      return budgets.UNCAPPED
    # Prices are per million tokens.
    tokens = int((caps.dollars - dollars(0)) * 1e6 / token_price) + 1
    # Rounding must not buy a token too many.
    while dollars(tokens) > caps.dollars:
      tokens -= 1
    return tokens

  @property
  def _landing_cost(self) -> Spending:
    """The tokens that landing now reads and writes."""
    price = self.caps.prices.output
    answer_tokens = 0
    if price:
      answer_tokens = self._answer_tokens(self.caps.dollars * 1e6 / price)
    return Spending(
      read_tokens=self.tokens + self._line_tokens,
      written_tokens=answer_tokens,
    )

  def _answer_tokens(self, cap: float) -> int:
    """Returns the tokens kept for an answer if `cap` tokens may be written."""
    if room := self.config.answer_room:
      return max(1, int(min(room, cap // 2)))
    return max(1, int(min(_ANSWER_TOKENS, cap // _RESERVE_DIVISOR)))

  @property
  def _line_tokens(self) -> int:
    """Length of the texts that ask for the answer, in tokens."""
    line = self.environment.over_budget
    if self.scaffold:
      line += self.budget_line
    return len(self.codec.encode(line))

  def cost(
    self, *calls: str, read_tokens: int = 0, written_tokens: int = 0
  ) -> float:
    """Returns the dollars spent so far, and on the calls and tokens given.

    Args:
      *calls: names of tools that would be called.
      read_tokens: tokens that would be read.
      written_tokens: tokens that would be written.
    """
    charged = [observation.tool for observation in self.observations]
    charged += [protocol.SEARCH] * self.discarded.searches
    return self.caps.prices.of_calls(
      [*charged, *calls],
      input_tokens=self.read_tokens + read_tokens,
      output_tokens=self.written_tokens + written_tokens,
    )

  def trajectory(
    self, outcome: types.Outcome, reason: str = ""
  ) -> types.Trajectory:
    """Returns the trajectory of an episode that ends now.

    Args:
      outcome: how the episode ends.
      reason: why, if it failed or was truncated.
    """
    chunks = self.chunks
    lengths = [len(chunk.token_ids) for chunk in chunks]

    def flat(values: Iterable[Sequence[float]], dtype: Any) -> np.ndarray:
      joined = itertools.chain.from_iterable(values)
      return np.fromiter(joined, dtype, count=sum(lengths))

    experts = self.experts
    if experts is not None:
      # The engine never computed the tokens after the newest turn.
      uncomputed = types.unrecorded_experts(
        sum(lengths) - len(experts), like=experts
      )
      experts = np.concatenate([experts, uncomputed])
    authors = np.array([chunk.author for chunk in chunks], np.int8)
    turns = np.flatnonzero(authors == types.Author.MODEL)
    turn_ends = np.cumsum(lengths, dtype=int)[turns] - 1
    servers: tuple[str, ...] = ()
    if any(chunk.server for chunk in chunks):
      servers = tuple(chunks[turn].server for turn in turns)
    return types.Trajectory(
      address=self.address,
      question=self.question,
      budget=self.budget,
      scaffold=self.scaffold,
      token_ids=flat((chunk.token_ids for chunk in chunks), np.int32),
      authors=np.repeat(authors, lengths),
      logps=flat((chunk.logps for chunk in chunks), np.float32),
      versions=flat((chunk.versions for chunk in chunks), np.int32),
      spans=tuple(
        types.Span(chunk.author, chunk.text)
        for chunk in chunks
        if chunk.author is not types.Author.PROMPT
      ),
      searches=self.searches_used,
      queries=self.queries,
      violation=self.violation,
      outcome=outcome,
      reason=reason,
      observations=self.observations,
      search_ends=tuple(
        int(turn_ends[observation.turn]) for observation in self.observations
      ),
      caps=self.caps,
      seconds=self.elapsed,
      discarded_tokens=self.discarded.written_tokens,
      discarded_input=self.discarded.read_tokens,
      servers=servers,
      experts=experts,
    )
