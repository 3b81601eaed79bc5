"""The values that the parts of the system pass to each other.

Shape legend, used in einsum strings, docstrings and comments everywhere:
B rows, T tokens, L layers, D model, N query heads, K kv heads, H head dim,
V vocab, Q questions, G group.
"""

from __future__ import annotations

import dataclasses
import enum
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from anysearch_jax import budgets


class Author(enum.IntEnum):
  """The author of a token."""

  PROMPT = 0
  MODEL = 1
  ENVIRONMENT = 2


class Outcome(enum.StrEnum):
  """How an episode ended.

  `INVALID` and `TRUNCATED` are the policy's fault: such episodes are scored and
  trained on. `FAILED` means that the engine or the retriever was unavailable,
  which says nothing about the policy: such an episode is left out of the loss,
  of every group statistic and of the curriculum's windows.
  """

  ANSWERED = "answered"
  INVALID = "invalid"
  TRUNCATED = "truncated"
  FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Question:
  """A question with its accepted answers.

  Attributes:
    id: names it within its source.
    text: the question.
    golden_answers: the accepted answers.
    corpus: the name of the corpus that answers it; "" if there is only one.
    metadata: what the source records about it (hops, facts of its chain, ...).
  """

  id: str
  text: str
  golden_answers: tuple[str, ...]
  corpus: str = ""
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Source(NamedTuple):
  """The place of a passage in a document.

  Attributes:
    path: of the file, as its reader may open it; "" if it is not from a file.
    page: from 1; 0 if the document has no pages.
    heading: the headings above it, outermost first, joined by " > "; "" if
      there is none.
  """

  path: str = ""
  page: int = 0
  heading: str = ""


@dataclasses.dataclass(frozen=True)
class Passage:
  """One passage of a corpus.

  Attributes:
    id: names it within the corpus.
    title: its first line, unchanged, including any quotes.
    text: the rest.
    score: of the retriever; larger is better.
    source: its place in a document.
  """

  id: str
  title: str
  text: str
  score: float = 0.0
  source: Source = Source()

  @property
  def contents(self) -> str:
    """Title and text in Search-R1's form, which encoders also see."""
    return f"{self.title}\n{self.text}"


def distinct_passages(passages: Iterable[Passage]) -> tuple[Passage, ...]:
  """Returns the passages of an answer, of which no two have the same id.

  A passage with the id, title and text of an earlier one is left out. Another
  text under an earlier id gets the id `ID#2`, the next one `ID#3`.
  """
  by_id: dict[str, Passage] = {}
  for passage in passages:
    name = passage.id
    number = 1
    while name in by_id and by_id[name].contents != passage.contents:
      number += 1
      name = f"{passage.id}#{number}"
    if name != passage.id:
      passage = dataclasses.replace(passage, id=name)
    by_id.setdefault(name, passage)
  return tuple(by_id.values())


class Observation(NamedTuple):
  """What a charged call of a tool showed.

  Attributes:
    tool: name of the tool.
    argument: the query, or the address that the call named.
    turn: index of the turn that called; -1 if an old file does not have it.
    passages: the passages that were shown, in order; () if the context had no
      room for them.
    tokens: number of tokens of the call, from its opening mark on, which are
      the last ones of its turn; 0 if an old file does not have it.
    numbers: the numbers by which an answer can cite the passages; () if it
      cannot.
    answer: what the policy would have answered if its budget had ended here;
      None if it was not asked for that (`Method.step`), or gave no answer.
    value: what the call was worth, as a `Method.step` measured it; None if it
      measured nothing.
  """

  tool: str
  argument: str
  turn: int
  passages: tuple[Passage, ...] = ()
  tokens: int = 0
  numbers: tuple[int, ...] = ()
  answer: str | None = None
  value: float | None = None


@dataclasses.dataclass(frozen=True)
class Span:
  """A piece of response text by one author (`MODEL` or `ENVIRONMENT`)."""

  author: Author
  text: str


class Address(NamedTuple):
  """The position of a trajectory in a run, which seeds its randomness.

  Every random draw of an episode uses `fold_in(seed, (rollout, question,
  attempt, sample, turn))`, so it does not depend on what else runs at the same
  time.

  Attributes:
    rollout: index of the rollout; in an evaluation, its seed.
    question: index of the question in the rollout; in an evaluation, a hash of
      its id.
    sample: index in the group.
    attempt: number of earlier attempts at the group, which failed.
    variant: distinguishes episodes that share their random numbers; it is not
      folded in.
  """

  rollout: int
  question: int
  sample: int
  attempt: int = 0
  variant: int = 0


