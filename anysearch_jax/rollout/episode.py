"""The episode as a pure state machine (the paper's section "Method").

`start` and `step` return the next state and the one request that it waits on;
whoever holds an engine and a retriever answers it with an event. Nothing here
waits, fails or draws: equal events give equal episodes.

An episode is a row of chunks. A chunk is what one author wrote at one time:
the sampled ids of a turn as they came (they are never encoded again), or the
ids of a text of the environment. Tokens, authors and spans all derive from it.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import environment as environment_lib
from anysearch_jax import prompts, protocol, types
from anysearch_jax.methods import systems


@dataclasses.dataclass(frozen=True)
class Chunk:
  """Tokens that one author wrote at one time, and their text."""

  author: types.Author
  token_ids: tuple[int, ...]
  logps: tuple[float, ...]
  versions: tuple[int, ...]
  text: str


@dataclasses.dataclass(frozen=True)
class Done:
  """The episode is over: nothing more is asked."""

  trajectory: types.Trajectory


@dataclasses.dataclass(frozen=True)
class Retrieved:
  """The event that answers a `SearchRequest`; no hit is legal."""

  passages: tuple[types.Passage, ...]


@dataclasses.dataclass(frozen=True)
class Failure:
  """The event of a request that nobody could answer; `reason` says why."""

  reason: str


Request = types.GenerateRequest | types.SearchRequest | Done
Event = types.Generation | Retrieved | Failure


@dataclasses.dataclass(frozen=True)
class Episode:
  """What has happened so far, and the request that the episode waits on.

  Attributes:
    chunks: prompt, turns and environment texts in order.
    queries: the charged queries; their number is the budget used.
    documents: what each of them found.
    search_ends: where the turns ended that searched, as in a `Trajectory`.
    bad_turns: turns answered with an error line.
    violation: a search beyond the budget was tried.
    verifying: the policy was asked what it thinks of its answer.
    request: what is awaited; None only inside `start`.
  """

  address: types.Address
  question: types.Question
  budget: int
  scaffold: bool
  config: config_lib.EpisodeConfig
  codec: types.TextCodec
  chunks: tuple[Chunk, ...] = ()
  queries: tuple[str, ...] = ()
  documents: tuple[tuple[types.Document, ...], ...] = ()
  search_ends: tuple[int, ...] = ()
  bad_turns: int = 0
  violation: bool = False
  verifying: bool = False
  request: Request | None = None

  @property
  def environment(self) -> environment_lib.Environment:
    """The texts around the episode, and how its own are read."""
    return systems.environment(self.config.prompts)

  @property
  def used(self) -> int:
    """Searches charged."""
    return len(self.queries)

  @property
  def left(self) -> int:
    """Searches that may still be made."""
    lost = self.bad_turns if self.environment.turns_are_budget else 0
    return self.budget - self.used - lost

  @property
  def turns(self) -> int:
    """Turns that the model has taken."""
    return sum(chunk.author is types.Author.MODEL for chunk in self.chunks)

  @property
  def tokens(self) -> int:
    """Tokens of the context."""
    return sum(len(chunk.token_ids) for chunk in self.chunks)

  @property
  def generated(self) -> int:
    """Tokens that the model wrote."""
    return sum(
      len(chunk.token_ids)
      for chunk in self.chunks
      if chunk.author is types.Author.MODEL
    )

  @property
  def room(self) -> int:
    """Tokens that the next turn may sample; none are left below 1."""
    return min(
      self.config.max_generated - self.generated,
      self.config.max_context - self.tokens,
    )


def prompt(
  question: types.Question,
  *,
  budget: int,
  scaffold: bool,
  config: config_lib.EpisodeConfig,
  codec: types.TextCodec,
) -> tuple[str, list[int]]:
  """The rendered prompt of an episode and its ids (appendix "Prompt Design").

  Args:
    question: neutralised here, before the chat template is applied.
    budget: searches assigned, >= 0.
    scaffold: the Phase I prompt, else the Phase II / inference prompt.
    config: names the environment.
    codec: renders one user message.

  Returns:
    The text through the chat template, and its ids.

  Raises:
    ValueError: an unknown environment, or a negative budget.
  """
  env = systems.environment(config.prompts)
  content = prompts.render(
    env.scaffold if scaffold else env.plain,
    budget=budget,
    question=protocol.neutralise(question.text, _unwanted(env, codec)),
  )
  return codec.render(content)


def start(
  question: types.Question,
  *,
  budget: int,
  scaffold: bool,
  address: types.Address,
  config: config_lib.EpisodeConfig,
  codec: types.TextCodec,
) -> tuple[Episode, Request]:
  """Opens an episode.

  Args:
    question: what is asked.
    budget: searches assigned, >= 0; 0 is to answer without a search.
    scaffold: the environment states the budget before every turn (Phase I).
    address: the seed of the episode's randomness.
    config: limits and environment.
    codec: the text side of the policy's tokenizer.

  Returns:
    The episode and its first request: a turn, or `Done` (truncated, with no
    token recorded) when the prompt leaves no room for one.

  Raises:
    ValueError: an unknown environment, or a negative budget.
  """
  text, ids = prompt(
    question, budget=budget, scaffold=scaffold, config=config, codec=codec
  )
  episode = Episode(address, question, budget, scaffold, config, codec)
  return _next_turn(episode, _given(types.Author.PROMPT, text, ids))


def step(episode: Episode, event: Event) -> tuple[Episode, Request]:
  """Answers the request that the episode waits on.

  Args:
    episode: as the last `start` or `step` returned it.
    event: the answer to its request, or `Failure`.

  Returns:
    The next episode and its request.

  Raises:
    ValueError: an event that does not answer the request, or a generation
      that breaks the request's limits.
  """
  match episode.request, event:
    case types.GenerateRequest() | types.SearchRequest(), Failure(reason):
      return _finish(episode, types.Outcome.FAILED, reason)
    case types.GenerateRequest(max_tokens=most), types.Generation():
      return _after_turn(episode, event, most)
    case types.SearchRequest(query=query), Retrieved(passages):
      env = episode.environment
      text = env.observation(passages, _unwanted(env, episode.codec))
      found = tuple(types.Document(p.id, p.title) for p in passages)
      charged = dataclasses.replace(
        episode,
        queries=(*episode.queries, query),
        documents=(*episode.documents, found),
        search_ends=(*episode.search_ends, episode.tokens - 1),
      )
      text += env.after_search(charged.budget, charged.used)
      return _next_turn(charged, _written(charged, text))
  raise ValueError(
    f"Found a {type(event).__name__} while the episode at {episode.address} "
    f"waits on a {type(episode.request).__name__}. Answer each request once, "
    "in order."
  )


def go_on(episode: Episode) -> tuple[Episode, Request]:
  """Asks for a turn after the chunks that an episode has.

  Args:
    episode: made up by the caller, with a prompt and no budget line at its end;
      `queries` and `documents` are those of its chunks.

  Returns:
    As `start`.
  """
  return _next_turn(episode)


def _after_turn(
  episode: Episode, generation: types.Generation, most: int
) -> tuple[Episode, Request]:
  """Records a turn and does what its action asks for."""
  sampled = len(generation.token_ids)
  known = (len(generation.logps), len(generation.versions))
  if not 1 <= sampled <= most or known != (sampled, sampled):
    raise ValueError(
      f"The engine returned {sampled} tokens, {known[0]} log-probabilities and "
      f"{known[1]} versions for turn {episode.turns} of {episode.address}; "
      f"expected one of each a token and 1 to {most} tokens."
    )
  turn = Chunk(
    types.Author.MODEL,
    tuple(generation.token_ids),
    tuple(generation.logps),
    tuple(generation.versions),
    generation.text,
  )
  episode = dataclasses.replace(episode, chunks=(*episode.chunks, turn))

  env = episode.environment
  if episode.verifying:
    return _after_verification(episode, generation)
  match env.action(generation.text):
    case protocol.Action(protocol.ActionKind.ANSWER, _):
      return _answered(episode)
    case protocol.Action(protocol.ActionKind.SEARCH, query) if query:
      if episode.left <= 0:
        episode = dataclasses.replace(episode, violation=True)
        line = env.over_budget
      elif env.repeated and query in episode.queries:
        line = env.repeated
      else:
        return _wait(episode, _search(episode, query))
    case _ if env.ends_itself and generation.finish is not types.Finish.LENGTH:
      return _finish(episode, types.Outcome.INVALID)
    case _:
      line = env.no_action

  if generation.finish is types.Finish.LENGTH:
    reason = _limit(episode) or (
      f"The engine stopped turn {episode.turns - 1} at {sampled} of the {most} "
      "tokens that were left to it."
    )
    return _finish(episode, types.Outcome.TRUNCATED, reason)
  answered = episode.config.answered_bad_turns
  spare = episode.left if env.turns_are_budget else answered - episode.bad_turns
  if spare <= 0:
    return _finish(episode, types.Outcome.INVALID)
  episode = dataclasses.replace(episode, bad_turns=episode.bad_turns + 1)
  return _next_turn(episode, _written(episode, line))


def _search(episode: Episode, query: str) -> types.SearchRequest:
  said = (c.text for c in episode.chunks if c.author != types.Author.PROMPT)
  return types.SearchRequest(
    query,
    episode.config.top_k,
    episode.question.corpus,
    asker=types.Asker(
      episode.address, episode.turns - 1, episode.question, "".join(said)
    ),
  )


def _answered(episode: Episode) -> tuple[Episode, Request]:
  """Ends an episode with its answer, or asks what the policy thinks of it."""
  verification = episode.environment.verification
  if verification is None or episode.left <= 0 or _limit(episode):
    return _finish(episode, types.Outcome.ANSWERED)
  asking = dataclasses.replace(episode, verifying=True)
  return _next_turn(asking, _written(asking, verification.ask))


def _after_verification(
  episode: Episode, generation: types.Generation
) -> tuple[Episode, Request]:
  """Lets an answer stand, or has the policy go on."""
  verification = episode.environment.verification
  episode = dataclasses.replace(episode, verifying=False)
  if verification.accepted(generation.text) or _limit(episode):
    return _finish(episode, types.Outcome.ANSWERED)
  return _next_turn(episode, _written(episode, verification.go_on))


def _next_turn(episode: Episode, *chunks: Chunk) -> tuple[Episode, Request]:
  """Records `chunks` and asks for a turn, or truncates where none has room.

  What no turn can read is not recorded: a trajectory never outgrows the
  context, and never ends in an observation that nobody saw.
  """
  if episode.scaffold:
    line = episode.environment.before_turn(episode.budget, episode.used)
    chunks = (*chunks, _written(episode, line))
  asking = dataclasses.replace(episode, chunks=episode.chunks + chunks)
  if reason := _limit(asking):
    return _finish(episode, types.Outcome.TRUNCATED, reason)
  ids = itertools.chain.from_iterable(c.token_ids for c in asking.chunks)
  request = types.GenerateRequest(
    address=asking.address,
    turn=asking.turns,
    token_ids=tuple(ids),
    max_tokens=asking.room,
    stop=asking.environment.stops,
  )
  return _wait(asking, request)


def _limit(episode: Episode) -> str:
  """Which limit leaves no room for another token; "" when none does."""
  config = episode.config
  if episode.generated >= config.max_generated:
    return (
      f"The model wrote all of its {config.max_generated} tokens "
      "(max_generated)."
    )
  if episode.tokens >= config.max_context:
    return (
      f"The context of {config.max_context} tokens has no room to write after "
      f"{episode.tokens} (max_context)."
    )
  return ""


def _unwanted(
  env: environment_lib.Environment, codec: types.TextCodec
) -> tuple[str, ...]:
  """Texts that nothing from outside may hold."""
  return (*codec.control_tokens, *env.markers)


def _written(episode: Episode, text: str) -> Chunk:
  """A text of the environment."""
  ids = episode.codec.encode(text)
  return _given(types.Author.ENVIRONMENT, text, ids)


def _given(author: types.Author, text: str, ids: list[int]) -> Chunk:
  """Tokens that nobody sampled."""
  return Chunk(author, tuple(ids), (0.0,) * len(ids), (-1,) * len(ids), text)


def _wait(episode: Episode, request: Request) -> tuple[Episode, Request]:
  return dataclasses.replace(episode, request=request), request


def _finish(
  episode: Episode, outcome: types.Outcome, reason: str = ""
) -> tuple[Episode, Request]:
  """Ends the episode with its trajectory."""
  chunks = episode.chunks
  lengths = [len(chunk.token_ids) for chunk in chunks]

  def flat(values, dtype):
    joined = itertools.chain.from_iterable(values)
    return np.fromiter(joined, dtype, count=sum(lengths))

  def spread(values, dtype):
    return np.repeat(np.array(values, dtype), lengths)

  trajectory = types.Trajectory(
    address=episode.address,
    question=episode.question,
    budget=episode.budget,
    scaffold=episode.scaffold,
    token_ids=flat((c.token_ids for c in chunks), np.int32),
    authors=spread([c.author for c in chunks], np.int8),
    logps=flat((c.logps for c in chunks), np.float32),
    versions=flat((c.versions for c in chunks), np.int32),
    spans=tuple(
      types.Span(c.author, c.text)
      for c in chunks
      if c.author is not types.Author.PROMPT
    ),
    searches=episode.used,
    queries=episode.queries,
    violation=episode.violation,
    outcome=outcome,
    reason=reason,
    documents=episode.documents,
    search_ends=episode.search_ends,
  )
  return _wait(episode, Done(trajectory))
