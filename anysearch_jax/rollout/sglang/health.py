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
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from anysearch_jax import types
from anysearch_jax.rollout.sglang import adapters, membership
from anysearch_jax.rollout.sglang import reply as sglang_reply
from anysearch_jax.rollout.sglang import server as sglang_server

_log = logging.getLogger(__name__)

_UP, _SUSPECT, _DOWN = membership.State

# Seconds between checks of a server that is up and has turns. They are needed
# because a machine that leaves the network does not close its connections.
_LOOK_SECONDS = 15.0
_LOADING_SECONDS = 15.0  # Between checks of one that loads weights.
_ANSWER_SECONDS = 10.0  # It names its weights without waiting for requests.
_SCORING_SECONDS = 60.0  # Of a short prompt, queued behind running requests.
_MOVES = 3  # Of a turn: it may be what crashes the servers.
_START_SECONDS = 1.0  # Between tries while no server is up yet.
_LIST_SECONDS = 10.0  # A server leaves when two lists do not name it.

Expected = tuple[adapters.Sampled, Sequence[int], types.Wrong]


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
    expected: what samples, and which scores of which tokens are wrong, for
      servers that join or return.
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
    self._gateway, self._run, self._counters = gateway, run, counters
    self._members = members = membership.Members(
      make, wait=wait, counters=counters
    )
    self.servers, self.up, self.stop = members.servers, members.up, members.stop
    self.put_aside, self.leave = members.put_aside, members.leave
    self._present: sglang_server.Weights | None = None
    self.expected: Expected | None = None
    # Of all servers; one that comes back with a shorter context stays down.
    self._max_context = 0
    for url in urls:
      members.add(url)

  async def start(self) -> int:
    """Waits for a server and starts the health checks.

    Returns:
      The longest context of the servers that are up, in tokens.

    Raises:
      types.EngineError: a server cannot be used, or none was up in time.
    """
    members, clock = self._members, asyncio.get_running_loop().time
    ends = clock() + members.wait
    while not (contexts := await self._ready()):
      if clock() > ends:
        raise members.none_up()
      await asyncio.sleep(_START_SECONDS)
    self._max_context = min(contexts.values())
    late = [m.server.url for m in members.all if m not in contexts]
    if late:
      _log.warning(
        "%d of %d SGLang servers are up. The run begins, and uses the others "
        "once they are up: %s.",
        *(len(contexts), len(members.all), ", ".join(late)),
      )
    for member in members.all:
      if member in contexts:
        member.state, member.reason = _UP, ""
      members.begin(member, self._watch(member))
    if self._gateway:
      members.begin(None, self._list(self._gateway))
    return self._max_context

  async def _ready(self) -> dict[membership.Member, int]:
    """Asks all servers once; returns the contexts of those that answer."""
    if self._gateway:
      try:
        self._meet(await membership.workers(self._gateway))
      except sglang_server.UnansweredError as error:
        self._members.unlisted = f"the gateway lists none: {error}"
    return await self._members.each(
      self._members.all, lambda m: m.server.ready()
    )

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
    members = self._members
    here = {member.server.url: member for member in members.all}
    for url in urls:
      if url in here:
        here[url].missed = 0
        continue
      member = members.add(url)
      if members.tasks:
        _log.warning("SGLang server %s joins.", url)
        member.doubted.set()
        members.begin(member, self._watch(member))
    for url, member in here.items():
      if url in urls:
        continue
      member.missed += 1
      if member.missed > 1 and not member.turns:
        _log.warning("SGLang server %s left.", url)
        members.all.remove(member)
        if task := members.tasks.pop(member, None):
          task.cancel()
    if members.tasks:
      members.tell()

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
      member = self._members.home(address, await self.up())
      began = clock()
      try:
        async with member.turn(deadline):
          found = await turn(member.server)
        self._count(member, **member.sampled(found, clock() - began))
        if why := member.degenerates(self._members.others(member)):
          self._members.set_aside(member, why)
        return dataclasses.replace(found, server=member.server.url)
      except sglang_reply.NotFiniteError as broken:
        error = broken
        self._count(member, not_finite=1)
        if not self._members.others(member):
          raise
        self._members.set_aside(member, str(error))
      except types.EngineError as failed:
        error = failed
        self._count(member, failures=1)
        if not isinstance(error, sglang_server.UnansweredError):
          raise
        if member.state is _UP:
          self._members.enter(member, _SUSPECT, str(error))
      if not left:
        raise error
      left -= 1
      self._counters["failovers"] += 1

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
    await self._members.each(
      [m for m in self._members.all if m.state is not _DOWN or m.aside],
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
    members = [m for m in self._members.all if m.state is not _DOWN]
    try:
      await self._members.each(
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

    asked = [m for m in self._members.all if m.state is not _DOWN]
    found = await self._members.each(asked, score)
    scores = {m.server.url: s for m, s in found.items() if s is not None}
    self._counters["unscored"] += len(self._members.all) - len(scores)
    return scores

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
      state = _SUSPECT if member.state is _UP else _DOWN
      self._members.enter(member, state, error)

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
      is_known = sglang_server.of_run(found, self._run)
      if member.aside and is_known:
        if self._lent and not is_away:
          await server.lend(self._run, found)
        return
      member.aside = False
      may_differ = member.state is _DOWN or (self._lent and not is_known)
      if may_differ and not (self._lent and is_away):
        if (longest := await server.ready()) < self._max_context:
          raise types.EngineError(
            f"{server.url}: came back with contexts of {longest} tokens, "
            f"expected {self._max_context}; start it as it was."
          )
        found, is_away = await server.version(), False
      if self._lent:
        if not is_away:
          await server.lend(self._run, found)
      elif is_away and not handing_over:
        return  # Its memory is lent, by another process of the run.
      elif weights:
        why = ""
        if not handing_over and found != weights.name:
          why = f"it serves {found!r}, expected {weights.name!r}"
        elif not handing_over and (lacks := await server.lacks(weights)):
          why = f"it does not have adapter {lacks!r}"
        if why:
          if sglang_server.of_another_run(found, self._run):
            raise server.error(
              f"another run handed it weights {found!r}; give each run servers "
              "of its own."
            )
          self._members.enter(member, _DOWN, why)
        if why or handing_over:
          await self._attend(server, server.load(weights, lent=is_away))
        if (why or may_differ) and not handing_over:
          await self._compare(server, weights)
      if self._present is weights:  # Otherwise others follow.
        self._members.enter(member, _UP)

  async def _compare(
    self, server: sglang_server.Server, weights: sglang_server.Weights
  ) -> None:
    """Raises EngineError if a server's scores are not `expected`."""
    sampled, ids, wrong = self.expected or (None, (), str)
    # Otherwise the next rollout's fingerprint compares it.
    if sampled and sampled == weights.sampled(sampled.version):
      scores = await server.score(ids, sampled, deadline=_SCORING_SECONDS)
      if why := wrong(scores):
        raise server.error(f"it {why}; start it again.")

  async def _attend(
    self, server: sglang_server.Server, load: Coroutine[Any, Any, None]
  ) -> None:
    """Waits for a load, as long as the server answers other requests.

    Raises as `Server.load`, and server.UnansweredError.
    """
    task = asyncio.create_task(load)
    try:
      while not (await asyncio.wait([task], timeout=_LOADING_SECONDS))[0]:
        _log.warning("Waits for %s, which still loads weights.", server.url)
        await server.version()
    finally:
      task.cancel()
      (failed,) = await asyncio.gather(task, return_exceptions=True)
    if failed:
      raise failed
