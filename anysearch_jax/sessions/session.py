"""One episode that a program plays: its turns, its budget and its tokens.

The session samples the program's turns with the run's engine and keeps every
token with its author, log-probability and policy version. It charges the calls
of one tool as searches, and enforces the budget where the program cannot get
around it: in the replies.

* A turn that calls the tool beyond the budget is not handed to the program. The
  policy is asked for its answer once (`Environment.over_budget`), and what it
  writes then is the reply. If that is such a call again, the request is refused
  as OpenAI refuses a spent quota.
* Tokens, dollars and seconds are capped in the same way: the policy is asked
  for its answer while the reserve of `episode_state` still pays for it, and
  refused when nothing is left.

What goes wrong on the program's side spoils the session: it then counts as
failed, and none of its tokens is trained on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.environment import protocol
from anysearch_jax.rollout import driver, episode, episode_state, written_calls
from anysearch_jax.sessions import conversation, turns

_KEY_BYTES = 24
_END_OF_REASONING = "</think>"
# Stands at a conversation's end for what the program does not see.
_HIDDEN = turns.Message("assistant", "", call_id="hidden")


class _Turn(NamedTuple):
  """A sampled turn.

  Attributes:
    text: what the policy wrote.
    calls: the calls of tools in it.
    content: the text before the first call.
    charged: the queries of the calls that the budget pays for.
    is_cut: whether a limit on tokens ended it.
  """

  text: str
  calls: tuple[turns.Call, ...]
  content: str
  charged: tuple[str, ...]
  is_cut: bool


class Session:
  """A `turns.Session` over the parts of a rollout.

  Its methods run in the event loop of the process.

  Args:
    question: the question of the episode.
    parts: the engine, the limits and the environment.
    codec: renders conversations in the policy's chat template.
    budget: what the episode may spend.
    scaffold: whether it is an episode of Phase I.
    address: seeds the draws.
    config: the settings of programs.
    sampling: sampling parameters of the run, by OpenAI's names; requests that
      name others are counted and get these.
    counters: counts `turns`, `forks`, `landings`, `refusals`, and the reasons
      why sessions are spoiled.
    inflight: notes the turns that the session waits for.
    seconds: how long the episode may take.

  Attributes:
    id: names the session in addresses.
    key: the secret that its requests must bear.
    budget: what the episode may spend.
    reason: why the session is spoiled; "" if it is not.
  """

  def __init__(
    self,
    question: types.Question,
    *,
    parts: driver.EpisodeParts,
    codec: conversation.Codec,
    budget: budgets.Budget,
    scaffold: bool,
    address: types.Address,
    config: config_lib.AgentsConfig,
    sampling: Mapping[str, float],
    counters: Counter[str],
    inflight: driver.InFlight = driver.OFF,
    seconds: float = math.inf,
  ):
    self.id = secrets.token_hex(8)
    self.key = secrets.token_urlsafe(_KEY_BYTES)
    self.reason = ""
    self._parts = parts
    self._codec = codec
    self._config = config
    self._sampling = sampling
    self._counters = counters
    self._inflight = inflight
    caps = episode_state.priced(budget, parts.environment)
    self.budget = caps
    self._blank = episode_state.Episode(
      address=address,
      question=question,
      budget=caps.searches,
      scaffold=scaffold,
      config=parts.config,
      codec=codec,
      environment=parts.environment,
      caps=caps.beyond_searches,
    )
    self._clock = asyncio.get_running_loop().time
    self._started = self._clock()
    self._seconds = min(seconds, caps.seconds)
    self._segments: list[conversation.Segment] = []
    self._pending: asyncio.Future | None = None
    # What each returned message stands for, at each time.
    self._written: dict[turns.Message, list[conversation.Written]] = {}
    # Text and ids of each turn, and the text of the token that ended it.
    self._sampled_turns: list[tuple[str, Sequence[int]]] = []
    self._ends: dict[conversation.Piece, str] = {}
    self._in_tags = parts.config.prompts != "program"
    self._dropped = episode_state.Spending()
    self._landed = False
    self._violation = False
    self._limit = ""  # The limit that ended the episode, in a sentence.
    self._is_over = False
    self._is_closed = False
    self._report: turns.Report | None = None
    self._lock = asyncio.Lock()

  @property
  def _turn_count(self) -> int:
    """The number of turns that were sampled."""
    return len(self._sampled_turns)

  def budget_headers(self) -> Mapping[str, str]:
    headers = {"x-budget": str(self.budget)}
    if self.budget.searches < budgets.UNCAPPED:
      spent = _spent(self._segments, self._dropped).searches
      headers["x-budget-left"] = str(max(0, self.budget.searches - spent))
    return headers

  def spoil(self, cause: str, sentence: str) -> None:
    """Makes the session count as failed.

    Args:
      cause: a word for the reason, which is counted.
      sentence: the reason.
    """
    if not self.reason:
      self.reason = sentence
      self._counters[f"spoiled_{cause}"] += 1

  def report(self, report: turns.Report) -> None:
    if self._report is not None:
      self.spoil("reported_twice", "The program reported its outcome twice.")
      raise turns.RefusedError(
        "Found a second outcome, expected one.",
        status=409,
        code="outcome_reported",
      )
    self._report = report
    self._is_over = True

  async def turn(self, request: turns.TurnRequest) -> turns.TurnReply:
    async with self._lock:
      self._check_open()
      return await self._answer(request)

  def _check_open(self) -> None:
    """Raises RefusedError if no turn may follow."""
    if self._limit:
      raise self._refusal(self._limit)
    if self._is_over or self.reason:
      raise turns.RefusedError(
        self.reason or "Found a turn after the outcome, expected none.",
        status=409,
        code="session_ended",
      )
    if self._turn_count >= self._config.turns:
      self.spoil(
        "turns",
        f"The program asked for more than {self._config.turns} turns "
        "(agents.turns).",
      )
      self._check_open()

  def _refusal(self, sentence: str) -> turns.RefusedError:
    """Returns the error of a spent budget, and counts it."""
    self._counters["refusals"] += 1
    return turns.RefusedError(
      sentence,
      status=429,
      kind="insufficient_quota",
      code="budget_exhausted",
    )

  async def _answer(self, request: turns.TurnRequest) -> turns.TurnReply:
    """Samples the next message; asks for the answer if the budget is spent."""
    self._counters["turns"] += 1
    if any(
      value != self._sampling.get(name, value)
      for name, value in request.sampling.items()
    ):
      self._counters["sampling_ignored"] += 1
    messages = [*self._budget_message(), *request.messages]
    # What this request adds that the program does not see.
    hidden: list[conversation.SampledTurn | turns.Message] = []
    line = turns.Message("user", self._blank.environment.over_budget)
    while True:
      index, segment = self._continued(messages, hidden, request.tools)
      if not self._landed and self._must_land(segment.episode):
        self._land()
        hidden.append(line)
        continue
      prompt_tokens = segment.episode.tokens
      hidden.append(conversation.SampledTurn(self._turn_count))
      segment, turn = await self._sampled(index, segment, request)
      if not turn.charged or self._pays(segment.episode, len(turn.charged)):
        break
      self._violation = True
      if self._landed:
        self._limit = (
          f"The budget of {self._blank.budget} calls of "
          f"{self._config.tool!r} is spent."
        )
        raise self._refusal(self._limit)
      self._land()
      hidden.append(line)
    self._segments[index] = _charged(segment, turn.charged)
    reply = turns.Message("assistant", turn.content, turn.calls)
    key = conversation.key_of(reply)
    self._written.setdefault(key, []).append(tuple(hidden))
    return turns.TurnReply(
      message=reply,
      is_cut=turn.is_cut,
      prompt_tokens=prompt_tokens,
      written_tokens=segment.episode.turn_lengths[-1],
    )

  def _land(self) -> None:
    """Notes that the policy is asked for its answer."""
    self._landed = True
    self._counters["landings"] += 1

  def _budget_message(self) -> list[turns.Message]:
    """Returns the message that states the budget, if one does."""
    if not self._config.states_budget:
      return []
    lines = []
    for unit, cap in self.budget.caps:
      noun = f"calls of {self._config.tool}" if unit == "searches" else unit
      lines.append(f"{cap:g} {noun}")
    if not lines:
      return []
    return [turns.Message("system", f"Your budget: {', '.join(lines)}.")]

  def _continued(
    self,
    messages: Sequence[turns.Message],
    hidden: conversation.Written,
    tools: Sequence[Mapping[str, object]],
  ) -> tuple[int, conversation.Segment]:
    """Returns the segment that a conversation continues, with its new text.

    A conversation that continues none begins a new one. The segment is kept
    once its turn is sampled.

    Args:
      messages: the program's conversation.
      hidden: what follows, which the program does not see.
      tools: the functions that the policy may call.

    Returns:
      The segment's index, and the segment.

    Raises:
      turns.RefusedError: the template takes no such conversation, or the
        session would have too many segments.
    """
    request = self._as_read(
      [*_with_one_system(messages), _HIDDEN], hidden, tools
    )
    index = conversation.longest(self._segments, request.pieces)
    if index is None:
      index = self._drop_turn_before(request.pieces)
    if index is None:
      if len(self._segments) >= self._config.segments:
        self.spoil(
          "segments",
          "The program rewrote its conversation more often than "
          f"agents.segments={self._config.segments} allows.",
        )
        self._check_open()
      index = len(self._segments)
      waiting = dataclasses.replace(
        self._blank, chunks=self._first_chunks(request)
      )
    else:
      waiting = self._with_texts(self._segments[index], request)
    others = [*self._segments]
    del others[index : index + 1]
    other_tokens = sum(other.episode.tokens for other in others)
    limits = self._parts.config
    waiting = dataclasses.replace(
      waiting,
      # The limit is on the tokens of all segments.
      config=dataclasses.replace(
        limits, max_context=limits.max_context - other_tokens
      ),
      discarded=_spent(others, self._dropped),
      landing=self._landed,
      elapsed=self._clock() - self._started,
    )
    return index, conversation.Segment(waiting, request.pieces)

  def _drop_turn_before(
    self, pieces: Sequence[conversation.Piece]
  ) -> int | None:
    """Drops the turn that a request asks for again.

    The program went on from another reply, so the first one led nowhere. It is
    charged, and not trained on.

    Returns:
      The index of the segment that lost its last turn; None if there is none.
    """
    for index, segment in enumerate(self._segments):
      if segment.pieces[:-1] != tuple(pieces):
        continue
      state = segment.episode
      *chunks, turn = state.chunks
      calls = [o for o in state.observations if o.turn == state.turns - 1]
      context_length = state.tokens - len(turn.token_ids)
      self._dropped = self._dropped._replace(
        searches=self._dropped.searches + len(calls),
        written_tokens=self._dropped.written_tokens + len(turn.token_ids),
        read_tokens=self._dropped.read_tokens + context_length,
      )
      kept_calls = state.observations[: len(state.observations) - len(calls)]
      shorter = dataclasses.replace(
        state, chunks=tuple(chunks), observations=kept_calls, experts=None
      )
      self._segments[index] = conversation.Segment(shorter, tuple(pieces))
      self._counters["turns_asked_again"] += 1
      return index
    return None

  def _as_read(
    self,
    messages: Sequence[turns.Message],
    hidden: conversation.Written,
    tools: Sequence[Mapping[str, object]],
  ) -> conversation.Conversation:
    """Returns a conversation as the policy reads it; see `_continued`."""
    written = {**self._written, _HIDDEN: [hidden]}
    try:
      if self._in_tags:
        return conversation.read_in_tags(
          messages, written, self._blank.environment, self._codec
        )
      return conversation.read(messages, written, tools, self._codec)
    except ValueError as error:
      raise turns.RefusedError(str(error), param="messages") from error

  def _with_texts(
    self, segment: conversation.Segment, request: conversation.Conversation
  ) -> episode_state.Episode:
    """Returns a segment's episode with the texts that a request adds."""
    texts = segment.continuation(request.pieces)
    if not texts:
      return segment.episode
    end = self._ends.get(segment.pieces[-1], "")
    text = "".join([texts[0].removeprefix(end), *texts[1:]])
    chunk = episode.environment_chunk(self._blank, text)
    chunks = (*segment.episode.chunks, chunk)
    return dataclasses.replace(segment.episode, chunks=chunks)

  def _first_chunks(
    self, request: conversation.Conversation
  ) -> tuple[episode_state.Chunk, ...]:
    """Returns the chunks of a new segment.

    Turns in its history were trained on in the segments that sampled them, so
    the history of a later segment is all prompt.
    """
    later_author = types.Author.ENVIRONMENT
    if self._segments:
      later_author = types.Author.PROMPT
    prompt, *later_pieces = request.pieces
    assert isinstance(prompt, str)
    chunks = [
      episode.unsampled_chunk(types.Author.PROMPT, prompt, request.prompt_ids)
    ]
    end = ""
    for piece in later_pieces:
      if isinstance(piece, str):
        text = piece.removeprefix(end)
        ids: Sequence[int] = self._codec.encode(text)
        chunk = episode.unsampled_chunk(later_author, text, ids)
      else:
        text, ids = self._sampled_turns[piece.number]
        chunk = episode.unsampled_chunk(types.Author.PROMPT, text, ids)
      end = self._ends.get(piece, "")
      chunks.append(chunk)
    return tuple(chunks)

  def _must_land(self, waiting: episode_state.Episode) -> bool:
    """Returns whether the next turn has to be the answer."""
    landing_seconds = self._seconds * driver.LANDING
    is_late = self._seconds < math.inf and waiting.elapsed >= landing_seconds
    return is_late or (self._turn_count > 0 and waiting.is_spent)

  async def _sampled(
    self,
    index: int,
    segment: conversation.Segment,
    request: turns.TurnRequest,
  ) -> tuple[conversation.Segment, _Turn]:
    """Samples a turn and keeps its segment.

    Args:
      index: index of the segment, which may be new.
      segment: what the turn reads.
      request: the program's request.

    Returns:
      The segment with the turn, and what the turn says.

    Raises:
      turns.RefusedError: a limit leaves no room for a token.
      types.EngineError: the engine could not sample.
    """
    waiting = segment.episode
    if reason := waiting.reached_limit:
      self._limit = reason
      raise self._refusal(reason)
    limit = waiting.limit_before_landing
    if limit is None or limit <= 0:
      limit = waiting.turn_limit
    limits = [limit, waiting.config.max_turn or limit]
    if request.max_tokens is not None:
      limits.append(request.max_tokens)
    stops = request.stop
    if self._in_tags:
      stops = tuple(dict.fromkeys((*waiting.environment.stops, *stops)))
    generate = types.GenerateRequest(
      address=waiting.address,
      turn=self._turn_count,
      token_ids=waiting.context,
      max_tokens=min(limits),
      stop=stops,
    )
    self._pending = asyncio.ensure_future(
      driver.answer_request(
        generate, self._parts, until=self._started + self._seconds
      )
    )
    with self._inflight.waiting(generate):
      try:
        event = await self._pending
      except asyncio.CancelledError:
        if not self._is_closed:
          raise
        raise turns.RefusedError(
          "The session ended while it sampled this turn.",
          status=409,
          code="session_ended",
        ) from None
    if event is None:
      self._limit = f"The {self._seconds:g} seconds of the episode are over."
      raise self._refusal(self._limit)
    if isinstance(event, episode_state.Failure):
      self.spoil("engine", event.reason)
      raise types.EngineError(event.reason)
    assert isinstance(event, types.Generation)
    try:
      recorded = episode.record_turn(
        dataclasses.replace(waiting, request=generate), event
      )
    except ValueError as error:
      # Its tokens cannot be told from each other: they are not guessed.
      self.spoil("mismatched", str(error))
      raise types.EngineError(str(error)) from error
    turn = conversation.SampledTurn(self._turn_count)
    last = event.token_ids[-1]
    if last in self._codec.end_of_turn_ids:
      # The template writes it too.
      self._ends[turn] = self._codec.transcript((last,))
    self._sampled_turns.append((event.text, event.token_ids))
    sampled = conversation.Segment(recorded, (*segment.pieces, turn))
    if index == len(self._segments):
      self._counters["forks"] += bool(index)
      self._segments.append(sampled)
    self._segments[index] = sampled
    return sampled, self._read(event, request)

  def _read(
    self, generation: types.Generation, request: turns.TurnRequest
  ) -> _Turn:
    """Returns the calls in a turn: of its tools, or in the run's own tags."""
    text = generation.text
    is_cut = generation.finish is types.Finish.LENGTH
    if not request.tools:
      action = self._blank.environment.action(text)
      searches = (
        action is not None
        and action.kind is protocol.ActionKind.SEARCH
        and bool(action.content)
      )
      queries: tuple[str, ...] = ()
      if action is not None and searches:
        queries = (action.content,)
      return _Turn(text, (), _before_stop(text, request.stop), queries, is_cut)
    names = [str(tool["name"]) for tool in request.tools]
    start = 0
    if _END_OF_REASONING in text:
      start = text.rindex(_END_OF_REASONING) + len(_END_OF_REASONING)
    written = written_calls.find_all(text[start:], names)
    calls = tuple(
      turns.Call(
        id=f"call_{self._turn_count}_{number}",
        name=call.name,
        arguments=json.dumps(call.arguments, ensure_ascii=False),
      )
      for number, call in enumerate(written)
    )
    content = text[: start + written[0].start] if written else text
    charged = tuple(
      call.arguments for call in calls if call.name == self._config.tool
    )
    return _Turn(
      text, calls, _before_stop(content, request.stop), charged, is_cut
    )

  def _pays(self, turn: episode_state.Episode, calls: int) -> bool:
    """Returns whether the budget pays for calls, and for an answer."""
    return turn.searches_left >= calls and turn.affords(protocol.SEARCH)

  def trajectory(self) -> types.Trajectory:
    """Ends the session and returns its trajectory."""
    self._is_over = True
    self._is_closed = True
    if self._pending is not None:
      self._pending.cancel()
    self._parts.engine.release(self._blank.address)
    report = self._report or turns.Report()
    if not self._turn_count:
      self.spoil("no_turn", "The program asked the policy for no turn.")
    if self.reason:
      return self._blank.trajectory(types.Outcome.FAILED, self.reason)
    parts = [
      dataclasses.replace(
        segment.episode, discarded=episode_state.Spending()
      ).trajectory(types.Outcome.ANSWERED)
      for segment in self._segments
    ]
    seconds = 0.0
    if self._blank.caps.seconds < math.inf:
      seconds = self._clock() - self._started
    joined = _joined(parts)
    joined = dataclasses.replace(
      joined,
      searches=joined.searches + self._dropped.searches,
      violation=self._violation,
      discarded_tokens=self._dropped.written_tokens,
      discarded_input=self._dropped.read_tokens,
      reported_answer=report.answer,
      reported_reward=report.reward,
      seconds=seconds,
    )
    environment = self._blank.environment
    answer = environment.judge(joined).answer
    outcome = types.Outcome.ANSWERED
    if answer is None and report.reward is None:
      outcome = types.Outcome.INVALID
      if self._limit and not self._violation:
        outcome = types.Outcome.TRUNCATED
    return dataclasses.replace(
      joined,
      outcome=outcome,
      reason=self._limit if outcome is types.Outcome.TRUNCATED else "",
    )


