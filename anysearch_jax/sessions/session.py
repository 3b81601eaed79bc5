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
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.environment import protocol
from anysearch_jax.rollout import driver, episode, episode_state, written_calls
from anysearch_jax.sessions import conversation, turns

_KEY_BYTES = 24
_END_OF_REASONING = "</think>"


class _Turn(NamedTuple):
  """A sampled turn.

  Attributes:
    calls: the calls of tools in it.
    content: the text before the first call.
    charged: the queries of the calls that the budget pays for.
    is_cut: whether a limit on tokens ended it.
  """

  calls: tuple[turns.Call, ...]
  content: str
  charged: tuple[str, ...]
  is_cut: bool


class _Place(NamedTuple):
  """Where a request belongs.

  Attributes:
    slot: index of the segment, which may be new.
    waiting: the segment with the texts that the request adds.
    base: the segment without them; None if the request begins it.
    replaced: the segment in this place, if its last reply is not the one that
      the program goes on from.
    taken: the segment that was put aside and is taken up again, if one is.
  """

  slot: int
  waiting: conversation.Segment
  base: conversation.Segment | None = None
  replaced: conversation.Segment | None = None
  taken: conversation.Segment | None = None


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
    counters: counts `turns`, `forks`, `landings`, `refusals`,
      `turns_asked_again`, and the reasons why sessions are spoiled.
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
    # Segments by another reply to the last request than the program took, with
    # the index of the segment in their place.
    self._aside: list[tuple[int, conversation.Segment]] = []
    self._violation = False
    self._limit = ""  # The limit that ended the episode, in a sentence.
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
      spent = self._spent().searches
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
    if report.reward is not None and not (
      abs(report.reward) <= turns.LARGEST_REWARD
    ):
      raise turns.RefusedError(
        f"reward: found {report.reward}, expected a number of at most "
        f"{turns.LARGEST_REWARD:g}.",
        param="reward",
      )
    self._report = report
    self._close()

  @property
  def is_refused(self) -> bool:
    """Whether the program was refused because a limit was reached."""
    return bool(self._limit)

  def _close(self) -> None:
    """Takes no more turns, and ends the one that is sampled, if any."""
    self._is_closed = True
    if self._pending is not None:
      self._pending.cancel()

  async def turn(self, request: turns.TurnRequest) -> turns.TurnReply:
    async with self._lock:
      self._check_open()
      return await self._answer(request)

  def _check_open(self) -> None:
    """Raises RefusedError if no turn may follow."""
    if self._limit:
      raise self._refusal(self._limit)
    if self._is_closed or self.reason:
      raise turns.RefusedError(
        self.reason or "Found a turn after the outcome, expected none.",
        status=409,
        code="session_ended",
      )
    if self._turn_count >= self._config.turns:
      self._limit = (
        f"The episode had its {self._config.turns} turns (agents.turns)."
      )
      raise self._refusal(self._limit)

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
    if request.tools and self._config.tool not in _names(request):
      self._counters["without_the_tool"] += 1
    messages = [*self._budget_message(), *request.messages]
    place = self._place(messages, request.tools)
    # What this request adds that the program does not see.
    hidden: list[conversation.SampledTurn | conversation.Line] = []
    line = conversation.Line(self._blank.environment.over_budget)
    segment = place.waiting
    while True:
      waiting = self._within_limits(segment, place.slot)
      generation = None
      if segment.landed or not self._must_land(waiting):
        waiting = self._asking(waiting, request)
        generation = await self._sampled(waiting)
      if generation is None:
        # Time, tokens or dollars only pay for the answer.
        hidden.append(line)
        segment = self._landing(place, messages, hidden, request, segment)
        continue
      hidden.append(conversation.SampledTurn(self._turn_count))
      segment = self._recorded(place, segment, waiting, generation)
      turn = self._read(generation, request)
      # The budget pays for all calls of a turn or for none.
      if not turn.charged or segment.episode.affords(
        protocol.SEARCH, len(turn.charged)
      ):
        break
      self._violation = True
      if segment.landed:
        self._limit = (
          f"The budget of {self._blank.budget} calls of "
          f"{self._config.tool!r} is spent."
        )
        raise self._refusal(self._limit)
      hidden.append(line)
      segment = self._landing(place, messages, hidden, request, segment)
    self._segments[place.slot] = _charged(segment, turn.charged)
    reply = turns.Message("assistant", turn.content, turn.calls)
    key = conversation.key_of(reply)
    self._written.setdefault(key, []).append(tuple(hidden))
    return turns.TurnReply(
      message=reply,
      is_cut=turn.is_cut,
      prompt_tokens=waiting.tokens,
      written_tokens=segment.episode.turn_lengths[-1],
      cached_tokens=place.base.episode.tokens if place.base else 0,
    )

  def _landing(
    self,
    place: _Place,
    messages: Sequence[turns.Message],
    hidden: conversation.Written,
    request: turns.TurnRequest,
    segment: conversation.Segment,
  ) -> conversation.Segment:
    """Returns a segment that asks the policy for its answer.

    Args:
      place: where the request belongs.
      messages: the program's conversation.
      hidden: what follows, the line that asks last.
      request: the program's request.
      segment: the segment before that line.
    """
    self._counters["landings"] += 1
    own_turns: set[conversation.Piece] = {*place.waiting.pieces}
    longer = self._as_read(messages, hidden, request.tools, own_turns)
    # The line may be part of the message that the request ends with.
    has_turn = any(isinstance(x, conversation.SampledTurn) for x in hidden)
    landing = self._extended(segment if has_turn else place.base, longer)
    return dataclasses.replace(landing, landed=True)

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

  def _place(
    self,
    messages: Sequence[turns.Message],
    tools: Sequence[Mapping[str, object]],
  ) -> _Place:
    """Returns where a request belongs: to a segment, or to a new one.

    Args:
      messages: the program's conversation.
      tools: the functions that the policy may call.

    Raises:
      turns.RefusedError: the template takes no such conversation, or the
        session would have too many segments.
    """
    candidates = [*enumerate(self._segments), *self._aside]
    is_ambiguous = any(
      len(self._written.get(conversation.key_of(message), ())) > 1
      for message in messages
    )
    plain = self._as_read(messages, (), tools, None)
    requests = [plain] * len(candidates)
    if is_ambiguous:
      requests = [
        self._as_read(messages, (), tools, {*segment.pieces})
        for _, segment in candidates
      ]
    lengths = [
      -1
      if segment.continuation(request.pieces) is None
      else len(segment.pieces)
      for (_, segment), request in zip(candidates, requests)
    ]
    longest = max(lengths, default=-1)
    if longest >= 0:
      number = lengths.index(longest)
      slot, segment = candidates[number]
      waiting = self._extended(segment, requests[number])
      if number < len(self._segments):
        return _Place(slot, waiting, segment)
      if self._segments[slot].asked == segment.asked:
        return _Place(slot, waiting, segment, self._segments[slot], segment)
    for slot, segment in enumerate(self._segments):
      if segment.asked == plain.pieces:
        base = segment.earlier
        return _Place(slot, self._extended(base, plain), base, segment)
    if len(self._segments) >= self._config.segments:
      self.spoil(
        "segments",
        "The program rewrote its conversation more often than "
        f"agents.segments={self._config.segments} allows.",
      )
      self._check_open()
    return _Place(len(self._segments), self._extended(None, plain))

  def _within_limits(
    self, segment: conversation.Segment, index: int
  ) -> episode_state.Episode:
    """Returns a segment's episode with what the others leave to it."""
    others = [*self._segments]
    del others[index : index + 1]
    other_tokens = sum(other.episode.tokens for other in others)
    limits = self._parts.config
    return dataclasses.replace(
      segment.episode,
      # The limit is on the tokens of all segments.
      config=dataclasses.replace(
        limits, max_context=limits.max_context - other_tokens
      ),
      discarded=self._spent(without=index),
      landing=segment.landed,
      elapsed=self._clock() - self._started,
    )

  def _spent(self, without: int | None = None) -> episode_state.Spending:
    """Returns what all segments cost but for one, and those put aside."""
    costs = [
      _cost(segment)
      for index, segment in enumerate(self._segments)
      if index != without
    ]
    return _total([*costs, *map(_last_cost, self._set_aside)])

  @property
  def _set_aside(self) -> list[conversation.Segment]:
    """The segments whose last reply the program did not take."""
    return [segment for _, segment in self._aside]

  def _as_read(
    self,
    messages: Sequence[turns.Message],
    hidden: conversation.Written,
    tools: Sequence[Mapping[str, object]],
    own_turns: Collection[conversation.Piece] | None,
  ) -> conversation.Conversation:
    """Returns a conversation as the policy reads it.

    Args:
      messages: the program's conversation.
      hidden: what follows, which the program does not see.
      tools: the functions that the policy may call.
      own_turns: which turns a message stands for that was returned several
        times; None: in the order of their times.
    """
    entries = conversation.resolved(
      _with_one_system(messages), self._written, hidden, own_turns
    )
    try:
      if self._in_tags:
        return conversation.read_in_tags(
          entries, self._blank.environment, self._codec
        )
      return conversation.read(entries, tools, self._codec)
    except ValueError as error:
      raise turns.RefusedError(str(error), param="messages") from error

  def _extended(
    self,
    segment: conversation.Segment | None,
    request: conversation.Conversation,
  ) -> conversation.Segment:
    """Returns a segment with the texts that a request adds; None begins one."""
    if segment is None:
      chunks = self._first_chunks(request)
      state = dataclasses.replace(self._blank, chunks=chunks)
      return conversation.Segment(state, request.pieces)
    texts = segment.continuation(request.pieces)
    assert texts is not None
    chunks = segment.episode.chunks
    if texts:
      end = self._ends.get(segment.pieces[-1], "")
      text = "".join([texts[0].removeprefix(end), *texts[1:]])
      chunks += (episode.environment_chunk(self._blank, text),)
    state = dataclasses.replace(segment.episode, chunks=chunks)
    return dataclasses.replace(segment, episode=state, pieces=request.pieces)

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

  def _asking(
    self, waiting: episode_state.Episode, request: turns.TurnRequest
  ) -> episode_state.Episode:
    """Returns an episode with its request for a turn.

    Raises:
      turns.RefusedError: a limit leaves no room for a token.
    """
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
    return dataclasses.replace(waiting, request=generate)

  async def _sampled(
    self, waiting: episode_state.Episode
  ) -> types.Generation | None:
    """Samples a turn; None if the time before the landing is over.

    Raises:
      turns.RefusedError: the session has ended, or its time is over.
      types.EngineError: the engine could not sample.
    """
    if self._is_closed:
      raise _ended()
    generate = waiting.request
    assert isinstance(generate, types.GenerateRequest)
    share = 1.0 if waiting.landing else driver.LANDING
    until = self._started + self._seconds * share
    self._pending = asyncio.ensure_future(
      driver.answer_request(generate, self._parts, until=until)
    )
    with self._inflight.waiting(generate):
      try:
        event = await self._pending
      except asyncio.CancelledError:
        if not self._is_closed:
          raise
        raise _ended() from None
    if event is None and waiting.landing:
      self._limit = f"The {self._seconds:g} seconds of the episode are over."
      raise self._refusal(self._limit)
    if isinstance(event, episode_state.Failure):
      self.spoil("engine", event.reason)
      raise types.EngineError(event.reason)
    assert event is None or isinstance(event, types.Generation)
    return event

  def _recorded(
    self,
    place: _Place,
    segment: conversation.Segment,
    waiting: episode_state.Episode,
    generation: types.Generation,
  ) -> conversation.Segment:
    """Keeps a segment with the turn that it waited for, and returns it.

    Args:
      place: where the request belongs.
      segment: the segment before the turn.
      waiting: its episode, with the request.
      generation: the turn.

    Raises:
      types.EngineError: the turn's tokens cannot be told from each other.
    """
    try:
      recorded = episode.record_turn(waiting, generation)
    except ValueError as error:
      self.spoil("mismatched", str(error))
      raise types.EngineError(str(error)) from error
    turn = conversation.SampledTurn(self._turn_count)
    last = generation.token_ids[-1]
    if last in self._codec.end_of_turn_ids:
      # The template writes it too.
      self._ends[turn] = self._codec.transcript((last,))
    self._sampled_turns.append((generation.text, generation.token_ids))
    longer = dataclasses.replace(
      segment,
      episode=recorded,
      pieces=(*segment.pieces, turn),
      asked=place.waiting.pieces,
      earlier=place.base,
    )
    if place.slot == len(self._segments):
      self._counters["forks"] += bool(place.slot)
      self._segments.append(longer)
    elif place.replaced is not None and (
      self._segments[place.slot] is place.replaced
    ):
      self._counters["turns_asked_again"] += place.taken is None
      self._aside.append((place.slot, place.replaced))
      if place.taken is not None:
        self._aside.remove((place.slot, place.taken))
    self._segments[place.slot] = longer
    return longer

  def _read(
    self, generation: types.Generation, request: turns.TurnRequest
  ) -> _Turn:
    """Returns the calls in a turn: of its tools, or in the run's own tags."""
    text = generation.text
    is_cut = generation.finish is types.Finish.LENGTH
    if self._in_tags:
      return self._read_in_tags(text, request, is_cut)
    start = 0
    if _END_OF_REASONING in text:
      start = text.rindex(_END_OF_REASONING) + len(_END_OF_REASONING)
    calls: list[turns.Call] = []
    content = text
    for written in written_calls.find_all(text[start:], _names(request)):
      try:
        arguments = json.dumps(
          written.arguments, ensure_ascii=False, allow_nan=False
        )
      except (TypeError, ValueError):
        continue  # Arguments that are no JSON are no call.
      if not calls:
        content = text[: start + written.start]
      calls.append(self._call(len(calls), written.name, arguments))
    charged = tuple(
      call.arguments for call in calls if call.name == self._config.tool
    )
    content = _before_stop(content, request.stop)
    return _Turn(tuple(calls), content, charged, is_cut)

  def _read_in_tags(
    self, text: str, request: turns.TurnRequest, is_cut: bool
  ) -> _Turn:
    """Returns the search in a turn, by the tags of the run's environment."""
    action = self._blank.environment.action(text)
    content = _before_stop(text, request.stop)
    if (
      action is None
      or action.kind is not protocol.ActionKind.SEARCH
      or not action.content
    ):
      return _Turn((), content, (), is_cut)
    calls: tuple[turns.Call, ...] = ()
    if self._config.tool in _names(request):
      arguments = json.dumps({"query": action.content}, ensure_ascii=False)
      calls = (self._call(0, self._config.tool, arguments),)
      opens = self._blank.environment.tool(action.tool).opens
      content = text[: text.rindex(opens)]
    return _Turn(calls, content, (action.content,), is_cut)

  def _call(self, number: int, name: str, arguments: str) -> turns.Call:
    """Returns a call of the newest turn."""
    return turns.Call(f"call_{self._turn_count}_{number}", name, arguments)

  def trajectory(self) -> types.Trajectory:
    """Ends the session and returns its trajectory."""
    self._close()
    self._parts.engine.release(self._blank.address)
    report = self._report or turns.Report()
    if not self._turn_count and not self._limit:
      self.spoil("no_turn", "The program asked the policy for no turn.")
    if self.reason:
      return self._blank.trajectory(types.Outcome.FAILED, self.reason)
    if not self._segments:
      return self._blank.trajectory(types.Outcome.TRUNCATED, self._limit)
    # The answer is in the newest turn, which comes last.
    by_age = sorted(self._segments, key=_newest_turn)
    parts = [
      dataclasses.replace(
        segment.episode, discarded=episode_state.Spending()
      ).trajectory(types.Outcome.ANSWERED)
      for segment in by_age
    ]
    dropped = _total(list(map(_last_cost, self._set_aside)))
    answer = report.answer
    if self._limit and answer is None and not self._in_tags:
      answer = ""  # The last turn was refused.
    seconds = 0.0
    if self._blank.caps.seconds < math.inf:
      seconds = self._clock() - self._started
    joined = _joined(parts)
    joined = dataclasses.replace(
      joined,
      searches=joined.searches + dropped.searches,
      violation=self._violation,
      discarded_tokens=dropped.written_tokens,
      discarded_input=dropped.read_tokens,
      reported_answer=answer,
      reported_reward=report.reward,
      seconds=seconds,
    )
    answer = self._blank.environment.judge(joined).answer
    outcome = types.Outcome.ANSWERED
    if not answer and report == turns.Report():
      outcome = types.Outcome.INVALID
      if self._limit and not self._violation:
        outcome = types.Outcome.TRUNCATED
    return dataclasses.replace(
      joined,
      outcome=outcome,
      reason=self._limit if outcome is types.Outcome.TRUNCATED else "",
    )


