"""The members of a fleet: what each server does, and which one gets a question.

A question goes to the server with the fewest questions for its speed and stays
there while that is up, because it has the prefix in its cache. Servers are
named one by one, or a gateway lists them (`smg --enable-rl`), from which they
come and go. The gateway is only asked for addresses.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import enum
import logging
import math
from collections.abc import (
  AsyncIterator,
  Awaitable,
  Callable,
  Coroutine,
  Sequence,
)
from typing import Any, TypeVar

from anysearch_jax import types
from anysearch_jax.host import redaction
from anysearch_jax.rollout.sglang import server as sglang_server

T = TypeVar("T")

_log = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
# A turn of so many tokens that are all one token has no content.
_DEGENERATE = 16
# Of the last turns of a server, those by which it is compared with the others.
_RECENT, _FEWEST = 32, 8
_BAD, _GOOD = 0.5, 0.1  # Shares of degenerate turns.
_SMOOTHING = 0.1  # Weight of the last turn in a server's speed.

Place = tuple[int, int]  # Rollout and question.


class State(enum.Enum):
  """The state of a server; see `health`."""

  UP = "up"
  SUSPECT = "suspect"
  DOWN = "down"


class Member:
  """A server and its state.

  reason: why the server is not up.
  turns: the deadlines of its running turns.
  loading: lock for loading weights, and for lending memory.
  doubted: event that starts a check immediately.
  places: questions that are sampled here, with their episodes that play.
  speed: sampled tokens a second of a turn, smoothed; 0 is unknown.
  recent: whether each of its last turns was degenerate.
  aside: whether it is left out until it is restarted.
  missed: in how many lists in a row the gateway did not name it.
  """

  def __init__(self, server: sglang_server.Server):
    self.server = server
    self.name = server.url.partition("://")[2]
    self.state = State.DOWN
    self.reason = "it has not answered yet"
    self.turns: set[asyncio.Timeout] = set()
    self.loading = asyncio.Lock()
    self.doubted = asyncio.Event()
    self.places: dict[Place, set[types.Address]] = {}
    self.speed = 0.0
    self.recent: collections.deque[bool] = collections.deque(maxlen=_RECENT)
    self.aside = False
    self.missed = 0

  def __str__(self) -> str:
    return f"{self.server.url} is {self.state.value}: {self.reason}"

  @property
  def samples(self) -> bool:
    """Whether new turns may go to it."""
    return self.state is State.UP and not self.missed

  @contextlib.asynccontextmanager
  async def turn(self, deadline: float) -> AsyncIterator[None]:
    """Limits a turn to some seconds, and until `cut`.

    Raises:
      server.UnansweredError: it was cut.
      types.EngineError: it took too long.
    """
    limit = asyncio.timeout(deadline)
    self.turns.add(limit)
    try:
      async with limit:
        yield
    except TimeoutError:
      kind = sglang_server.UnansweredError
      raise (types.EngineError if limit in self.turns else kind)(
        f"{self.server.url}: no turn within {deadline:g} seconds."
      ) from None
    finally:
      self.turns.discard(limit)

  def cut(self) -> None:
    """Ends the running turns; they may move to another server."""
    turns, self.turns = self.turns, set()
    for limit in turns:
      if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())

  def sampled(self, turn: types.Generation, seconds: float) -> dict[str, int]:
    """Notes a turn; returns its counts."""
    tokens = len(turn.token_ids)
    speed = tokens / max(seconds, 1e-3)
    old = self.speed or speed
    self.speed = old + _SMOOTHING * (speed - old)
    same = tokens >= _DEGENERATE and len(set(turn.token_ids)) == 1
    self.recent.append(same)
    return {
      "turns": 1,
      "tokens": tokens,
      "ms": round(1000 * seconds),
      "degenerate": int(same),
    }

  def degenerates(self, others: Sequence[Member]) -> str:
    """Says how many more of its turns have no content than the others'."""

    def share(members: Sequence[Member]) -> float | None:
      turns = [bad for m in members for bad in m.recent]
      return sum(turns) / len(turns) if len(turns) >= _FEWEST else None

    own, theirs = share([self]), share(others)
    if own is None or theirs is None or own < _BAD or theirs > _GOOD:
      return ""
    return (
      f"{own:.0%} of its last {len(self.recent)} turns repeat one token, "
      f"{theirs:.0%} of the other servers'"
    )