def evaluation_address(question_id: str, *, seed: int, variant: int) -> Address:
  """Returns the random address of an evaluated or asked episode.

  Args:
    question_id: the question's id.
    seed: of the evaluation.
    variant: distinguishes episodes that share their random numbers.
  """
  # Python's `hash` of a string differs between processes; CRC-32 does not.
  # JSON can hold half of a surrogate pair.
  number = zlib.crc32(question_id.encode(errors="surrogatepass"))
  return Address(seed, number, sample=0, variant=variant)


Place = tuple[int, int]
"""A trajectory's question and its sample, in a rollout."""


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One finished episode, token in and token out.

  Attributes:
    address: its position in the run.
    question: the question.
    budget: searches assigned, >= 0.
    scaffold: whether the budget was stated before each turn.
    token_ids: int32 `[T]`, prompt and response as the engine saw them.
    authors: int8 `[T]`, `Author` of each token.
    logps: float32 `[T]`, log-probabilities under the behaviour policy, which
      sampled the tokens; 0 at positions that are not `MODEL`.
    versions: int32 `[T]`, policy version that sampled each token; -1 at
      positions that are not `MODEL`.
    spans: the response as text, without the prompt.
    searches: searches executed and charged, in [0, budget], with those of
      branches that were left, of an episode that branches.
    queries: the charged queries of `spans` in order.
    violation: whether the policy tried to search beyond the budget.
    outcome: how the episode ended.
    reason: why a `FAILED` episode failed, or which limit truncated a
      `TRUNCATED` one; "" otherwise.
    observations: what each charged search showed, as values; the text is in
      `spans`.
    search_ends: index of the last token of each turn whose search was charged.
    caps: what else the episode could spend.
    seconds: how long it took, if its seconds were capped; 0 otherwise.
    discarded_tokens: tokens of turns that a controller discarded. They are
      charged, and are not in `token_ids`.
    discarded_input: total length of the contexts of those turns.
    servers: address of the server that sampled each of the model's turns; ()
      if this process did.
    experts: uint8 or uint16 `[T, L, K]`, ids of the experts that the sampler
      chose for each token, as `policy.experts.record` has them; None if they
      are not recorded.
    segment_starts: index of the first token of each segment, ascending from 0.
      A segment is a context of its own: its tokens were sampled without those
      of other segments.
    reported_answer: the answer that a program reported which played the
      episode; None: it is read from `spans`.
    reported_reward: the reward that such a program reported; None: it is that
      of the run.
  """

  address: Address
  question: Question
  budget: int
  scaffold: bool
  # Not in the repr: asyncio formats the result of every finished task.
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
  observations: tuple[Observation, ...] = ()
  search_ends: tuple[int, ...] = ()
  caps: budgets.Budget = budgets.NO_CAPS
  seconds: float = 0.0
  discarded_tokens: int = 0
  discarded_input: int = 0
  servers: tuple[str, ...] = ()
  experts: np.ndarray | None = dataclasses.field(
    default=None, compare=False, repr=False
  )
  segment_starts: tuple[int, ...] = (0,)
  reported_answer: str | None = None
  reported_reward: float | None = None

  @property
  def written_tokens(self) -> int:
    """The tokens that the model wrote, with those of discarded turns."""
    return self.generated_tokens + self.discarded_tokens

  @property
  def generated_tokens(self) -> int:
    """The number of tokens that the model wrote."""
    return int(np.sum(self.authors == Author.MODEL))

  @property
  def failed(self) -> bool:
    return self.outcome is Outcome.FAILED


@dataclasses.dataclass(frozen=True)
class Group:
  """The G trajectories of one question under one budget, in sample order.

  Attributes:
    question: the question.
    budget: searches assigned, >= 0.
    scaffold: whether the budget was stated before each turn.
    trajectories: one for each sample.
    caps: the caps besides searches.
  """

  question: Question
  budget: int
  scaffold: bool
  trajectories: tuple[Trajectory, ...]
  caps: budgets.Budget = budgets.NO_CAPS


class EngineError(RuntimeError):
  """The engine could not generate; the message says what was tried."""


class RetrievalError(RuntimeError):
  """The retriever could not answer; the message says what was tried.

  why: a word for the cause, by which failures are counted.
  """

  why = "other"


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
  """A request to sample one turn of one episode.

  Attributes:
    address: of the episode; the engine keeps its KV cache under this key
      between turns.
    turn: 0-based index; together with `address` it seeds the turn's randomness.
    token_ids: the whole context so far, at least one token.
    max_tokens: limit on the sampled tokens, >= 1.
    stop: the turn ends when its decoded text contains one of these texts.
    temperature, top_p, top_k: see `config.SamplingConfig`; None: the engine's.
    repetition_penalty: divides the logits of tokens that occurred, 1 is off;
      only servers apply it.
    may_search: whether the episode can still pay for a call of a tool. A chat
      model is not offered its tools otherwise; other engines ignore this.
    on_tokens: is called by the in-process engine with the ids that each of its
      calls sampled, in order, and for a chat model with the reasoning that is
      streamed; other engines report nothing before the end.
  """

  address: Address
  turn: int
  token_ids: tuple[int, ...]
  max_tokens: int
  stop: tuple[str, ...]
  temperature: float | None = None
  top_p: float | None = None
  top_k: int | None = None
  repetition_penalty: float = 1.0
  may_search: bool = True
  on_tokens: Callable[[Sequence[int]], None] | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  def cut(self, text: str) -> str | None:
    """Returns `text` up to the end of its first stop text, None without one."""
    ends = [text.find(stop) + len(stop) for stop in self.stop if stop in text]
    return text[: min(ends)] if ends else None

  def within(self, max_context: int, advice: str) -> GenerateRequest:
    """Caps `max_tokens` so that the context stays within the engine's.

    Args:
      max_context: of the engine, in tokens.
      advice: what to do if there is no room, for the error's sentence.

    Raises:
      EngineError: there is no room for a single token.
    """
    room = max_context - len(self.token_ids)
    if room < 1:
      raise EngineError(
        f"The context of {len(self.token_ids)} tokens has no room in the "
        f"engine's {max_context}; {advice} or lower episode.max_context."
      )
    return dataclasses.replace(self, max_tokens=min(self.max_tokens, room))


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
  """A request for the log-probabilities of given tokens; it samples nothing.

  Attributes:
    sequences: ids of each text, at least two, with its context.
  """

  sequences: tuple[tuple[int, ...], ...]


class Finish(enum.StrEnum):
  """Why a turn ended."""

  STOP = "stop"  # A stop text was completed.
  END_OF_TURN = "end_of_turn"  # The model sampled an end-of-turn token.
  LENGTH = "length"  # `max_tokens` tokens were sampled.


@dataclasses.dataclass(frozen=True)
class Generation:
  """The result of sampling one turn.

  Attributes:
    token_ids: the sampled ids, including the token that completed the stop text
      or ended the turn.
    logps: their log-probabilities, `log_softmax(logits / temperature)`.
    text: the decoded turn, cut right after its stop text, without control
      tokens (such as the end of turn).
    finish: why the turn ended.
    versions: the policy version that sampled each token.
    server: address of the server that sampled them; "" if this process did.
    experts: `[T - 1, L, K]`, ids of the experts that were chosen for each of
      the T tokens of the context and of the turn but the last, whose layers
      were never computed; None if they are not recorded.
  """

  token_ids: tuple[int, ...]
  logps: tuple[float, ...]
  text: str
  finish: Finish
  versions: tuple[int, ...]
  server: str = ""
  experts: np.ndarray | None = dataclasses.field(
    default=None, compare=False, repr=False
  )


def unrecorded_experts(tokens: int, *, like: Any) -> np.ndarray:
  """Returns ids of experts `[tokens, L, K]` that mean no record.

  Args:
    tokens: the number of tokens.
    like: an array of ids, or anything with its dtype and with L and K as the
      last axes of its shape.
  """
  shape = (tokens, *like.shape[-2:])
  return np.full(shape, np.iinfo(like.dtype).max, like.dtype)


class Engine(Protocol):
  """Generates turns; it may keep an episode's cache until `release`."""

  async def generate(self, request: GenerateRequest) -> Generation:
    """Samples one turn. Raises `EngineError` when it cannot."""

  def release(self, address: Address) -> None:
    """Forgets an episode's cache. Unknown addresses are ignored."""