def _names(request: turns.TurnRequest) -> list[str]:
  """Returns the names of a request's tools."""
  return [str(tool["name"]) for tool in request.tools]


def _ended() -> turns.RefusedError:
  return turns.RefusedError(
    "The session ended while it sampled this turn.",
    status=409,
    code="session_ended",
  )


def _newest_turn(segment: conversation.Segment) -> int:
  """Returns the number of the newest turn of a segment."""
  return max(
    piece.number
    for piece in segment.pieces
    if isinstance(piece, conversation.SampledTurn)
  )


def _cost(segment: conversation.Segment) -> episode_state.Spending:
  """Returns what a segment cost by itself."""
  state = dataclasses.replace(
    segment.episode, discarded=episode_state.Spending()
  )
  return episode_state.Spending(
    state.searches_used, state.written_tokens, state.read_tokens
  )


def _last_cost(segment: conversation.Segment) -> episode_state.Spending:
  """Returns what the last reply of a segment cost."""
  if segment.earlier is None:
    return _cost(segment)
  earlier_cost = _cost(segment.earlier)
  return episode_state.Spending(
    *(x - y for x, y in zip(_cost(segment), earlier_cost))
  )


def _total(
  costs: Sequence[episode_state.Spending],
) -> episode_state.Spending:
  return episode_state.Spending(
    searches=sum(cost.searches for cost in costs),
    written_tokens=sum(cost.written_tokens for cost in costs),
    read_tokens=sum(cost.read_tokens for cost in costs),
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