class Members:
  """The servers of a run: which there are, and which of them are up.

  Its methods run in one event loop.

  Args:
    make: returns the server at an address.
    wait: seconds that turns wait while no server is up.
    counters: see `health.Fleet`.

  Attributes:
    all: the members.
    servers: of all that ever were members.
    tasks: what watches each member, and under None what lists them.
    unlisted: why there are no members.
    dark_since: when the last server went down; infinite while one is up.
  """

  def __init__(
    self,
    make: Callable[[str], sglang_server.Server],
    *,
    wait: float,
    counters: collections.Counter[str],
  ):
    self._make, self.wait, self._counters = make, wait, counters
    self.all: list[Member] = []
    self.servers: list[sglang_server.Server] = []
    self.tasks: dict[Member | None, asyncio.Task] = {}
    self.unlisted = "the gateway lists none."
    self.dark_since = math.inf
    self._changed = asyncio.Event()

  def add(self, url: str) -> Member:
    """Adds a server, which is down."""
    member = Member(self._make(url))
    self.servers.append(member.server)
    self.all.append(member)
    return member

  def begin(self, key: Member | None, work: Coroutine) -> None:
    """Starts a task; `up` raises its error."""
    task = asyncio.create_task(work)
    self.tasks[key] = task
    task.add_done_callback(lambda _: self.tell())

  async def stop(self) -> None:
    """Stops all tasks; one that loads weights resumes its server."""
    tasks, self.tasks = list(self.tasks.values()), {}
    for task in tasks:
      task.cancel()
    if tasks:
      await asyncio.wait(tasks, timeout=_STOP_SECONDS)

  async def up(self) -> list[Member]:
    """Returns the servers that are up, as soon as at least one is.

    Raises:
      types.EngineError: no server has been up for `wait` seconds.
    """
    waited = False
    while not (up := [m for m in self.all if m.samples]):
      for task in self.tasks.values():
        if task.done():
          task.result()  # Raises if a bug ended the health checks.
      if not waited:
        self._counters["waits"] += 1
      waited = True
      try:
        async with asyncio.timeout_at(self.dark_since + self.wait):
          await self._changed.wait()
      except TimeoutError:
        raise self.none_up() from None
    return up

  def none_up(self) -> types.EngineError:
    """Returns the error that says why no server is up."""
    return types.EngineError(
      f"No SGLang server is up for {self.wait:g} seconds (sglang.wait): "
      f"{' '.join(map(str, self.all)) or self.unlisted}"
    )

  def others(self, member: Member) -> list[Member]:
    """Returns the other servers that are up."""
    return [m for m in self.all if m.samples and m is not member]

  async def each(
    self,
    members: Sequence[Member],
    ask: Callable[[Member], Awaitable[T]],
    *,
    note: str = "",
  ) -> dict[Member, T]:
    """Asks servers at once; returns the results of those that answer.

    The others go down; `note` is added to their reason.

    Raises:
      types.EngineError: a server refused.
    """
    outcomes = await asyncio.gather(*map(ask, members), return_exceptions=True)
    found: dict[Member, T] = {}
    failed = []
    for member, outcome in zip(members, outcomes, strict=True):
      if isinstance(outcome, sglang_server.UnansweredError):
        self.enter(member, State.DOWN, f"{outcome}{note}")
      elif isinstance(outcome, BaseException):
        failed.append(outcome)
      else:
        found[member] = outcome
    if failed:
      raise failed[0]
    return found

  def enter(
    self, member: Member, state: State, why: str | Exception = ""
  ) -> None:
    """Sets the state of a server; logs and counts a change.

    It also logs why a server refuses, once.
    """
    before, known, reason = member.state, member.reason, str(why)
    member.state, member.reason = state, reason
    if state is before:
      silent = isinstance(why, str | sglang_server.UnansweredError)
      if reason != known and not silent:
        _log.warning("SGLang server %s: %s", member.server.url, reason)
      return
    up = sum(m.state is State.UP for m in self.all)
    self._counters[f"server_{state.name.lower()}"] += 1
    _log.warning(
      "SGLang server %s was %s and is %s; %d of %d are up%s",
      *(member.server.url, before.value, state.value, up, len(self.all)),
      f": {reason}" if reason else ".",
    )
    if before is State.UP:
      member.doubted.set()
    if state is State.DOWN:
      member.cut()
    self.tell()

  def set_aside(self, member: Member, why: str) -> None:
    """Leaves a server out until it is restarted."""
    member.aside = True
    member.recent.clear()
    why = f"it is put aside until it is restarted, because {why.rstrip('.')}."
    self.enter(member, State.DOWN, why)

  async def put_aside(self, url: str, why: str) -> None:
    """Leaves a server out until it is restarted, even if no other one is up."""
    for member in self.all:
      if member.server.url == url:
        self.set_aside(member, why)

  def tell(self) -> None:
    """Notes whether a server samples; wakes what waits for a change."""
    if any(member.samples for member in self.all):
      self.dark_since = math.inf
    elif self.dark_since == math.inf:
      self.dark_since = asyncio.get_running_loop().time()
      _log.warning(
        "No SGLang server is up; turns wait for one, up to %g seconds "
        "(sglang.wait).",
        self.wait,
      )
    self._changed.set()
    self._changed = asyncio.Event()

  def home(self, address: types.Address, up: Sequence[Member]) -> Member:
    """Returns the member, one of `up`, for the next turn of an episode."""
    place = address.rollout, address.question
    found = next((m for m in up if place in m.places), None)
    if found is None:
      episodes = [m.places.pop(place, set()) for m in self.all]
      found = choose(up)
      found.places[place] = set().union(*episodes)
    found.places[place].add(address)
    return found

  def leave(self, address: types.Address) -> None:
    """Notes that an episode has ended; its question may then move."""
    place = address.rollout, address.question
    for member in self.all:
      if (episodes := member.places.get(place)) is not None:
        episodes.discard(address)
        if not episodes:
          del member.places[place]