def _spent(
  segments: Sequence[conversation.Segment], dropped: episode_state.Spending
) -> episode_state.Spending:
  """Returns what segments and dropped turns cost together."""
  episodes = [
    dataclasses.replace(segment.episode, discarded=episode_state.Spending())
    for segment in segments
  ]
  return episode_state.Spending(
    searches=dropped.searches + sum(state.searches_used for state in episodes),
    written_tokens=dropped.written_tokens
    + sum(state.written_tokens for state in episodes),
    read_tokens=dropped.read_tokens
    + sum(state.read_tokens for state in episodes),
  )


def _charged(
  segment: conversation.Segment, queries: Sequence[str]
) -> conversation.Segment:
  """Returns a segment whose last turn is charged for calls of the tool."""
  turn = segment.episode.turns - 1
  observations = tuple(
    types.Observation(protocol.SEARCH, query, turn) for query in queries
  )
  charged = dataclasses.replace(
    segment.episode,
    observations=(*segment.episode.observations, *observations),
  )
  return dataclasses.replace(segment, episode=charged)


def _before_stop(text: str, stops: Sequence[str]) -> str:
  """Returns a text up to the first of the program's stop texts."""
  ends = [text.find(stop) for stop in stops if stop in text]
  return text[: min(ends)] if ends else text