class TrainableEngine(Engine, Protocol):
  """An engine whose weights can be replaced between rollouts.

  It begins with the initial policy of the training, as version 0, and counts
  events since `counters` were last cleared.
  """

  counters: Counter[str]

  def set_params(self, params: Any, version: int) -> None:
    """Samples with these weights, a tree of arrays, from now on."""

  def close(self) -> None:
    """Frees what the engine holds outside of this object, at a run's end."""


@runtime_checkable
class ScoringEngine(TrainableEngine, Protocol):
  """A trainable engine that scores texts, so that its weights are verified."""

  def scores(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
    """Returns log-probabilities of all tokens but the first, at temperature 1.

    There is a list for each of the engine's parts (servers, devices), by name.
    """


# Returns why log-probabilities are not those of an engine's weights, or "".
Wrong = Callable[[Sequence[float]], str]


@runtime_checkable
class FleetEngine(ScoringEngine, Protocol):
  """A scoring engine whose parts can be left out."""

  def put_aside(self, part: str, why: str) -> None:
    """Samples no more with a part, until it was restarted."""

  def expect(self, token_ids: Sequence[int], wrong: Wrong) -> None:
    """Has parts that join later score `token_ids`; `wrong` ones stay out."""


@runtime_checkable
class CachingEngine(TrainableEngine, Protocol):
  """A trainable engine on the trainer's devices, which can lend its memory."""

  def free_cache(self) -> int:
    """Frees the KV cache until a turn needs it; returns its bytes on a device.

    Servers release their weights too, and return 0. Raises RuntimeError if an
    episode still holds a cache.
    """


@dataclasses.dataclass(frozen=True)
class SearchContext:
  """What a search depends on besides its query, for retrievers that use it.

  Attributes:
    address: of the episode.
    turn: index of the turn that searches.
    question: of the episode.
    text: the response so far, including that turn.
  """

  address: Address
  turn: int
  question: Question
  text: str


@dataclasses.dataclass(frozen=True)
class SearchRequest:
  """One query for at most `k` passages of `corpus`.

  Attributes:
    query: the query.
    k: limit on the passages.
    corpus: name of the corpus; "" if there is only one.
    context: of the search. Requests that differ only in it are equal and share
      a cached answer, unless the retriever is a `ContextualRetriever`.
    tool: name of the tool that is called; a retriever that has one tool ignores
      it.
  """

  query: str
  k: int
  corpus: str = ""
  context: SearchContext | None = dataclasses.field(
    default=None, compare=False, repr=False
  )
  tool: str = "search"

  def known_context(self) -> SearchContext:
    """Returns the context. Raises ValueError if it is missing."""
    if self.context is None:
      raise ValueError(
        f"Found the search {self.query!r} without a context; expected the "
        "context of an episode, because this retriever's answer depends on it."
      )
    return self.context


@runtime_checkable
class Retriever(Protocol):
  """Finds at most `k` passages, best first; the protocols below add to it."""

  async def search(self, request: SearchRequest) -> Sequence[Passage]:
    """Answers one query. Raises `RetrievalError` when it cannot."""


@runtime_checkable
class BatchRetriever(Retriever, Protocol):
  """A retriever that answers many queries in one call."""

  async def search_many(
    self, requests: Sequence[SearchRequest]
  ) -> Sequence[Sequence[Passage] | Exception]:
    """Returns the answers in the order of the requests.

    The answer of a query that fails alone is its exception. An exception that
    is raised fails all queries of the call.
    """


@runtime_checkable
class ContextualRetriever(Retriever, Protocol):
  """A retriever whose answer depends on `SearchRequest.context`."""

  def context_key(self, context: SearchContext) -> Hashable:
    """Returns what the answer depends on, a part of the key of a cache."""


@runtime_checkable
class EngineUser(Protocol):
  """A retriever, or a part of one, that generates with the run's own engine."""

  def attach(self, engine: Engine, codec: TextCodec) -> None:
    """Sets the engine and the codec of later calls."""


class TextCodec(Protocol):
  """The text side of a tokenizer (`tokenizer.Tokenizer` implements it)."""

  end_of_turn_ids: frozenset[int]
  control_tokens: tuple[str, ...]

  def encode(self, text: str) -> list[int]:
    """Returns the ids of plain text; no special token is added."""

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids, without control tokens."""

  def render(
    self, content: str, system: str = "", prefill: str = "", chat: bool = True
  ) -> tuple[str, list[int]]:
    """Returns the prompt text of one user message, and its ids.

    Args:
      content: the message.
      system: a system message before it.
      prefill: the beginning of the reply.
      chat: whether the model's chat template is used; otherwise `content` is
        the whole prompt.
    """
