"""The health of SGLang servers: which one samples, and how one recovers.

docs/rollouts.md has the states of a server. One that is down is checked from
time to time. If it then serves other weights, for example those of its own
folder after a restart, it loads the present ones and is up once it serves them.

A turn depends only on its context. A lost turn is therefore sampled again from
its beginning, by another server or by the same one after it recovers, and its
episode continues. If no server is up, turns wait for one.

Servers that lend their memory to training are only asked for the name of their
weights; one that was restarted lends again. The next turn ends this.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TypeVar

from anysearch_jax import types
from anysearch_jax.rollout.sglang import adapters, membership
from anysearch_jax.rollout.sglang import reply as sglang_reply
from anysearch_jax.rollout.sglang import server as sglang_server

T = TypeVar("T")

_log = logging.getLogger(__name__)

_UP, _SUSPECT, _DOWN = membership.State

# Seconds between checks of a server that is up and has turns. They are needed
# because a machine that leaves the network does not close its connections.
_LOOK_SECONDS = 15.0
_STOP_SECONDS = 5.0
_ANSWER_SECONDS = 10.0  # It names its weights without waiting for requests.
_SCORING_SECONDS = 60.0  # Of a short prompt, queued behind running requests.
_MOVES = 3  # Of a turn: it may be what crashes the servers.
_START_SECONDS = 1.0  # Between tries while no server is up yet.
_LIST_SECONDS = 10.0  # A server leaves when two lists do not name it.


class Fleet:
  """The servers of a run; its methods run in their client's event loop.

  Args:
    urls: addresses of the servers; none with a gateway.
    make: returns the server at an address.
    gateway: lists the servers; None: `urls` are all.
    run: the run's part of the names of weights.
    wait: seconds that turns and new weights wait while no server is up.
    counters: counts each change to a state as `server_<state>`, turns that were
      sampled again as `failovers`, and waits for a server as `waits`. For each
      server, `server/<host:port>/` has its `turns`, their `tokens` and `ms`,
      `failures`, and turns that were `degenerate` (one token repeated) or
      `not_finite`.

  Attributes:
    servers: all that the fleet ever had.
  """

  def __init__(
    self,
    urls: Iterable[str],
    make: Callable[[str], sglang_server.Server],
    *,
    gateway: sglang_server.Server | None = None,
    run: str,
    wait: float,
    counters: Counter[str],
  ):
    self._lent, self._returning = False, asyncio.Lock()
    self._make, self._gateway = make, gateway
    self.servers: list[sglang_server.Server] = []
    self._members: list[membership.Member] = []
    self._unlisted = "the gateway lists none."
    self._run, self._wait = run, wait
    self._counters = counters
    self._present: sglang_server.Weights | None = None
    # Of all servers; one that comes back with a shorter context stays down.
    self._max_context = 0
    self._changed = asyncio.Event()
    # When the last server went down; infinite while one is up.
    self._dark_since = math.inf
    self._watching: dict[membership.Member | None, asyncio.Task] = {}
    for url in urls:
      self._add(url)

  @property
  def answered(self) -> list[sglang_server.Server]:
    """The servers that are up."""
    return [m.server for m in self._members if m.state is _UP]

  async def start(self) -> int:
    """Waits for a server and starts the health checks.

    Returns:
      The longest context of the servers that are up, in tokens.

    Raises:
      types.EngineError: a server cannot be used, or none was up in time.
    """
    clock = asyncio.get_running_loop().time
    ends = clock() + self._wait
    while not (contexts := await self._first()):
      if clock() > ends:
        raise types.EngineError(self._none_up())
      await asyncio.sleep(_START_SECONDS)
    self._max_context = min(contexts)
    late = [m for m in self._members if m.state is _DOWN]
    if late:
      _log.warning(
        "%d of %d SGLang servers are up. The run begins, and uses the others "
        "once they are up: %s.",
        *(len(contexts), len(self._members)),
        ", ".join(m.server.url for m in late),
      )
    for member in self._members:
      self._begin(member, self._watch(member))
    if self._gateway:
      self._begin(None, self._list(self._gateway))
    return self._max_context

  async def _first(self) -> list[int]:
    """Asks all servers once; returns the contexts of those that answer."""
    if self._gateway:
      try:
        self._meet(await membership.workers(self._gateway))
      except sglang_server.UnansweredError as error:
        self._unlisted = f"the gateway lists none: {error}"
    contexts = await self._each(self._members, lambda m: m.server.ready())
    for member in contexts:
      member.state, member.reason = _UP, ""
    return list(contexts.values())

  async def _each(
    self,
    members: Sequence[membership.Member],
    ask: Callable[[membership.Member], Awaitable[T]],
    *,
    note: str = "",
  ) -> dict[membership.Member, T]:
    """Asks servers at once; returns the results of those that answer.

    The others go down; `note` is added to their reason.

    Raises:
      types.EngineError: a server refused.
    """
    outcomes = await asyncio.gather(*map(ask, members), return_exceptions=True)
    found: dict[membership.Member, T] = {}
    failed = []
    for member, outcome in zip(members, outcomes, strict=True):
      if isinstance(outcome, sglang_server.UnansweredError):
        self._enter(member, _DOWN, f"{outcome}{note}")
      elif isinstance(outcome, BaseException):
        failed.append(outcome)
      else:
        found[member] = outcome
    if failed:
      raise failed[0]
    return found

  def _add(self, url: str) -> membership.Member:
    member = membership.Member(self._make(url))
    self.servers.append(member.server)
    self._members.append(member)
    return member

  def _begin(self, key: membership.Member | None, work: Coroutine) -> None:
    task = asyncio.create_task(work)
    self._watching[key] = task
    task.add_done_callback(lambda _: self._tell())

  async def _list(self, gateway: sglang_server.Server) -> None:
    """Follows the gateway's list of servers."""
    said = ""
    while True:
      await asyncio.sleep(_LIST_SECONDS)
      try:
        # One that was restarted does not know its servers at first.
        if urls := await membership.workers(gateway):
          self._meet(urls)
        said = ""
      except types.EngineError as error:
        if not said:  # Once for each outage.
          said = str(error)
          _log.warning("The servers stay as they are: %s", said)

  def _meet(self, urls: Sequence[str]) -> None:
    """Adds the servers that a gateway lists, and lets the others leave."""
    here = {member.server.url: member for member in self._members}
    for url in urls:
      if url in here:
        here[url].missed = 0
        continue
      member = self._add(url)
      if self._watching:
        _log.warning("SGLang server %s joins.", url)
        member.doubted.set()
        self._begin(member, self._watch(member))
    for url, member in here.items():
      if url in urls:
        continue
      member.missed += 1
      if member.missed > 1 and not member.turns:
        _log.warning("SGLang server %s left.", url)
        self._members.remove(member)
        if task := self._watching.pop(member, None):
          task.cancel()
    if self._watching:
      self._tell()

  async def stop(self) -> None:
    """Stops the health checks; one that loads weights resumes its server."""
    tasks = list(self._watching.values())
    for task in tasks:
      task.cancel()
    if tasks:
      await asyncio.wait(tasks, timeout=_STOP_SECONDS)
    self._watching = {}

  async def ask(
    self,
    address: types.Address,
    turn: Callable[[sglang_server.Server], Awaitable[types.Generation]],
    *,
    deadline: float,
  ) -> types.Generation:
    """Returns a turn of the server that has the question of an episode.

    Args:
      address: of the episode. Those of a question share a server while it is
        up.
      turn: asks a server; may be called again, with another server.
      deadline: seconds of each call.

    Raises:
      types.EngineError: no server was up in time, or the turn failed.
    """
    await self._take_back()
    left, clock = _MOVES, asyncio.get_running_loop().time
    error: types.EngineError
    while True:
      member = membership.home(address, await self.up(), self._members)
      limit, began = asyncio.timeout(deadline), clock()
      member.turns.add(limit)
      try:
        async with limit:
          found = await turn(member.server)
        self._count(member, **member.sampled(found, clock() - began))
        member.turns.discard(limit)
        if why := member.degenerates(self._others(member)):
          self._put_aside(member, why)
        return dataclasses.replace(found, server=member.server.url)
      except sglang_reply.NotFiniteError as broken:
        self._count(member, not_finite=1)
        if not self._others(member):
          raise
        error = broken
        member.turns.discard(limit)
        self._put_aside(member, str(broken))
      except TimeoutError:
        error = types.EngineError(
          f"{member.server.url}: no turn within {deadline:g} seconds."
        )
        if limit in member.turns:  # Otherwise `_enter` expired it: server down.
          self._count(member, failures=1)
          raise error from None
      except sglang_server.UnansweredError as unanswered:
        error = unanswered
        self._count(member, failures=1)
        if member.state is _UP:
          self._enter(member, _SUSPECT, str(error))
      finally:
        member.turns.discard(limit)
      if not left:
        raise error
      left -= 1
      self._counters["failovers"] += 1

  def leave(self, address: types.Address) -> None:
    """Notes that an episode has ended; its question may then move."""
    membership.leave(address, self._members)

  async def put_aside(self, url: str, why: str) -> None:
    """Leaves a server out until it is restarted, if another one is up."""
    for member in self._members:
      if member.server.url == url and self._others(member):
        self._put_aside(member, why)

  def _put_aside(self, member: membership.Member, why: str) -> None:
    member.aside = True
    member.recent.clear()
    self._enter(
      member,
      _DOWN,
      f"it is put aside until it is restarted, because {why.rstrip('.')}.",
    )

  def _others(self, member: membership.Member) -> list[membership.Member]:
    return [m for m in self._members if m.samples and m is not member]

  def _count(self, member: membership.Member, **counts: int) -> None:
    for name, count in counts.items():
      if count:
        self._counters[f"server/{member.name}/{name}"] += count

  def present(
    self, weights: sglang_server.Weights | None
  ) -> sglang_server.Weights | None:
    """Sets the weights that servers must serve; returns the previous ones.

    With None, health checks load nothing.
    """
    before, self._present = self._present, weights
    return before

  async def lend(self) -> None:
    """Makes all servers that answer release their memory until the next turn.

    Raises:
      types.EngineError: a server refused.
    """
    self._lent = True
    await self._each(
      [m for m in self._members if m.state is not _DOWN or m.aside],
      self._settle,
      note=" It may still hold the memory that training needs.",
    )

  async def _take_back(self) -> None:
    """Ends `lend`: the present weights are loaded into all servers."""
    async with self._returning:
      if self._lent and (weights := self._present):
        self._lent = False
        try:
          await self.hand_over(weights)
        except BaseException:
          self._lent = True  # The next turn tries again.
          raise

  async def hand_over(self, weights: sglang_server.Weights) -> None:
    """Loads weights, those of `present` from now on, into servers that answer.

    Every other server goes down and gets the weights when it is back, and one
    that lends its memory with the next turn.

    Raises:
      types.EngineError: a server did not load the weights or serves others; the
        message says what each server serves.
    """
    self._present = weights
    if self._lent:
      return
    members = [m for m in self._members if m.state is not _DOWN]
    try:
      await self._each(
        members, functools.partial(self._settle, handing_over=True)
      )
    except types.EngineError as error:
      served = await asyncio.gather(*map(membership.served, members))
      raise types.EngineError(
        f"Weights {weights.name} did not reach every server: {error} Now "
        f"{'; '.join(served)}."
      ) from None

  async def scores(
    self,
    token_ids: Sequence[int],
    sampled: adapters.Sampled,
    *,
    deadline: float,
  ) -> dict[str, list[float]]:
    """Returns the log-probabilities of all servers that answer, by their url.

    See `Server.score`; a server that serves other weights is left out, and
    counted as `unscored` as one that is down.

    Raises:
      adapters.BaseServedError: a server samples its base.
    """
    await self._take_back()
    deadline = min(deadline, _SCORING_SECONDS)

    async def score(member: membership.Member) -> list[float] | None:
      # A frozen server costs these seconds once, not in every rollout.
      await member.server.version(_ANSWER_SECONDS)
      try:
        return await member.server.score(token_ids, sampled, deadline=deadline)
      except (sglang_server.UnansweredError, adapters.BaseServedError):
        raise
      except types.EngineError:
        return None

    asked = [m for m in self._members if m.state is not _DOWN]
    found = await self._each(asked, score)
    scores = {m.server.url: each for m, each in found.items() if each}
    self._counters["unscored"] += len(self._members) - len(scores)
    return scores

  async def up(self) -> list[membership.Member]:
    """Returns the servers that are up, as soon as at least one is.

    Raises:
      types.EngineError: no server has been up for `wait` seconds.
    """
    waited = False
    while not (up := [m for m in self._members if m.samples]):
      for task in self._watching.values():
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
        raise types.EngineError(self._none_up()) from None
    return up

  def _none_up(self) -> str:
    return (
      f"No SGLang server is up for {self._wait:g} seconds (sglang.wait): "
      f"{' '.join(map(str, self._members)) or self._unlisted}"
    )

  async def _watch(self, member: membership.Member) -> None:
    """Checks a server, rarely while it is up and often while it is not."""
    tries = 0
    while True:
      up = member.state is _UP
      pause = _LOOK_SECONDS if up else sglang_server.pause(tries)
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(pause):
          await member.doubted.wait()
      member.doubted.clear()
      if member.state is _UP and not (member.turns or self._lent):
        continue
      await self._look(member)
      tries = 0 if member.state is _UP else tries + 1

  async def _look(self, member: membership.Member) -> None:
    """Checks a server, and loads the current weights if it serves others."""
    if self._present is None:
      return  # New ones are being written.
    try:
      await self._settle(member)
    except (types.EngineError, OSError) as error:
      up = member.state is _UP
      self._enter(
        member,
        _SUSPECT if up else _DOWN,
        str(error),
        not isinstance(error, sglang_server.UnansweredError),
      )

  async def _settle(
    self, member: membership.Member, *, handing_over: bool = False
  ) -> None:
    """Has a server serve the present weights, or lend its memory.

    It is up afterwards. It first goes down if it serves others, unless these
    are `handing_over`.

    Raises:
      types.EngineError: it does not answer, or cannot be used.
    """
    server = member.server
    async with member.loading:
      weights, found = self._present, await server.version(_ANSWER_SECONDS)
      is_away = sglang_server.released(found)
      if member.aside and sglang_server.of_run(found, self._run):
        if self._lent and not is_away:
          await server.lend(self._run)
        return
      member.aside = False
      if member.state is _DOWN and not (self._lent and is_away):
        if (longest := await server.ready()) < self._max_context:
          raise types.EngineError(
            f"{server.url}: came back with contexts of {longest} tokens, "
            f"expected {self._max_context}; start it as it was."
          )
        found, is_away = await server.version(), False
      if self._lent:
        if not is_away:
          await server.lend(self._run)
      elif is_away and not handing_over:
        return  # Its memory is lent, by another process of the run.
      elif weights:
        why = ""
        if found != weights.name:
          why = f"it serves {found!r}, expected {weights.name!r}"
        elif lacks := await server.lacks(weights):
          why = f"it does not have adapter {lacks!r}"
        if why and not handing_over:
          if sglang_server.of_another_run(found, self._run):
            raise server.error(
              f"another run handed it weights {found!r}; give each run servers "
              "of its own."
            )
          self._enter(member, _DOWN, why)
        if why:
          await server.load(weights, lent=is_away)
      if self._present is weights:  # Otherwise others follow.
        self._enter(member, _UP)

  def _enter(
    self,
    member: membership.Member,
    state: membership.State,
    reason: str = "",
    refused: bool = False,
  ) -> None:
    """Sets the state of a server; logs and counts a change.

    `refused` says that the reason is not that it does not answer.
    """
    before, known = member.state, member.reason
    member.state, member.reason = state, reason
    if state is before:
      if refused and reason != known:
        _log.warning("SGLang server %s: %s", member.server.url, reason)
      return
    up = sum(m.state is _UP for m in self._members)
    self._counters[f"server_{state.name.lower()}"] += 1
    _log.warning(
      "SGLang server %s was %s and is %s; %d of %d are up%s",
      *(member.server.url, before.value, state.value, up, len(self._members)),
      f": {reason}" if reason else ".",
    )
    if before is _UP:
      member.doubted.set()
    now = asyncio.get_running_loop().time()
    if state is _DOWN:
      cut, member.turns = member.turns, set()
      for limit in cut:  # `ask` moves these turns to another server.
        if not limit.expired():
          limit.reschedule(now)
    self._tell()

  def _tell(self) -> None:
    """Notes whether a server samples; wakes what waits for a change."""
    if any(member.samples for member in self._members):
      self._dark_since = math.inf
    elif self._dark_since == math.inf:
      self._dark_since = asyncio.get_running_loop().time()
      _log.warning(
        "No SGLang server is up; turns wait for one, up to %g seconds "
        "(sglang.wait).",
        self._wait,
      )
    self._changed.set()
    self._changed = asyncio.Event()
