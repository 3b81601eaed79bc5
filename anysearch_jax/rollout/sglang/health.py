"""The health of SGLang servers: which one is asked, and how one comes back.

A server is

    up           it answers and serves the present weights; turns go to it
    suspect      it gave no answer; it is asked how it is, and new turns go to
                 others
    down         it gave none to that either, or cannot be used: its turns are
                 asked again elsewhere, and it is asked from time to time
    catching up  it answers again, with other weights: a server that was started
                 again has those of its folder. It is handed the present ones
                 and sampled with once it serves them

A turn is a function of its context, so one that was lost is asked again as a
whole, of another server or of the same one when it is back, and its episode
goes on. Where no server is up, turns wait for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import pathlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from anysearch_jax import types
from anysearch_jax.rollout.sglang import server as sglang_server
from anysearch_jax.rollout.sglang import weights as sglang_weights

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Seconds between looks at a server that is up and has turns: a machine that
# left the network breaks no connection.
_LOOK_SECONDS = 15.0
# Times that a turn is asked again: it may itself be what ends the servers.
_MOVES = 3


class State(enum.Enum):
  UP = "up"
  SUSPECT = "suspect"
  DOWN = "down"
  CATCHING_UP = "catching up"


class Weights(NamedTuple):
  """Weights that the servers are to have; see `sglang_weights.hand_over`."""

  path: pathlib.Path
  name: str
  in_place: bool
  deadline: float


class _Member:
  """A server and its state.

  reason: why it is not up.
  turns: the deadlines of the turns that it is asked for.
  looking: held by whoever changes its state or its weights.
  doubted: set to have it looked at.
  """

  def __init__(self, server: sglang_server.Server):
    self.server = server
    self.state = State.UP
    self.reason = ""
    self.turns: set[asyncio.Timeout] = set()
    self.looking = asyncio.Lock()
    self.doubted = asyncio.Event()


class Fleet:
  """The servers of a run; all but `stop` runs in the loop of their client.

  Args:
    servers: each of them is up.
    limits: what all of them can do, as `Server.limits` says it; one that comes
      back with less stays down.
    run: the run's part of the names of weights.
    wait: seconds that turns and new weights wait while no server is up.
    counters: each entry into a state is counted as `server_<state>`; turns
      that were asked again as `failovers`, those that waited as `waits`.
  """

  def __init__(
    self,
    servers: Sequence[sglang_server.Server],
    *,
    limits: tuple[int, bool],
    run: str,
    wait: float,
    counters: Counter[str],
  ):
    self._members = [_Member(server) for server in servers]
    self._limits, self._run, self._wait = limits, run, wait
    self._counters = counters
    self._present: Weights | None = None
    self._changed = asyncio.Event()
    self._dark_since: float | None = None
    self._watching: list[asyncio.Task] = []

  async def start(self) -> None:
    """Looks after the servers from now on."""
    self._watching = [
      asyncio.create_task(self._watch(member)) for member in self._members
    ]
    for task in self._watching:
      task.add_done_callback(lambda _: self._tell())

  def stop(self) -> None:
    """Ends that; from any thread."""
    for task in self._watching:
      task.get_loop().call_soon_threadsafe(task.cancel)
    self._watching = []

  async def ask(
    self,
    place: int,
    turn: Callable[[sglang_server.Server], Awaitable[T]],
    *,
    deadline: float,
  ) -> T:
    """A turn of the server for a place, or of another while that is not up.

    Args:
      place: equal places have one server, as long as it is up.
      turn: asks a server; may be called again, with another one.
      deadline: seconds of each call.

    Raises:
      types.EngineError: no server is up and none came back in time, or the
        turn failed.
    """
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
        if limit in member.turns:  # Else its server went down.
          raise error from None
      except sglang_server.UnansweredError as unanswered:
        error = unanswered
        self._doubt(member, str(error))
      finally:
        member.turns.discard(limit)
      if not left:
        raise error
      left -= 1
      self._counters["failovers"] += 1

  async def hold(self) -> None:
    """Has the servers left as they are until `release`."""
    for member in self._members:
      await member.looking.acquire()

  async def release(self) -> None:
    for member in self._members:
      member.looking.release()

  def present(self, weights: Weights | None) -> Weights | None:
    """Sets what servers have to serve; returns what that was until now."""
    before, self._present = self._present, weights
    return before

  async def hand_over(self) -> None:
    """Hands the present weights to all servers that are up, which are held.

    Those that cannot be reached get them when they are back.

    Raises:
      types.EngineError: a server that did not take them.
    """
    members = [m for m in self._members if m.state is not State.DOWN]
    failures = await self._load([member.server for member in members])
    for member, error in zip(members, failures, strict=True):
      if error:
        self._enter(member, State.DOWN, str(error))
      else:
        self._enter(member, State.UP)

  async def any_up(self) -> None:
    """Waits until a server is up; raises as `ask` does where none comes."""
    await self._up()

  async def _up(self) -> list[_Member]:
    """The servers that are up, as soon as one is.

    Raises:
      types.EngineError: none was for as long as they are waited for.
    """
    waited = False
    while not (up := [m for m in self._members if m.state is State.UP]):
      for task in self._watching:
        if task.done():
          task.result()  # A bug in it is raised here.
      if not waited:
        self._counters["waits"] += 1
      waited = True
      ends = self._dark_since + self._wait
      try:
        async with asyncio.timeout_at(ends):
          await self._changed.wait()
      except TimeoutError:
        raise types.EngineError(
          f"No SGLang server is up for {self._wait:g} seconds (sglang.wait): "
          f"{self._reasons()}"
        ) from None
    return up

  async def _pick(self, place: int) -> _Member:
    """The server that a place's turns go to."""
    up = await self._up()
    count = len(self._members)
    pinned = self._members[place % count]
    # What was one server's is spread over all others.
    return pinned if pinned in up else up[place // count % len(up)]

  def _doubt(self, member: _Member, reason: str) -> None:
    """Has a server looked at that left a turn unanswered."""
    if member.state is State.UP:
      self._enter(member, State.SUSPECT, reason)

  async def _watch(self, member: _Member) -> None:
    """Looks at a server: seldom while it works, often when it does not."""
    tries = 0
    while True:
      up = member.state is State.UP
      pause = _LOOK_SECONDS if up else sglang_server.pause(tries)
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(pause):
          await member.doubted.wait()
      member.doubted.clear()
      if member.state is State.UP and not member.turns:
        continue
      async with member.looking:
        await self._look(member)
      tries = 0 if member.state is State.UP else tries + 1

  async def _look(self, member: _Member) -> None:
    """Asks a server how it is, and hands it the weights that it lacks."""
    server = member.server
    try:
      if member.state is State.DOWN:
        self._check(server, await server.limits())
      found = await sglang_weights.version(server)
      if found != self._present.name:
        if sglang_weights.of_another_run(found, self._run):
          raise server.error(
            f"another run handed it weights {found!r}; give each run servers "
            "of its own."
          )
        self._enter(member, State.CATCHING_UP, f"it serves {found!r}")
        (error,) = await self._load([server])
        if error:
          raise error
      self._enter(member, State.UP)
    except types.EngineError as error:
      up = member.state is State.UP
      self._enter(member, State.SUSPECT if up else State.DOWN, str(error))

  async def _load(
    self, servers: Sequence[sglang_server.Server]
  ) -> list[types.EngineError | None]:
    weights = self._present
    return await sglang_weights.hand_over(
      servers,
      weights.path,
      weights.name,
      in_place=weights.in_place,
      deadline=weights.deadline,
    )

  def _check(
    self, server: sglang_server.Server, found: tuple[int, bool]
  ) -> None:
    """Refuses a server that came back as another one than it was."""
    (context, spans), (least, needed) = found, self._limits
    if context < least or spans < needed:
      raise types.EngineError(
        f"{server.url}: came back with contexts of {context} tokens, expected "
        f"{least}, or is of an older version; start it as it was."
      )

  def _enter(self, member: _Member, state: State, reason: str = "") -> None:
    """Has a server in a state; says so where it is another one."""
    before, member.state, member.reason = member.state, state, reason
    if state is before:
      return
    up = sum(m.state is State.UP for m in self._members)
    self._counters[f"server_{state.name.lower()}"] += 1
    _log.warning(
      "SGLang server %s was %s and is %s; %d of %d are up%s",
      member.server.url,
      before.value,
      state.value,
      up,
      len(self._members),
      f": {reason}" if reason else ".",
    )
    if before is State.UP:
      member.doubted.set()
    now = asyncio.get_running_loop().time()
    if state is State.DOWN:
      cut, member.turns = member.turns, set()
      for limit in cut:  # They are asked again elsewhere.
        if not limit.expired():
          limit.reschedule(now)
    if up:
      self._dark_since = None
    elif self._dark_since is None:
      self._dark_since = now
      _log.warning(
        "No SGLang server is up; turns wait for one, up to %g seconds "
        "(sglang.wait).",
        self._wait,
      )
    self._tell()

  def _tell(self) -> None:
    """Has all that wait for a change look."""
    self._changed.set()
    self._changed = asyncio.Event()

  def _reasons(self) -> str:
    return " ".join(
      f"{m.server.url} is {m.state.value}: {m.reason}" for m in self._members
    )
