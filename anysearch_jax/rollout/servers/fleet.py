"""The servers of a run: their states, their weights, and which gets a turn.

docs/rollouts.md has the states of a server. A server that is down is checked
from time to time. If it then serves other weights, for example those of its own
folder after a restart, it loads the current ones. It is up once it serves them
and scores a prompt as the trainer does.

A turn depends only on its context. A lost turn is therefore sampled again from
its beginning, by another server or by the same one after it recovers, and its
episode continues. If no server is up, turns wait for one.

A question goes to the server with the fewest questions and stays there while
that server is up, because its cache has the prefix. Servers are named one by
one, or a gateway lists them (`smg --enable-rl`); servers then join and leave.
With a router, turns go to its address, and it chooses the server; all other
requests still go to each server. A server that must not sample then serves
its weights under another name, so that none of its replies counts.

While servers lend their memory to training, they are only asked for the name of
their weights. A server that was restarted meanwhile lends again. The next turn
ends the loan.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from anysearch_jax import types
from anysearch_jax.host import redaction
from anysearch_jax.rollout.servers import server as server_lib
from anysearch_jax.rollout.servers import weights as weights_lib
from anysearch_jax.rollout.servers.member import Member

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Seconds between checks of a server that is up and has turns. They are needed
# because a machine that leaves the network does not close its connections.
_CHECK_SECONDS = 15.0
_LOADING_SECONDS = 15.0  # Between checks of a server that loads weights.
# For the name of the weights; a server answers that without queueing.
_ANSWER_SECONDS = 10.0
_SCORING_SECONDS = 60.0  # For a short prompt, queued behind running requests.
_START_SECONDS = 1.0  # Between tries while no server is up yet.
# Between a gateway's lists. A server leaves when two lists do not name it.
_LIST_SECONDS = 10.0
_STOP_SECONDS = 5.0  # For all tasks to end.
# How often a turn may move to another server. The turn itself may crash them.
_MOVES = 3
# As `_MOVES`, with a router, which learns late of a server that is down.
_ROUTED_MOVES = 10

QuestionKey = tuple[int, int]  # Rollout and question.


class Reference(NamedTuple):
  """The trainer's own view of some weights, to compare servers with.

  Attributes:
    sampled: the weights.
    token_ids: a prompt to score.
    wrong: returns why scores of that prompt are wrong, or "".
  """

  sampled: weights_lib.Sampled
  token_ids: Sequence[int]
  wrong: types.Wrong


class Fleet:
  """The servers of a run; its methods run in their client's event loop.

  Args:
    urls: addresses of the servers; none with a gateway.
    make: returns the server at an address.
    gateway: address of the gateway that lists the servers; "": `urls` are all.
    router: address that turns go to; "": they go to the servers.
    run: the run's part of the names of weights.
    wait: seconds that turns and new weights wait while no server is up.
    counters: counts changes as `server_up` and `server_down`, turns that were
      sampled again as `failovers`, and waits for a server as `waits`. For each
      server, `server/<host:port>/` has its `turns`, their `tokens` and `ms`,
      `failures`, and turns that were `not_finite`.

  Attributes:
    members: the servers, with their states.
    reference: compared with servers that join or return; None: with none.
    current_weights: the weights that servers must serve; None: health checks
      load nothing.
    all_down_since: event-loop time when the last server went down; infinite
      while one is up.
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
    self.reference: Reference | None = None
    self.all_down_since = math.inf
    # Of each question that is sampled: its server, and its running episodes.
    self._homes: dict[QuestionKey, Member] = {}
    self._episodes: dict[QuestionKey, set[types.Address]] = {}
    # The task that watches each member; under None the one that lists them.
    self._tasks: dict[Member | None, asyncio.Task] = {}
    self._changed = asyncio.Event()
    self._gateway = make(gateway) if gateway else None
    self._unlisted = "the gateway lists none."
    self._router = Member(make(router)) if router else None
    self._lent = False
    self._restoring = asyncio.Lock()
    self.current_weights: weights_lib.Weights | None = None
    # Of all servers; one that comes back with a shorter context stays down.
    self._max_context = 0
    for url in urls:
      self._add_member(url)

  async def start(self) -> int:
    """Waits for a server and starts the health checks.

    Returns:
      The longest context of the servers that are up, in tokens.

    Raises:
      types.EngineError: a server cannot be used, or none was up in time.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + self.wait
    while not (contexts := await self._ready_members()):
      if clock() > deadline:
        raise self._none_up()
      await asyncio.sleep(_START_SECONDS)
    self._max_context = min(contexts.values())
    late_urls = [m.server.url for m in self.members if m not in contexts]
    if late_urls:
      _log.warning(
        "%d of %d servers are up. The run begins, and uses the others once "
        "they are up: %s.",
        len(contexts),
        len(self.members),
        ", ".join(late_urls),
      )
    for member in self.members:
      if member in contexts:
        member.is_up = True
        member.reason = ""
      self._start_task(member, self._watch(member))
    if self._gateway:
      self._start_task(None, self._follow_list(self._gateway))
    return self._max_context

  async def stop(self) -> None:
    """Stops all tasks; one that loads weights resumes its server."""
    tasks = list(self._tasks.values())
    self._tasks = {}
    for task in tasks:
      task.cancel()
    if tasks:
      await asyncio.wait(tasks, timeout=_STOP_SECONDS)

  def _start_task(self, key: Member | None, work: Coroutine) -> None:
    """Starts a task; `up` raises its error."""
    task = asyncio.create_task(work)
    self._tasks[key] = task
    task.add_done_callback(lambda _: self._note_samplers())

  # The list of servers.

  def _add_member(self, url: str) -> Member:
    """Adds a server, which is down."""
    member = Member(self._make(url))
    self.members.append(member)
    return member

  async def _ready_members(self) -> dict[Member, int]:
    """Asks all servers once; returns the contexts of those that answer."""
    if self._gateway:
      try:
        self._match_list(await listed_workers(self._gateway))
      except server_lib.UnansweredError as error:
        self._unlisted = f"the gateway lists none: {error}"
    return await self._ask_each(self.members, lambda m: m.server.ready())

  async def _follow_list(self, gateway: server_lib.Server) -> None:
    """Follows the gateway's list of servers."""
    logged = ""
    while True:
      await asyncio.sleep(_LIST_SECONDS)
      try:
        # A gateway that was restarted does not know its servers at first.
        if urls := await listed_workers(gateway):
          self._match_list(urls)
        logged = ""
      except types.EngineError as error:
        if not logged:  # Once for each outage.
          logged = str(error)
          _log.warning("The servers stay as they are: %s", logged)

  def _match_list(self, urls: Sequence[str]) -> None:
    """Adds the servers that a gateway lists, and removes the others.

    A server is removed once two lists lack it and its turns have ended.
    """
    by_url = {member.server.url: member for member in self.members}
    for url in urls:
      if url in by_url:
        by_url[url].missed_lists = 0
        continue
      member = self._add_member(url)
      if self._tasks:
        _log.warning("Server %s joins.", url)
        member.needs_check.set()
        self._start_task(member, self._watch(member))
    for url, member in by_url.items():
      if url in urls:
        continue
      member.missed_lists += 1
      if member.missed_lists > 1 and not member.turns:
        _log.warning("Server %s left.", url)
        self.members.remove(member)
        if task := self._tasks.pop(member, None):
          task.cancel()
    if self._tasks:
      self._note_samplers()

  # The states of the servers.

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
        async with asyncio.timeout_at(self.all_down_since + self.wait):
          await self._changed.wait()
      except TimeoutError:
        raise self._none_up() from None
    return up

  def _none_up(self) -> types.EngineError:
    """Returns the error that says why no server is up."""
    return types.EngineError(
      f"No server is up for {self.wait:g} seconds (servers.wait): "
      f"{' '.join(map(str, self.members)) or self._unlisted}"
    )

  def _mark_up(self, member: Member) -> None:
    """Notes that a server is up; logs and counts a change."""
    member.reason = ""
    if not member.is_up:
      member.is_up = True
      self._note_change(member, "up")

  def _mark_down(
    self, member: Member, reason: str | Exception, *, cuts: bool = True
  ) -> None:
    """Notes that a server is down; logs and counts a change.

    It also logs a new reason of a server that refuses.

    Args:
      member: the server.
      reason: for messages.
      cuts: whether its turns go to other servers.
    """
    is_new = str(reason) != member.reason
    member.reason = str(reason)
    if cuts:
      member.cut_turns()
    if member.is_up:
      member.is_up = False
      member.needs_check.set()
      self._note_change(member, "down")
    elif is_new and not isinstance(reason, str | server_lib.UnansweredError):
      _log.warning("Server %s: %s", member.server.url, reason)

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
    self._note_samplers()

  def _note_samplers(self) -> None:
    """Notes whether a server samples; wakes tasks that wait for a change."""
    if any(member.samples for member in self.members):
      self.all_down_since = math.inf
    elif self.all_down_since == math.inf:
      self.all_down_since = asyncio.get_running_loop().time()
      _log.warning(
        "No server is up; turns wait for one, up to %g seconds (servers.wait).",
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
        member.is_set_aside = True
        self._mark_down(
          member, f"it is put aside until it is restarted, because {reason}."
        )

  async def _watch(self, member: Member) -> None:
    """Checks a server, rarely while it is up and often while it is down.

    A server that is up and has no turns is not checked: if it fails, the next
    turn notices.
    """
    tries = 0
    while True:
      pause = server_lib.pause_seconds(tries)
      if member.is_up:
        pause = _CHECK_SECONDS
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(pause):
          await member.needs_check.wait()
      is_doubted = member.needs_check.is_set()
      member.needs_check.clear()
      is_used = member.turns or (self._router and self._router.turns)
      if member.is_up and not (is_doubted or is_used or self._lent):
        continue
      await self._check_member(member)
      tries = 0 if member.is_up else tries + 1

  async def _check_member(self, member: Member) -> None:
    """Checks a server, and loads the current weights if it serves others."""
    if self.current_weights is None:
      return  # New weights are being written.
    try:
      await self._synchronize(member)
    except (types.EngineError, OSError) as error:
      # Cut the turns of a server only at the second failed check in a row, so
      # that one late answer costs no turns.
      self._mark_down(member, error, cuts=not member.is_up)

  # Turns.

  def choose_member(
    self, address: types.Address, up: Sequence[Member]
  ) -> Member:
    """Returns the member for the next turn of an episode.

    Args:
      address: of the episode.
      up: the members to choose from.
    """
    key = address.rollout, address.question
    episodes = self._episodes.setdefault(key, set())
    episodes.add(address)
    home = self._homes.get(key)
    if home is None or home not in up:
      questions = Counter(self._homes.values())
      home = min(up, key=lambda member: questions[member])
      self._homes[key] = home
    return home

  def end_episode(self, address: types.Address) -> None:
    """Notes that an episode has ended; its question may then move."""
    key = address.rollout, address.question
    episodes = self._episodes.get(key, set())
    episodes.discard(address)
    if not episodes:
      self._episodes.pop(key, None)
      self._homes.pop(key, None)

  async def sample_turn(
    self,
    address: types.Address,
    turn: Callable[[server_lib.Server], Awaitable[types.Generation]],
    *,
    deadline: float,
  ) -> types.Generation:
    """Returns a turn of the server that has the question of an episode.

    Args:
      address: of the episode. The episodes of a question share a server while
        it is up.
      turn: samples the turn on a server; may be called again, with another
        server.
      deadline: seconds of each call.

    Raises:
      types.EngineError: no server was up in time, or the turn failed.
    """
    await self._restore_lent()
    clock = asyncio.get_running_loop().time
    moves = _ROUTED_MOVES if self._router else _MOVES
    error: types.EngineError
    for move in range(moves + 1):
      if move:
        self._counters["failovers"] += 1
      up = await self.up()
      member = self._router or self.choose_member(address, up)
      started = clock()
      try:
        async with member.turn(deadline):
          generation = await turn(member.server)
        self._count_turn(
          member,
          turns=1,
          tokens=len(generation.token_ids),
          ms=round(1000 * (clock() - started)),
        )
        return dataclasses.replace(generation, server=member.server.url)
      except server_lib.NotFiniteError as broken:
        error = broken
        self._count_turn(member, not_finite=1)
        if not any(m.samples and m is not member for m in self.members):
          raise
        if not self._router:
          await self.put_aside(member.server.url, str(error))
      except types.EngineError as failed:
        error = failed
        self._count_turn(member, failures=1)
        if not isinstance(error, server_lib.UnansweredError):
          raise
        if self._router:
          # The router does not say which server failed.
          for suspect in self.members:
            suspect.needs_check.set()
          await asyncio.sleep(server_lib.pause_seconds(move))
        elif member.is_up:
          # A check decides whether the server's other turns are lost too.
          self._mark_down(member, str(error), cuts=False)
    raise error

  def _count_turn(self, member: Member, **counts: int) -> None:
    for name, count in counts.items():
      if count:
        self._counters[f"server/{member.name}/{name}"] += count

  # The weights of the servers.

  async def lend(self) -> None:
    """Makes all servers that answer release their memory until the next turn.

    Raises:
      types.EngineError: a server refused.
    """
    self._lent = True
    await self._ask_each(
      self.members,
      self._synchronize,
      note=" It may still hold the memory that training needs.",
    )

  async def _restore_lent(self) -> None:
    """Ends `lend`: the current weights are loaded into all servers."""
    async with self._restoring:
      if self._lent and (weights := self.current_weights):
        self._lent = False
        try:
          await self.hand_over(weights)
        except BaseException:
          self._lent = True  # The next turn tries again.
          raise

  async def hand_over(self, weights: weights_lib.Weights) -> None:
    """Makes weights the current ones, and loads them into servers that answer.

    Every other server goes down and gets the weights when it is back. Servers
    that lend their memory get them with the next turn.

    Args:
      weights: the new weights; their folder must exist.

    Raises:
      types.EngineError: a server did not load the weights or serves others; the
        message says what each server serves.
    """
    self.current_weights = weights
    if self._lent:
      return
    members = [m for m in self.members if m.is_up]
    try:
      await self._ask_each(
        members, lambda member: self._synchronize(member, handing_over=True)
      )
    except types.EngineError as error:
      clauses = await asyncio.gather(*map(_served_clause, members))
      raise types.EngineError(
        f"Weights {weights.name} did not reach every server: {error} Now "
        f"{'; '.join(clauses)}."
      ) from None

  async def scores(
    self,
    token_ids: Sequence[int],
    sampled: weights_lib.Sampled,
    *,
    deadline: float,
  ) -> dict[str, list[float]]:
    """Returns the log-probabilities of all servers that answer, by their url.

    See `Server.score`. A server that is down or serves other weights is left
    out and counted as `unscored`.

    Args:
      token_ids: at least two.
      sampled: the weights that must have scored them.
      deadline: seconds for each server.

    Raises:
      weights.BaseServedError: a server samples its base.
    """
    await self._restore_lent()
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

    up = [member for member in self.members if member.is_up]
    answers = await self._ask_each(up, score)
    scores = {
      member.server.url: logps
      for member, logps in answers.items()
      if logps is not None
    }
    self._counters["unscored"] += len(self.members) - len(scores)
    return scores

  async def _ask_each(
    self,
    members: Sequence[Member],
    ask: Callable[[Member], Awaitable[T]],
    *,
    note: str = "",
  ) -> dict[Member, T]:
    """Asks servers concurrently; returns the results of those that answer.

    The other servers go down.

    Args:
      members: the servers.
      ask: sends the request to one of them.
      note: added to the reason of servers that go down.

    Raises:
      types.EngineError: a server refused.
    """
    outcomes = await asyncio.gather(*map(ask, members), return_exceptions=True)
    results: dict[Member, T] = {}
    failures = []
    for member, outcome in zip(members, outcomes, strict=True):
      if isinstance(outcome, server_lib.UnansweredError):
        self._mark_down(member, f"{outcome}{note}")
      elif isinstance(outcome, BaseException):
        failures.append(outcome)
      else:
        results[member] = outcome
    if failures:
      raise failures[0]
    return results

  async def _synchronize(
    self, member: Member, *, handing_over: bool = False
  ) -> None:
    """Makes a server serve the current weights, or lend its memory.

    The server is up afterwards. A server that is found with other weights first
    goes down, and is checked before it comes back.

    Args:
      member: the server.
      handing_over: whether the weights have just changed: then the server stays
        up while it loads them.

    Raises:
      types.EngineError: the server does not answer, or cannot be used.
    """
    server = member.server
    async with member.loading:
      weights = self.current_weights
      name = await server.version(_ANSWER_SECONDS)
      is_released = weights_lib.is_released(name)
      is_ours = weights_lib.is_of_run(name, self._run)
      if member.is_set_aside and is_ours:
        # Not restarted yet: its weights would have another name. It stays out,
        # but must still lend its memory.
        if self._lent and not is_released:
          await server.lend(self._run, name)
        elif not is_released:
          await self._hide_replies(server, name)
        return
      member.is_set_aside = False
      # A server that was down, or names weights of no hand-over while the
      # others lend, may be a new process: check everything.
      may_be_restarted = not member.is_up or (self._lent and not is_ours)
      if may_be_restarted and not (self._lent and is_released):
        if (longest := await server.ready()) < self._max_context:
          raise types.EngineError(
            f"{server.url}: came back with contexts of {longest} tokens, "
            f"expected {self._max_context}; start it as it was."
          )
        name = await server.version()
        is_released = False  # `ready` restores the memory.
      if self._lent:
        if not is_released:
          await server.lend(self._run, name)
      elif is_released and not handing_over:
        return  # `hand_over` waits for this lock, and then restores the memory.
      elif weights and handing_over:
        await self._load_while_alive(
          server, server.load(weights, lent=is_released)
        )
      elif weights:
        difference = await self._weights_difference(server, name, weights)
        if difference:
          self._mark_down(member, difference)
        if difference or may_be_restarted:
          await self._admit(server, weights, loads=bool(difference))
      if self.current_weights is weights:  # Otherwise newer weights follow.
        self._mark_up(member)

  async def _weights_difference(
    self, server: server_lib.Server, name: str, weights: weights_lib.Weights
  ) -> str:
    """Returns why a server does not serve weights, or "".

    Args:
      server: the server.
      name: name of the weights that it serves.
      weights: the weights that it must serve.

    Raises:
      types.EngineError: another run uses the server.
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
    """Loads weights into a server, and compares its scores with `reference`.

    Behind a router, the weights have another name until the scores are right,
    because the router may send turns to the server meanwhile.

    Args:
      server: the server, which is down.
      weights: the weights that it must serve.
      loads: whether it does not serve them yet.

    Raises:
      types.EngineError: the weights were not loaded, or the scores are wrong.
    """
    served = weights
    if loads:
      if self._router:
        served = weights._replace(name=weights_lib.hidden_name(self._run))
      await self._load_while_alive(server, server.load(served))
    reference = self.reference
    # Without a reference of these weights, the next rollout's fingerprint
    # compares the server.
    if reference and reference.sampled == weights.sampled(
      reference.sampled.version
    ):
      scores = await server.score(
        reference.token_ids,
        reference.sampled._replace(weights=served.name),
        deadline=_SCORING_SECONDS,
      )
      if why := reference.wrong(scores):
        await self._hide_replies(server, served.name)
        raise server.error(f"it {why}; start it again.")
    if served is not weights:
      await server.rename(weights.name)

  async def _hide_replies(self, server: server_lib.Server, name: str) -> None:
    """Makes the replies of a server behind a router count for nothing.

    The server's weights, called `name`, get a name that no reply may have.
    """
    hidden = weights_lib.hidden_name(self._run)
    if self._router and name != hidden:
      await server.rename(hidden)

  async def _load_while_alive(
    self, server: server_lib.Server, load: Coroutine[Any, Any, None]
  ) -> None:
    """Waits for a load, as long as the server answers other requests.

    A load may take minutes. A server that dies meanwhile is found when it no
    longer answers, not only at the load's own deadline.

    Raises:
      server.UnansweredError: the server stopped answering.
      types.EngineError: as `Server.load`.
    """
    task = asyncio.create_task(load)
    try:
      while not (await asyncio.wait([task], timeout=_LOADING_SECONDS))[0]:
        _log.warning("Waits for %s, which still loads weights.", server.url)
        await server.alive()
    finally:
      task.cancel()
      (failure,) = await asyncio.gather(task, return_exceptions=True)
    if failure:
      raise failure


async def _served_clause(member: Member) -> str:
  """Returns a clause with the name of the weights that a server serves."""
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