def _with_one_system(
  messages: Sequence[turns.Message],
) -> list[turns.Message]:
  """Joins the system messages at the beginning, of which templates take one."""
  count = 0
  while count < len(messages) and messages[count].role == "system":
    count += 1
  if count < 2:
    return list(messages)
  content = "\n\n".join(message.content for message in messages[:count])
  return [turns.Message("system", content), *messages[count:]]


def _joined(parts: Sequence[types.Trajectory]) -> types.Trajectory:
  """Returns the segments of a session as one trajectory.

  Args:
    parts: the trajectory of each segment, of one token or more.
  """
  if len(parts) == 1:
    return parts[0]
  lengths = [len(part.token_ids) for part in parts]
  starts = [0, *np.cumsum(lengths)[:-1].tolist()]
  turn_counts = [
    sum(span.author is types.Author.MODEL for span in part.spans)
    for part in parts
  ]
  first_turns = [0, *np.cumsum(turn_counts)[:-1].tolist()]
  recorded = [part.experts for part in parts if part.experts is not None]

  def concatenated(name: str) -> np.ndarray:
    return np.concatenate([getattr(part, name) for part in parts])

  return dataclasses.replace(
    parts[0],
    token_ids=concatenated("token_ids"),
    authors=concatenated("authors"),
    logps=concatenated("logps"),
    versions=concatenated("versions"),
    spans=tuple(span for part in parts for span in part.spans),
    searches=sum(part.searches for part in parts),
    queries=tuple(query for part in parts for query in part.queries),
    observations=tuple(
      observation._replace(turn=observation.turn + first)
      for part, first in zip(parts, first_turns)
      for observation in part.observations
    ),
    search_ends=tuple(
      end + start
      for part, start in zip(parts, starts)
      for end in part.search_ends
    ),
    servers=tuple(server for part in parts for server in part.servers),
    experts=np.concatenate(recorded) if len(recorded) == len(parts) else None,
    segment_starts=tuple(starts),
  )
