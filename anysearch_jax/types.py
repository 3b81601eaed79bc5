"""The values that the parts of the system pass to each other.

Shape legend, used in einsum strings, docstrings and comments everywhere:
B rows, T tokens, L layers, D model, N query heads, K kv heads, H head dim,
V vocab, Q questions, G group.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np


class Author(enum.IntEnum):
  """Who wrote a token."""

  PROMPT = 0
  MODEL = 1
  ENVIRONMENT = 2


class Outcome(enum.StrEnum):
  """How an episode ended.

  `INVALID` and `TRUNCATED` are the policy's own doing: scored and trained on.
  `FAILED` (engine or retriever out of reach) is nobody's: it is left out of
  the loss, of every group statistic and of the curriculum's windows.
  """

  ANSWERED = "answered"
  INVALID = "invalid"
  TRUNCATED = "truncated"
  FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Question:
  """A question with its accepted answers.

  corpus: the name of the corpus that answers it ("" where there is one only).
  metadata: what the source knows of it (hops, the facts of its chain, ...).
  """

  id: str
  text: str
  golden_answers: tuple[str, ...]
  corpus: str = ""
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Passage:
  """One retrieved passage: `title` is its first line as it stands."""

  id: str
  title: str
  text: str
  score: float = 0.0


class Document(NamedTuple):
  """Which passage a search showed."""

  id: str
  title: str


@dataclasses.dataclass(frozen=True)
class Span:
  """A stretch of response text by one author (`MODEL` or `ENVIRONMENT`)."""

  author: Author
  text: str


class Address(NamedTuple):
  """Where a sampled trajectory stands; the seed of its randomness.

  Every random draw of an episode is `fold_in(seed, (rollout, question,
  attempt, sample, turn))`, whatever else runs beside it. `variant` is no part
  of that: it tells episodes apart that share their random numbers.
  """

  rollout: int
  question: int
  sample: int
  attempt: int = 0
  variant: int = 0


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One finished episode, token in and token out.

  Attributes:
    token_ids: int32 `[T]`, prompt and response as the engine saw them.
    authors: int8 `[T]`, `Author` of each token.
    logps: float32 `[T]`, behaviour log-probabilities; 0 off `MODEL` positions.
    versions: int32 `[T]`, policy version that sampled it; -1 off `MODEL`.
    spans: the response as text, without the prompt.
    searches: searches executed and charged, in [0, budget].
    queries: the charged queries in order.
    violation: a search beyond the budget was tried.
    reason: why a `FAILED` episode failed, or which limit truncated it.
    documents: what each charged search showed, in rank order.
    search_ends: index of the last token of each turn that searched.
  """

  address: Address
  question: Question
  budget: int
  scaffold: bool
  # Not in the repr: asyncio writes that of every finished task.
  token_ids: np.ndarray = dataclasses.field(repr=False)
  authors: np.ndarray = dataclasses.field(repr=False)
  logps: np.ndarray = dataclasses.field(repr=False)
  versions: np.ndarray = dataclasses.field(repr=False)
  spans: tuple[Span, ...]
  searches: int
  queries: tuple[str, ...]
  violation: bool
  outcome: Outcome
  reason: str = ""
  documents: tuple[tuple[Document, ...], ...] = ()
  search_ends: tuple[int, ...] = ()

  @property
  def generated_tokens(self) -> int:
    """Tokens that the model wrote: no observation, no injected budget tag."""
    return int(np.sum(self.authors == Author.MODEL))

  @property
  def failed(self) -> bool:
    return self.outcome is Outcome.FAILED


@dataclasses.dataclass(frozen=True)
class Group:
  """The G trajectories of one question under one budget, in sample order."""

  question: Question
  budget: int
  scaffold: bool
  trajectories: tuple[Trajectory, ...]


class EngineError(RuntimeError):
  """The engine could not generate; the sentence says what was tried."""


class RetrievalError(RuntimeError):
  """The retriever could not answer; the sentence says what was tried."""


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
  """One turn of one episode.

  Attributes:
    address: the episode; its KV cache is kept under it between turns.
    turn: 0-based; with `address` it addresses the randomness of the turn.
    token_ids: the whole context so far, at least one token.
    max_tokens: the most tokens that may be sampled, >= 1.
    stop: texts that end the turn when the decoded text contains one.
  """

  address: Address
  turn: int
  token_ids: tuple[int, ...]
  max_tokens: int
  stop: tuple[str, ...]


class Finish(enum.StrEnum):
  """Why a turn ended."""

  STOP = "stop"  # A stop text was completed.
  END_OF_TURN = "end_of_turn"  # The model sampled an end-of-turn token.
  LENGTH = "length"  # `max_tokens` were sampled.


@dataclasses.dataclass(frozen=True)
class Generation:
  """What a turn sampled.

  token_ids: the sampled ids, the completing or end-of-turn token included.
  logps: their log-probabilities, `log_softmax(logits / temperature)`.
  text: the decoded turn, cut right after its stop text; control tokens (the
    end of turn) are not part of it.
  versions: the policy version that sampled each of them.
  """

  token_ids: tuple[int, ...]
  logps: tuple[float, ...]
  text: str
  finish: Finish
  versions: tuple[int, ...]


class Engine(Protocol):
  """Generates turns; keeps what it likes of an episode until released."""

  async def generate(self, request: GenerateRequest) -> Generation:
    """Samples one turn. Raises `EngineError` when it cannot."""
    ...

  def release(self, address: Address) -> None:
    """Forgets an episode's cache. Unknown addresses are ignored."""
    ...


@dataclasses.dataclass(frozen=True)
class Asker:
  """Who searches: for retrievers whose answer depends on it.

  text: the response so far, the turn that searches included. turn: of that.
  """

  address: Address
  turn: int
  question: Question
  text: str


@dataclasses.dataclass(frozen=True)
class SearchRequest:
  """One query for at most `k` passages of `corpus`.

  asker: no part of what is asked, unless the retriever says that it is
    (`searching.Searcher`).
  """

  query: str
  k: int
  corpus: str = ""
  asker: Asker | None = dataclasses.field(
    default=None, compare=False, repr=False
  )


class Retriever(Protocol):
  """Finds passages; order is rank, fewer than `k` hits return fewer."""

  async def search(self, request: SearchRequest) -> Sequence[Passage]:
    """Answers one query. Raises `RetrievalError` when it cannot."""
    ...


class TextCodec(Protocol):
  """The text side of a tokenizer (`tokenizer.Tokenizer` implements it)."""

  end_of_turn_ids: frozenset[int]
  control_tokens: tuple[str, ...]

  def encode(self, text: str) -> list[int]:
    """Ids of plain text, no special token added."""
    ...

  def decode(self, ids: Sequence[int]) -> str:
    """Text of ids; control tokens are left out."""
    ...

  def render(self, content: str) -> tuple[str, list[int]]:
    """The prompt text of one user message, and its ids."""
    ...
