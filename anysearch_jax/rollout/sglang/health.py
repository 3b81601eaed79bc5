"""The health of SGLang servers: which one samples, and how one recovers.

A server is

    up       it answers and serves the current weights; turns go to it
    suspect  it left a request unanswered; its health is checked, and new
             turns go to other servers
    down     it failed that check too, serves other weights, or cannot be
             used: its turns move to other servers, and it is checked from
             time to time. One that answers again but serves other weights,
             for example those of its own folder after a restart, loads the
             current ones and is up once it serves them

A turn depends only on its context. A lost turn is therefore sampled again from
its beginning, by another server or by the same one after it recovers, and its
episode continues. If no server is up, turns wait for one.

Servers that lend their memory to training are only asked for the name of their
weights; one that was restarted lends again. The next turn ends this.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from anysearch_jax import types
from anysearch_jax.rollout.sglang import adapters
from anysearch_jax.rollout.sglang import server as sglang_server

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Seconds between checks of a server that is up and has turns. They are needed
# because a machine that leaves the network does not close its connections.
_LOOK_SECONDS = 15.0
_STOP_SECONDS = 5.0
# A server names its weights at once, without waiting for its running requests.
_ANSWER_SECONDS = 10.0
# Time for one forward pass of a short prompt, queued behind running requests.
_SCORING_SECONDS = 60.0
# How often a turn is moved: the turn itself may be what crashes the servers.
_MOVES = 3


class State(enum.Enum):
  """The state of a server; see the module."""

  UP = "up"
  SUSPECT = "suspect"
  DOWN = "down"


class _Member:
  """A server and its state.

  reason: why the server is not up.
  turns: the deadlines of its running turns.
  released: whether it had released its memory when it was last asked.
  loading: lock for loading weights.
  doubted: event that starts a check immediately.
  """

  def __init__(self, server: sglang_server.Server):
    self.server = server
    self.state = State.UP
    self.reason = ""
    self.turns: set[asyncio.Timeout] = set()
    self.released = False
    self.loading = asyncio.Lock()
    self.doubted = asyncio.Event()


class Fleet:
  """The servers of a run; its methods run in their client's event loop.

  Args:
    servers: the servers.
    run: the run's part of the names of weights.
    wait: seconds that turns and new weights wait while no server is up.
    counters: counts each change to a state as `server_<state>`, turns that were
      sampled again as `failovers`, and waits for a server as `waits`.
  """

  def __init__(
    self,
    servers: Sequence[sglang_server.Server],
    *,
    run: str,
    wait: float,
    counters: Counter[str],
  ):
    self._lent, self._returning = False, asyncio.Lock()
    self._members = [_Member(server) for server in servers]
    self._run, self._wait = run, wait
    self._counters = counters
    self._present: sglang_server.Weights | None = None
    # Of all servers; one that comes back with a shorter context stays down.
    self._max_context = 0
    self._changed = asyncio.Event()
    # When the last server went down; infinite while one is up.
    self._dark_since = math.inf
    self._watching: list[asyncio.Task] = []

  async def start(self) -> int:
    """Starts the health checks; returns the longest context, in tokens.

    Raises:
      types.EngineError: a server is not up.
    """
    contexts = await asyncio.gather(*(m.server.ready() for m in self._members))
    self._max_context = min(contexts)
    self._watching = [
      asyncio.create_task(self._watch(member)) for member in self._members
    ]
    for task in self._watching:
      task.add_done_callback(lambda _: self._tell())
    return self._max_context

  async def stop(self) -> None:
    """Stops the health checks; one that loads weights resumes its server."""
    for task in self._watching:
      task.cancel()
    if self._watching:
      await asyncio.wait(self._watching, timeout=_STOP_SECONDS)
    self._watching = []

  async def ask(
    self,
    place: int,
    turn: Callable[[sglang_server.Server], Awaitable[T]],
    *,
    deadline: float,
  ) -> T:
    """Returns a turn of the server for `place`, or of another if it is not up.

    Args:
      place: turns with the same number go to the same server while it is up.
      turn: asks a server; may be called again, with another server.
      deadline: seconds of each call.

    Raises:
      types.EngineError: no server was up in time, or the turn failed.
    """
    await self._take_back()
    left = _MOVES
    while True:
      member = await self._pick(place)
      limit = asyncio.timeout(deadline)
      member.turns.add(limit)
      try:
        async with limit:
          return await turn(member.server)
      except TimeoutError:
        error = types.EngineError(
          f"{member.server.url}: no turn within {deadline:g} seconds."
        )
        if limit in member.turns:  # Otherwise `_enter` expired it: server down.
          raise error from None
      except sglang_server.UnansweredError as unanswered:
        error = unanswered
        if member.state is State.UP:
          self._enter(member, State.SUSPECT, str(error))
      finally:
        member.turns.discard(limit)
      if not left:
        raise error
      left -= 1
      self._counters["failovers"] += 1

  async def hold(self) -> None:
    """Suspends the weight loading of health checks until `release`."""
    for member in self._members:
      await member.loading.acquire()

  async def release(self) -> None:
    """Resumes what `hold` suspended."""
    for member in self._members:
      member.loading.release()

  def present(
    self, weights: sglang_server.Weights | None
  ) -> sglang_server.Weights | None:
    """Sets the weights that servers must serve; returns the previous ones."""
    before, self._present = self._present, weights
    return before

  async def lend(self) -> None:
    """Makes all servers that answer release their memory until the next turn.

    Raises:
      types.EngineError: a server refused.
    """
    await self.hold()
    try:
      self._lent = True
      members = [m for m in await self._answering() if not m.released]
      outcomes = await asyncio.gather(
        *(m.server.lend(self._run) for m in members), return_exceptions=True
      )
      for member, outcome in zip(members, outcomes, strict=True):
        if isinstance(outcome, sglang_server.UnansweredError):
          why = f"{outcome} It may still hold the memory that training needs."
          self._enter(member, State.DOWN, why)
        elif outcome is not None:
          raise outcome
    finally:
      await self.release()

  async def _take_back(self) -> None:
    """Ends `lend`: the present weights are loaded into all servers."""
    async with self._returning:
      if self._lent and (weights := self._present):
        await self.hold()
        self._lent = False
        try:
          await self.hand_over(weights)
        except BaseException:
          self._lent = True  # The next turn tries again.
          raise
        finally:
          await self.release()

  async def hand_over(self, weights: sglang_server.Weights) -> None:
    """Loads the weights of `present` into all servers that answer.

    The caller has called `hold`. Every other server goes down and gets the
    weights when it is back, and one that lends its memory with the next turn.

    Raises:
      types.EngineError: a server did not load the weights or serves others; the
        message says what each server serves.
    """
    if self._lent:
      return
    members = await self._answering()
    outcomes = await asyncio.gather(
      *(m.server.load(weights, lent=m.released) for m in members),
      return_exceptions=True,
    )
    for outcome in outcomes:
      if outcome is None or isinstance(outcome, sglang_server.UnansweredError):
        continue
      if not isinstance(outcome, types.EngineError):
        raise outcome
      served = await asyncio.gather(*map(_served, members))
      raise types.EngineError(
        f"Weights {weights.name} did not reach every server: {outcome} Now "
        f"{'; '.join(served)}."
      )
    for member, outcome in zip(members, outcomes, strict=True):
      state = State.DOWN if outcome else State.UP
      self._enter(member, state, str(outcome or ""))

  async def scores(
    self,
    token_ids: Sequence[int],
    sampled: adapters.Sampled,
    *,
    deadline: float,
  ) -> dict[str, list[float]]:
    """Returns the log-probabilities of all servers that answer, by their url.

    See `Server.score`; a server that serves other weights is left out.

    Raises:
      adapters.BaseServedError: a server samples its base.
    """
    await self._take_back()
    members = await self._answering()
    deadline = min(deadline, _SCORING_SECONDS)
    outcomes = await asyncio.gather(
      *(m.server.score(token_ids, sampled, deadline=deadline) for m in members),
      return_exceptions=True,
    )
    scores = {}
    for member, outcome in zip(members, outcomes, strict=True):
      if isinstance(outcome, list):
        scores[member.server.url] = outcome
      elif isinstance(outcome, sglang_server.UnansweredError):
        self._enter(member, State.DOWN, str(outcome))
      elif not isinstance(outcome, types.EngineError) or isinstance(
        outcome, adapters.BaseServedError
      ):
        raise outcome
    return scores

  async def _answering(self) -> list[_Member]:
    """Returns the servers that are not down and answer within seconds.

    A server that does not answer goes down. A frozen server thereby costs these
    seconds once, not in every rollout.
    """

    async def check(member: _Member) -> None:
      try:
        found = await member.server.version(_ANSWER_SECONDS)
        member.released = sglang_server.released(found)
      except sglang_server.UnansweredError as error:
        self._enter(member, State.DOWN, str(error))

    members = [m for m in self._members if m.state is not State.DOWN]
    await asyncio.gather(*map(check, members))
    return [m for m in members if m.state is not State.DOWN]

  async def up(self) -> list[_Member]:
    """Returns the servers that are up, as soon as at least one is.

    Raises:
      types.EngineError: no server has been up for `wait` seconds.
    """
    waited = False
    while not (up := [m for m in self._members if m.state is State.UP]):
      for task in self._watching:
        if task.done():
          task.result()  # Raises if a bug ended the health checks.
      if not waited:
        self._counters["waits"] += 1
      waited = True
      ends = self._dark_since + self._wait
      try:
        async with asyncio.timeout_at(ends):
          await self._changed.wait()
      except TimeoutError:
        reasons = " ".join(
          f"{m.server.url} is {m.state.value}: {m.reason}"
          for m in self._members
        )
        raise types.EngineError(
          f"No SGLang server is up for {self._wait:g} seconds (sglang.wait): "
          f"{reasons}"
        ) from None
    return up

  async def _pick(self, place: int) -> _Member:
    """Returns the server that samples the turns of `place`."""
    up = await self.up()
    count = len(self._members)
    pinned = self._members[place % count]
    # Spread the turns of a server that is not up over all others.
    return pinned if pinned in up else up[place // count % len(up)]

  async def _watch(self, member: _Member) -> None:
    """Checks a server, rarely while it is up and often while it is not."""
    tries = 0
    while True:
      up = member.state is State.UP
      pause = _LOOK_SECONDS if up else sglang_server.pause(tries)
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(pause):
          await member.doubted.wait()
      member.doubted.clear()
      if member.state is State.UP and not (member.turns or self._lent):
        continue
      await self._look(member)
      tries = 0 if member.state is State.UP else tries + 1

  async def _look(self, member: _Member) -> None:
    """Checks a server, and loads the current weights if it serves others."""
    server, weights = member.server, self._present
    if weights is None:
      return  # The run has not handed any over yet.
    try:
      if self._lent:
        await server.version()  # As below, before the lock.
        async with member.loading:
          if not self._lent:
            return
          if not sglang_server.released(await server.version(_ANSWER_SECONDS)):
            await self._check_ready(server)  # It was restarted.
            await server.lend(self._run)
          self._enter(member, State.UP)
        return
      if member.state is State.DOWN:
        await self._check_ready(server)
      found = await server.version()
      # Not before: a hand-over must not wait for a server that never answers.
      async with member.loading:
        if self._present is not weights or sglang_server.released(found):
          return  # The run has handed over others meanwhile, or lent it.
        lacks = found == weights.name and await server.lacks(weights)
        if found != weights.name or lacks:
          if sglang_server.of_another_run(found, self._run):
            raise server.error(
              f"another run handed it weights {found!r}; give each run servers "
              "of its own."
            )
          why = f"it serves {found!r}, expected {weights.name!r}"
          if lacks:
            why = f"it does not have adapter {lacks!r}"
          self._enter(member, State.DOWN, why)
          await server.load(weights)
        self._enter(member, State.UP)
    except types.EngineError as error:
      up = member.state is State.UP
      self._enter(member, State.SUSPECT if up else State.DOWN, str(error))

  async def _check_ready(self, server: sglang_server.Server) -> None:
    """Checks that a server that was down is as it was."""
    context = await server.ready()
    if context < self._max_context:
      raise types.EngineError(
        f"{server.url}: came back with contexts of {context} tokens, "
        f"expected {self._max_context}; start it as it was."
      )

  def _enter(self, member: _Member, state: State, reason: str = "") -> None:
    """Sets the state of a server, and logs and counts a change."""
    before, member.state, member.reason = member.state, state, reason
    if state is before:
      return
    up = sum(m.state is State.UP for m in self._members)
    self._counters[f"server_{state.name.lower()}"] += 1
    _log.warning(
      "SGLang server %s was %s and is %s; %d of %d are up%s",
      *(member.server.url, before.value, state.value, up, len(self._members)),
      f": {reason}" if reason else ".",
    )
    if before is State.UP:
      member.doubted.set()
    now = asyncio.get_running_loop().time()
    if state is State.DOWN:
      cut, member.turns = member.turns, set()
      for limit in cut:  # `ask` moves these turns to another server.
        if not limit.expired():
          limit.reschedule(now)
    if up:
      self._dark_since = math.inf
    elif self._dark_since == math.inf:
      self._dark_since = now
      _log.warning(
        "No SGLang server is up; turns wait for one, up to %g seconds "
        "(sglang.wait).",
        self._wait,
      )
    self._tell()

  def _tell(self) -> None:
    """Wakes everything that waits for a change of state."""
    self._changed.set()
    self._changed = asyncio.Event()


async def _served(member: _Member) -> str:
  """Returns a part of a sentence that says what a server serves."""
  server = member.server
  try:
    return f"{server.url} serves {await server.version()!r}"
  except types.EngineError as error:
    return f"{server.url} does not say what it serves ({error})"