def choose(members: Sequence[Member]) -> Member:
  """Returns the member that gets the next question; there is at least one.

  Those of unknown speed count as of average speed.
  """
  known = [m.speed for m in members if m.speed]
  usual = sum(known) / len(known) if known else 1.0
  return min(members, key=lambda m: (len(m.places) + 1) / (m.speed or usual))


async def served(member: Member) -> str:
  """Returns a part of a sentence that says what a server serves."""
  server = member.server
  try:
    return f"{server.url} serves {await server.version()!r}"
  except types.EngineError as error:
    return f"{server.url} does not say what it serves ({error})"


async def workers(gateway: sglang_server.Server) -> list[str]:
  """Returns the addresses of the SGLang servers that a gateway knows.

  Raises:
    types.EngineError: it did not answer, or not with a list of workers.
  """
  reply = await gateway.get("/v1/rl/workers")
  found = reply.get("workers")
  if not isinstance(found, list):
    raise gateway.error(
      f"found {found!r} for its workers, expected a list; it must be an smg "
      "gateway that was started with --enable-rl."
    )
  urls = [_address(each) for each in found]
  return list(dict.fromkeys(url for url in urls if url))


def _address(worker: Any) -> str | None:
  """Returns a worker's address, None if it is of another engine."""
  found = worker if isinstance(worker, dict) else {}
  url = found.get("base_url") or found.get("url")
  other = found.get("engine") not in ("sglang", None)
  if other or not isinstance(url, str) or not redaction.is_address(url):
    return None
  return url.rstrip("/")
