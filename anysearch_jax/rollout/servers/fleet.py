"""The servers of a run: which are up, what they serve, and who gets a turn.

docs/rollouts.md has the states of a server. One that is down is checked from
time to time. If it then serves other weights, for example those of its own
folder after a restart, it loads the present ones. It is up once it serves them
and scores a prompt as the trainer does.

A turn depends only on its context. A lost turn is therefore sampled again from
its beginning, by another server or by the same one after it recovers, and its
episode continues. If no server is up, turns wait for one.

A question goes to the server with the fewest questions and stays there while
that is up, because it has the prefix in its cache. Servers are
named one by one, or a gateway lists them (`smg --enable-rl`), from which they
come and go. With a router, turns go to its address, and it chooses; everything
else is still asked of each server. A server that must not sample then serves
weights of another name, so that no reply of it counts.

Servers that lend their memory to training are only asked for the name of their
weights; one that was restarted lends again. The next turn ends this.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from anysearch_jax import types
from anysearch_jax.host import redaction
from anysearch_jax.rollout.servers import server as server_lib
from anysearch_jax.rollout.servers import weights as weights_lib
from anysearch_jax.rollout.servers.member import Member

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Seconds between checks of a server that is up and has turns. They are needed
# because a machine that leaves the network does not close its connections.
_LOOK_SECONDS = 15.0
_LOADING_SECONDS = 15.0  # Between checks of one that loads weights.
_ANSWER_SECONDS = 10.0  # It names its weights without waiting for requests.
_SCORING_SECONDS = 60.0  # Of a short prompt, queued behind running requests.
_START_SECONDS = 1.0  # Between tries while no server is up yet.
_LIST_SECONDS = 10.0  # A server leaves when two lists do not name it.
_STOP_SECONDS = 5.0
_MOVES = 3  # Of a turn: it may be what crashes the servers.
# With a router, which learns late of a server that is being repaired.
_ROUTED_MOVES = 10

Place = tuple[int, int]  # Rollout and question.
Expected = tuple[weights_lib.Sampled, Sequence[int], types.Wrong]


class Fleet:
  """The servers of a run; its methods run in their client's event loop.

  Args:
    urls: addresses of the servers; none with a gateway.
    make: returns the server at an address.
    gateway: address of what lists the servers; "": `urls` are all.
    router: address that turns go to; "": they go to the servers.
    run: the run's part of the names of weights.
    wait: seconds that turns and new weights wait while no server is up.
    counters: counts changes as `server_up` and `server_down`, turns that were
      sampled again as `failovers`, and waits for a server as `waits`. For each
      server, `server/<host:port>/` has its `turns`, their `tokens` and `ms`,
      `failures`, and turns that were `not_finite`.

  Attributes:
    members: the servers, with their states.
    expected: what samples, and which scores of which tokens are wrong, for
      servers that join or return.
    present: the weights that servers must serve; None: health checks load
      nothing.
    dark_since: when the last server went down; infinite while one is up.
  """

  def __init__(
    self,
    urls: Iterable[str],
    make: Callable[[str], server_lib.Server],
    *,
    gateway: str = "",
    router: str = "",
    run: str,
    wait: float,
    counters: Counter[str],
  ):
    self._make = make
    self._run = run
    self._counters = counters
    self.wait = wait
    self.members: list[Member] = []
    self.expected: Expected | None = None
    self.dark_since = math.inf
    # Of each question that is sampled: its server, and episodes that play.
    self._homes: dict[Place, Member] = {}
    self._episodes: dict[Place, set[types.Address]] = {}
    # What watches each member, and under None what lists them.
    self._tasks: dict[Member | None, asyncio.Task] = {}
    self._changed = asyncio.Event()
    self._gateway = make(gateway) if gateway else None
    self._unlisted = "the gateway lists none."
    self._router = Member(make(router)) if router else None
    self._lent = False
    self._returning = asyncio.Lock()
    self.present: weights_lib.Weights | None = None
    # Of all servers; one that comes back with a shorter context stays down.
    self._max_context = 0
    for url in urls:
      self._add(url)

  async def start(self) -> int:
    """Waits for a server and starts the health checks.

    Returns:
      The longest context of the servers that are up, in tokens.

    Raises:
      types.EngineError: a server cannot be used, or none was up in time.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + self.wait
    while not (contexts := await self._ready()):
      if clock() > deadline:
        raise self._none_up()
      await asyncio.sleep(_START_SECONDS)
    self._max_context = min(contexts.values())
    late = [m.server.url for m in self.members if m not in contexts]
    if late:
      _log.warning(
        "%d of %d servers are up. The run begins, and uses the others once "
        "they are up: %s.",
        len(contexts),
        len(self.members),
        ", ".join(late),
      )
    for member in self.members:
      if member in contexts:
        member.is_up = True
        member.reason = ""
      self._begin(member, self._watch(member))
    if self._gateway:
      self._begin(None, self._list(self._gateway))
    return self._max_context

  async def stop(self) -> None:
    """Stops all tasks; one that loads weights resumes its server."""
    tasks = list(self._tasks.values())
    self._tasks = {}
    for task in tasks:
      task.cancel()
    if tasks:
      await asyncio.wait(tasks, timeout=_STOP_SECONDS)

  def _begin(self, key: Member | None, work: Coroutine) -> None:
    """Starts a task; `up` raises its error."""
    task = asyncio.create_task(work)
    self._tasks[key] = task
    task.add_done_callback(lambda _: self._tell())

  # Which servers there are.

  def _add(self, url: str) -> Member:
    """Adds a server, which is down."""
    member = Member(self._make(url))
    self.members.append(member)
    return member

  async def _ready(self) -> dict[Member, int]:
    """Asks all servers once; returns the contexts of those that answer."""
    if self._gateway:
      try:
        self._meet(await listed_workers(self._gateway))
      except server_lib.UnansweredError as error:
        self._unlisted = f"the gateway lists none: {error}"
    return await self._ask_each(self.members, lambda m: m.server.ready())

  async def _list(self, gateway: server_lib.Server) -> None:
    """Follows the gateway's list of servers."""
    logged = ""
    while True:
      await asyncio.sleep(_LIST_SECONDS)
      try:
        # One that was restarted does not know its servers at first.
        if urls := await listed_workers(gateway):
          self._meet(urls)
        logged = ""
      except types.EngineError as error:
        if not logged:  # Once for each outage.
          logged = str(error)
          _log.warning("The servers stay as they are: %s", logged)

  def _meet(self, urls: Sequence[str]) -> None:
    """Adds the servers that a gateway lists, and lets the others leave."""
    before = {member.server.url: member for member in self.members}
    for url in urls:
      if url in before:
        before[url].missed = 0
        continue
      member = self._add(url)
      if self._tasks:
        _log.warning("Server %s joins.", url)
        member.doubted.set()
        self._begin(member, self._watch(member))
    for url, member in before.items():
      if url in urls:
        continue
      member.missed += 1
      if member.missed > 1 and not member.turns:
        _log.warning("Server %s left.", url)
        self.members.remove(member)
        if task := self._tasks.pop(member, None):
          task.cancel()
    if self._tasks:
      self._tell()

  # What state they are in.

  async def up(self) -> list[Member]:
    """Returns the servers that are up, as soon as at least one is.

    Raises:
      types.EngineError: no server has been up for `wait` seconds.
    """
    is_waiting = False
    while not (up := [m for m in self.members if m.samples]):
      for task in self._tasks.values():
        if task.done():
          task.result()  # Raises if a bug ended the health checks.
      if not is_waiting:
        self._counters["waits"] += 1
      is_waiting = True
      try:
        async with asyncio.timeout_at(self.dark_since + self.wait):
          await self._changed.wait()
      except TimeoutError:
        raise self._none_up() from None
    return up

  def _none_up(self) -> types.EngineError:
    """Returns the error that says why no server is up."""
    return types.EngineError(
      f"No server is up for {self.wait:g} seconds (sglang.wait): "
      f"{' '.join(map(str, self.members)) or self._unlisted}"
    )

  def _rise(self, member: Member) -> None:
    """Notes that a server is up; logs and counts a change."""
    member.reason = ""
    if not member.is_up:
      member.is_up = True
      self._note_change(member, "up")

  def _fall(
    self, member: Member, why: str | Exception, *, cuts: bool = True
  ) -> None:
    """Notes that a server is down; logs and counts a change.

    It also logs why a server refuses, once.

    Args:
      member: the server.
      why: the reason, for messages.
      cuts: whether its turns go to other servers.
    """
    is_new = str(why) != member.reason
    member.reason = str(why)
    if cuts:
      member.cut()
    if member.is_up:
      member.is_up = False
      member.doubted.set()
      self._note_change(member, "down")
    elif is_new and not isinstance(why, str | server_lib.UnansweredError):
      _log.warning("Server %s: %s", member.server.url, why)

  def _note_change(self, member: Member, state: str) -> None:
    self._counters[f"server_{state}"] += 1
    _log.warning(
      "Server %s is %s; %d of %d are up%s",
      member.server.url,
      state,
      sum(m.is_up for m in self.members),
      len(self.members),
      f": {member.reason}" if member.reason else ".",
    )
    self._tell()

  def _tell(self) -> None:
    """Notes whether a server samples; wakes what waits for a change."""
    if any(member.samples for member in self.members):
      self.dark_since = math.inf
    elif self.dark_since == math.inf:
      self.dark_since = asyncio.get_running_loop().time()
      _log.warning(
        "No server is up; turns wait for one, up to %g seconds (sglang.wait).",
        self.wait,
      )
    self._changed.set()
    self._changed = asyncio.Event()

  async def put_aside(self, url: str, why: str) -> None:
    """Leaves a server out until it is restarted, even if no other one is up.

    Args:
      url: of the server; an unknown one is ignored.
      why: the reason, for messages.
    """
    reason = why.rstrip(".")
    for member in self.members:
      if member.server.url == url:
        member.aside = True
        self._fall(
          member, f"it is put aside until it is restarted, because {reason}."
        )

  async def _watch(self, member: Member) -> None:
    """Checks a server, rarely while it is up and often while it is not."""
    tries = 0
    while True:
      pause = server_lib.pause_seconds(tries)
      if member.is_up:
        pause = _LOOK_SECONDS
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(pause):
          await member.doubted.wait()
      is_doubted = member.doubted.is_set()
      member.doubted.clear()
      is_used = member.turns or (self._router and self._router.turns)
      if member.is_up and not (is_doubted or is_used or self._lent):
        continue
      await self._look(member)
      tries = 0 if member.is_up else tries + 1

  async def _look(self, member: Member) -> None:
    """Checks a server, and loads the current weights if it serves others."""
    if self.present is None:
      return  # New ones are being written.
    try:
      await self._settle(member)
    except (types.EngineError, OSError) as error:
      # One late answer costs no turns.
      self._fall(member, error, cuts=not member.is_up)

  # Turns.

  def home(self, address: types.Address, up: Sequence[Member]) -> Member:
    """Returns the member for the next turn of an episode.

    Args:
      address: of the episode.
      up: the members of which it is one.
    """
    place = address.rollout, address.question
    episodes = self._episodes.setdefault(place, set())
    episodes.add(address)
    home = self._homes.get(place)
    if home is None or home not in up:
      questions = Counter(self._homes.values())
      home = min(up, key=lambda member: questions[member])
      self._homes[place] = home
    return home

  def leave(self, address: types.Address) -> None:
    """Notes that an episode has ended; its question may then move."""
    place = address.rollout, address.question
    episodes = self._episodes.get(place, set())
    episodes.discard(address)
    if not episodes:
      self._episodes.pop(place, None)
      self._homes.pop(place, None)

  async def ask(
    self,
    address: types.Address,
    turn: Callable[[server_lib.Server], Awaitable[types.Generation]],
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
    clock = asyncio.get_running_loop().time
    moves = _ROUTED_MOVES if self._router else _MOVES
    error: types.EngineError
    for move in range(moves + 1):
      if move:
        self._counters["failovers"] += 1
      up = await self.up()
      member = self._router or self.home(address, up)
      started = clock()
      try:
        async with member.turn(deadline):
          generation = await turn(member.server)
        self._count(
          member,
          turns=1,
          tokens=len(generation.token_ids),
          ms=round(1000 * (clock() - started)),
        )
        return dataclasses.replace(generation, server=member.server.url)
      except server_lib.NotFiniteError as broken:
        error = broken
        self._count(member, not_finite=1)
        if not any(m.samples and m is not member for m in self.members):
          raise
        if not self._router:
          await self.put_aside(member.server.url, str(error))
      except types.EngineError as failed:
        error = failed
        self._count(member, failures=1)
        if not isinstance(error, server_lib.UnansweredError):
          raise
        if self._router:
          # It does not say which server failed.
          for suspect in self.members:
            suspect.doubted.set()
          await asyncio.sleep(server_lib.pause_seconds(move))
        elif member.is_up:
          # A check tells whether its other turns are lost too.
          self._fall(member, str(error), cuts=False)
    raise error

  def _count(self, member: Member, **counts: int) -> None:
    for name, count in counts.items():
      if count:
        self._counters[f"server/{member.name}/{name}"] += count

  # What they serve.

  async def lend(self) -> None:
    """Makes all servers that answer release their memory until the next turn.

    Raises:
      types.EngineError: a server refused.
    """
    self._lent = True
    await self._ask_each(
      self.members,
      self._settle,
      note=" It may still hold the memory that training needs.",
    )

  async def _take_back(self) -> None:
    """Ends `lend`: the present weights are loaded into all servers."""
    async with self._returning:
      if self._lent and (weights := self.present):
        self._lent = False
        try:
          await self.hand_over(weights)
        except BaseException:
          self._lent = True  # The next turn tries again.
          raise

  async def hand_over(self, weights: weights_lib.Weights) -> None:
    """Loads weights, those of `present` from now on, into servers that answer.

    Every other server goes down and gets the weights when it is back, and one
    that lends its memory with the next turn.

    Raises:
      types.EngineError: a server did not load the weights or serves others; the
        message says what each server serves.
    """
    self.present = weights
    if self._lent:
      return
    members = [m for m in self.members if m.is_up]
    try:
      await self._ask_each(
        members, lambda m: self._settle(m, handing_over=True)
      )
    except types.EngineError as error:
      served = await asyncio.gather(*map(_served, members))
      raise types.EngineError(
        f"Weights {weights.name} did not reach every server: {error} Now "
        f"{'; '.join(served)}."
      ) from None

  async def scores(
    self,
    token_ids: Sequence[int],
    sampled: weights_lib.Sampled,
    *,
    deadline: float,
  ) -> dict[str, list[float]]:
    """Returns the log-probabilities of all servers that answer, by their url.

    See `Server.score`; a server that serves other weights is left out, and
    counted as `unscored` as one that is down.

    Args:
      token_ids: at least two.
      sampled: what must have scored them.
      deadline: seconds for each server.

    Raises:
      weights.BaseServedError: a server samples its base.
    """
    await self._take_back()
    deadline = min(deadline, _SCORING_SECONDS)

    async def score(member: Member) -> list[float] | None:
      # A frozen server costs these seconds once, not in every rollout.
      await member.server.version(_ANSWER_SECONDS)
      try:
        return await member.server.score(token_ids, sampled, deadline=deadline)
      except (server_lib.UnansweredError, weights_lib.BaseServedError):
        raise
      except types.EngineError:
        return None

    asked = [m for m in self.members if m.is_up]
    answers = await self._ask_each(asked, score)
    scores = {m.server.url: s for m, s in answers.items() if s is not None}
    self._counters["unscored"] += len(self.members) - len(scores)
    return scores

  async def _ask_each(
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
    results: dict[Member, T] = {}
    failures = []
    for member, outcome in zip(members, outcomes, strict=True):
      if isinstance(outcome, server_lib.UnansweredError):
        self._fall(member, f"{outcome}{note}")
      elif isinstance(outcome, BaseException):
        failures.append(outcome)
      else:
        results[member] = outcome
    if failures:
      raise failures[0]
    return results

  async def _settle(
    self, member: Member, *, handing_over: bool = False
  ) -> None:
    """Has a server serve the present weights, or lend its memory.

    It is up afterwards. It first goes down if it serves others, unless these
    are `handing_over`.

    Raises:
      types.EngineError: it does not answer, or cannot be used.
    """
    server = member.server
    async with member.loading:
      weights = self.present
      name = await server.version(_ANSWER_SECONDS)
      is_away = weights_lib.is_released(name)
      is_ours = weights_lib.is_of_run(name, self._run)
      if member.aside and is_ours:
        if self._lent and not is_away:
          await server.lend(self._run, name)
        elif not is_away:
          await self._hide(server, name)
        return
      member.aside = False
      may_differ = not member.is_up or (self._lent and not is_ours)
      if may_differ and not (self._lent and is_away):
        if (longest := await server.ready()) < self._max_context:
          raise types.EngineError(
            f"{server.url}: came back with contexts of {longest} tokens, "
            f"expected {self._max_context}; start it as it was."
          )
        name = await server.version()
        is_away = False
      if self._lent:
        if not is_away:
          await server.lend(self._run, name)
      elif is_away and not handing_over:
        return  # `hand_over` waits for this lock, to give it back.
      elif weights and handing_over:
        await self._attend(server, server.load(weights, lent=is_away))
      elif weights:
        why = await self._difference(server, name, weights)
        if why:
          self._fall(member, why)
        if why or may_differ:
          await self._admit(server, weights, loads=bool(why))
      if self.present is weights:  # Otherwise others follow.
        self._rise(member)

  async def _difference(
    self, server: server_lib.Server, name: str, weights: weights_lib.Weights
  ) -> str:
    """Returns why a server does not serve weights, or "".

    Raises EngineError if it is used by another run.
    """
    if name == weights.name:
      missing = await server.missing_adapter(weights)
      return f"it does not have adapter {missing!r}" if missing else ""
    if weights_lib.is_of_another_run(name, self._run):
      raise server.error(
        f"another run handed it weights {name!r}; give each run servers of its "
        "own."
      )
    return f"it serves {name!r}, expected {weights.name!r}"

  async def _admit(
    self,
    server: server_lib.Server,
    weights: weights_lib.Weights,
    *,
    loads: bool,
  ) -> None:
    """Has a server serve weights and compares its scores with `expected`.

    Behind a router, they have another name meanwhile.

    Raises:
      types.EngineError: they were not loaded, or it scores otherwise.
    """
    served = weights
    if loads:
      if self._router:
        served = weights._replace(name=weights_lib.hidden_name(self._run))
      await self._attend(server, server.load(served))
    sampled, token_ids, wrong = self.expected or (None, (), str)
    # Otherwise the next rollout's fingerprint compares it.
    if sampled and sampled == weights.sampled(sampled.version):
      scores = await server.score(
        token_ids,
        sampled._replace(weights=served.name),
        deadline=_SCORING_SECONDS,
      )
      if why := wrong(scores):
        await self._hide(server, served.name)
        raise server.error(f"it {why}; start it again.")
    if served is not weights:
      await server.rename(weights.name)

  async def _hide(self, server: server_lib.Server, name: str) -> None:
    """Has no reply of a server behind a router count, which serves `name`."""
    hidden = weights_lib.hidden_name(self._run)
    if self._router and name != hidden:
      await server.rename(hidden)

  async def _attend(
    self, server: server_lib.Server, load: Coroutine[Any, Any, None]
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
      (failure,) = await asyncio.gather(task, return_exceptions=True)
    if failure:
      raise failure


async def _served(member: Member) -> str:
  """Returns a part of a sentence that says what a server serves."""
  server = member.server
  try:
    return f"{server.url} serves {await server.version()!r}"
  except types.EngineError as error:
    return f"{server.url} does not say what it serves ({error})"


async def listed_workers(gateway: server_lib.Server) -> list[str]:
  """Returns the addresses of the servers that an smg gateway lists.

  Those of other engines are left out.

  Raises:
    types.EngineError: it did not answer, or not with a list of workers.
  """
  workers = (await gateway.get("/v1/rl/workers")).get("workers")
  if not isinstance(workers, list):
    raise gateway.error(
      f"found {workers!r} for its workers, expected a list; it must be an smg "
      "gateway that was started with --enable-rl."
    )
  urls = []
  for worker in workers:
    fields = worker if isinstance(worker, dict) else {}
    url = fields.get("base_url") or fields.get("url")
    is_other = fields.get("engine") not in (gateway.kind.lower(), None)
    if isinstance(url, str) and redaction.is_address(url) and not is_other:
      urls.append(url.rstrip("/"))
  return list(dict.fromkeys(urls))
