"""The trainers' side of a controller: what `pipeline` is to one process.

The first process talks to the controller, one request at a time, and shares the
answers with the others (`host/processes`). All of that happens in the threads
that train, so all processes start their collectives in the same order, and
training can overlap with the controller's sampling at any `async_level`.

A request that has no answer is repeated. If the controller was restarted, it is
begun again with the state after the last rollout that arrived here, and gets
the versions of the weights that the next rollouts need: their folders remain
until then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import disk, processes, redaction
from anysearch_jax.policy import hf
from anysearch_jax.training import collection, messages, sampler
from anysearch_jax.training import timeline as timeline_lib

T = TypeVar("T")

# Seconds that the first process waits before it looks at the others again.
_ROUND = 2.0
_CONNECT, _ANSWER = 10.0, 600.0
_PAUSE = 0.2
_BEAT = 2.0
_FAREWELLS = 3  # Tries to tell the controller of the end.


class AwayError(types.EngineError):
  """The controller was away for longer than this run waits."""


@dataclasses.dataclass(eq=False, kw_only=True, repr=False)
class Client:
  """Asks a controller; only the first process does.

  Attributes:
    url: of the controller.
    key: shared secret, "" if it needs none.
    identity: plain values that the controller must have too.
    away: seconds without an answer after which it raises `AwayError`.
    transport: replaces the network, for tests.

  `session` names this client to the controller.
  """

  url: str
  key: str = ""
  identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  away: float = 1800.0
  transport: Any = None
  clock: Callable[[], float] = time.monotonic

  def __post_init__(self):
    import httpx2  # Runs in one process need no HTTP.

    self._timeout = functools.partial(httpx2.Timeout, connect=_CONNECT)
    self._error = httpx2.HTTPError
    self.session = secrets.token_hex(8)
    self._redact = redaction.Redactor(self.key)
    # When it last answered, and what was met since then.
    self._answered, self._met = self.clock(), ""
    headers = {"Content-Type": "application/octet-stream"}
    if self.key:
      headers["Authorization"] = f"Bearer {self.key}"
    self._http = httpx2.Client(
      headers=headers,
      follow_redirects=False,
      timeout=self._timeout(_ANSWER),
      trust_env=False,
      transport=self.transport,
    )

  def waits(self) -> str:
    """Returns what the run waits for; "" if the controller answers."""
    if not self._met:
      return ""
    silent = self.clock() - self._answered
    return (
      f"waits for the controller, {silent:.0f} of {self.away:.0f} s so far: "
      f"{self._met}"
    )

  def ask(self, route: str, **values: Any) -> Any:
    """Makes one request; None: no answer yet.

    Raises:
      AwayError: there was no answer for too long.
      messages.NotBegunError: the controller does not know this session.
      messages.RefusedError: it refuses the request.
      Exception: what its sampler met.
    """
    found, met = self._try(route, values)
    if not met:
      self._answered, self._met = self.clock(), ""
      return found
    if not self._met:  # It may have been asked nothing for long.
      self._answered = self.clock()
    self._met = met
    if self.clock() - self._answered > self.away:
      raise AwayError(
        f"{self.url}: found no controller for {self.away:.0f} seconds (--away),"
        f" the last met {met}. Start it and the same command again; it resumes."
      )
    time.sleep(_PAUSE)
    return None

  def beat(self, grace: float) -> bool:
    """Gives a sign of life; returns whether the run should stop."""
    values = {"session": self.session, "grace": grace}
    found, _ = self._try("beat", values, seconds=_CONNECT)
    return bool(found) and found["stopping"]

  def end(self, *, finished: bool) -> None:
    """Tells the controller of the end, if it still answers."""
    values = {"session": self.session, "finished": finished}
    for _ in range(_FAREWELLS):
      with contextlib.suppress(Exception):
        if not self._try("end", values, seconds=_CONNECT)[1]:
          return
      time.sleep(_PAUSE)

  def _try(
    self, route: str, values: Mapping[str, Any], seconds: float = _ANSWER
  ) -> tuple[Any, str]:
    """Returns an answer, or what was met instead."""
    try:
      response = self._http.post(
        f"{self.url}/{route}",
        content=processes.encode(dict(values)),
        timeout=self._timeout(seconds),
      )
    except self._error as error:  # Holds the request, and so the key.
      met = self._redact.quote(str(error), 200)
      return None, f"{type(error).__name__}: {met}".rstrip(": ")
    status, content = response.status_code, response.content
    if status == 204:
      return None, ""
    if status == 200:
      try:
        found, told = processes.decode(content)
      except ValueError as error:
        return None, str(error)
      if told is not None:
        raise processes.error_of(told)
      return found, ""
    said = self._redact.quote(content.decode(errors="replace"), 1000)
    if status == 410:
      raise messages.NotBegunError
    if status // 100 == 4 and status != 408:
      raise messages.RefusedError(f"{self.url}: {said}")
    return None, f"HTTP {status}: {said}"


class _Queued(NamedTuple):
  """A rollout that was not taken yet; `version` is of its weights."""

  rollout: int
  version: int


class Remote:
  """`pipeline.Pipeline` over a controller; use as a context manager.

  It begins with the first `fill`.

  Args:
    client: of the controller.
    stream: the questions of the run.
    config: of the run.
    policy: with the trained architecture; its weights are not used.
    folder: for published weights, which all processes and the controller see.
    first, state, stored: the first rollout to train on, the state of sampling
      before it, and the rollouts from it on that are sampled already.
    timeline: gets the spans of the controller's rollouts too.
    stopping: whether the run should stop; it ends a wait.
    stop: makes the run stop, because the controller does.
    stop_seconds: returns how long that may take.
  """

  def __init__(
    self,
    client: Client,
    stream: collection.QuestionStream,
    *,
    config: config_lib.ExperimentConfig,
    policy: hf.Policy,
    folder: pathlib.Path,
    first: int,
    state: sampler.SamplerState,
    stored: collection.StoredRollouts | None,
    timeline: timeline_lib.Timeline,
    stopping: Callable[[], bool],
    stop: Callable[[], None],
    stop_seconds: Callable[[], float],
  ):
    self._client, self._stream, self._config = client, stream, config
    self._policy, self._folder, self._timeline = policy, folder, timeline
    self._stopping, self._stop = stopping, stop
    self._stop_seconds = stop_seconds
    self._level = config.pipeline.async_level
    self._end = config.curriculum.rollouts
    self._queue: deque[_Queued] = deque()
    self._fetched: dict[int, sampler.ScoredRollout] = {}
    # With what the controller begins.
    self._first, self._state, self._stored = first, state, stored
    self._next = first
    self._begun = False
    # Of each published version, the scores that the fingerprint expects.
    self._scores: dict[int, np.ndarray] = {}
    # Of the first process: what the controller lacks.
    self._lacks_begin, self._lacks = True, list[int]()
    self._serial = 0
    self._ready: int | None = None
    self._over = threading.Event()
    self._beats = threading.Thread(target=self._beat, daemon=True)

  def fill(
    self,
    version: int,
    published: Callable[[], sampler.Weights],
    before: Callable[[int], None] = lambda rollout: None,
  ) -> None:
    """Publishes a version, if it samples a rollout; see `Pipeline.fill`.

    `published` returns `sampler.HandedOver`. All processes call this together.
    """
    if not self._begun and not self._begin():
      return
    end = min(version + self._level + 1, self._end)
    if self._next >= end:
      return
    with self._timeline.span(self._next, timeline_lib.TRAINER, "sync"):
      weights = published()
      assert isinstance(weights, sampler.HandedOver)
      self._write(version, weights.params)
      self._scores[version] = weights.scores
    before(self._next)
    for rollout in range(self._next, end):
      self._queue.append(_Queued(rollout, version))
    self._next = end
    self._lacks.append(version)
    # If the run stops before, `take` does so too.
    self._together(lambda: self._caught_up() or None, heeds=True)

  def take(
    self, gives_up: Callable[[], bool] = lambda: False
  ) -> sampler.ScoredRollout | None:
    """Waits for the next rollout, removes it from the queue and returns it.

    Returns None if a process should stop before. All processes call this
    together.
    """
    if not self._queue or not self._fetch(self._queue[0], heeds=True):
      return None
    return self._fetched.pop(self._queue.popleft().rollout)

  def sampled_before(self, version: int) -> list[sampler.ScoredRollout]:
    """Waits for queued rollouts of older weights; see `Pipeline`."""
    found = []
    with contextlib.suppress(types.EngineError):
      for queued in self._queue:
        if queued.version < version:
          self._fetch(queued)
          found.append(self._fetched[queued.rollout])
    return found

  def check(self) -> None:
    """Does nothing: `take` raises what the controller met."""

  def __enter__(self) -> Remote:
    def begin() -> None:
      path = self._folder / messages.SESSION
      with disk.translate_errors(path):
        self._folder.mkdir(parents=True, exist_ok=True)
        disk.write_whole(path, self._client.session)
      self._beats.start()

    processes.on_main(begin)
    return self

  def __exit__(self, *unused: Any) -> None:
    self._over.set()

  def _begin(self) -> bool:
    """Begins the controller; returns False if the run should stop."""

    def begin() -> list[int] | None:
      return [self._ready or 0] if self._caught_up() else None

    found = self._together(begin, heeds=True)
    if found is None:
      return False
    self._begun, ready = True, found[0]
    first, self._next = self._first, self._first + ready
    self._queue.extend(_Queued(k, first - 1) for k in range(first, self._next))
    for queued in self._queue:
      self._fetch(queued)
    return True

  def _write(self, version: int, params: Any) -> None:
    """Writes a version, and removes those that no rollout needs any more."""
    path, config = self._folder / str(version), self._config
    policy = self._policy._replace(params=params)
    with disk.translate_errors(path):
      if config.engine.kind == "jax":
        hf.save_weights(path, policy)
      else:
        hf.save(path, policy, dtype=config.compute_dtype)
    # The engine has the one before until it has loaded this one.
    oldest = min([version, *(queued.version for queued in self._queue)]) - 1
    for old in [v for v in self._scores if v < oldest]:
      del self._scores[old]
    if processes.is_main():
      for folder in self._folder.glob("[0-9]*"):
        if folder.name.isdigit() and not oldest <= int(folder.name) <= version:
          shutil.rmtree(folder, ignore_errors=True)

  def _fetch(self, queued: _Queued, heeds: bool = False) -> bool:
    """Brings a rollout here; returns False if the run should stop."""
    rollout = queued.rollout
    if rollout in self._fetched:
      return True

    def ask() -> dict[str, Any] | None:
      if not self._caught_up():
        return None
      return self._ask("rollout", rollout=rollout, seconds=_ROUND)

    with self._timeline.span(rollout, timeline_lib.TRAINER, "idle"):
      values = self._together(ask, heeds=heeds)
    if values is None:
      return False
    found = messages.rollout_of(values, self._stream, self._timeline)
    self._fetched[rollout] = found
    if rollout + 1 >= self._first + (self._ready or 0):
      # What is ready belongs to one begin; after it each rollout may be a base.
      self._first, self._state, self._stored = rollout + 1, found.state, None
      self._ready = None
    return True

  def _together(
    self, ask: Callable[[], T | None], heeds: bool = False
  ) -> T | None:
    """Asks in the first process until there is an answer, for all processes.

    Each round is short, so no process waits long in a collective. If it
    `heeds`, it returns None as soon as a process should stop.
    """
    while not (heeds and any(processes.all_gather(self._stopping))):
      if (found := processes.on_main(ask)) is not None:
        return found
    return None

  def _caught_up(self) -> bool:
    """Gives the controller what it lacks; returns whether it has all."""
    if self._lacks_begin:
      stored = self._stored and self._stored._asdict()
      found = self._client.ask(
        "begin",
        session=self._client.session,
        serial=self._serial,
        identity=dict(self._client.identity),
        first=self._first,
        state=messages.state_values(self._state),
        stored=stored,
      )
      if found is None:
        return False
      if self._ready not in (None, found["ready"]):
        raise types.EngineError(
          f"The controller was restarted and finds {found['ready']} stored "
          f"rollouts usable, not {self._ready} as before. Run the same command "
          "again: it resumes."
        )
      self._lacks_begin, self._ready = False, found["ready"]
      waiting = {q.version for q in self._queue if q.rollout >= self._first}
      self._lacks = sorted(waiting & self._scores.keys())
    while self._lacks:
      version = self._lacks[0]
      scores = self._scores[version]
      if self._ask("publish", version=version, scores=scores) is None:
        return False
      self._lacks.remove(version)
    return True

  def _ask(self, route: str, **values: Any) -> Any:
    """Asks for something of this session; None: not now."""
    named = {"session": self._client.session, "serial": self._serial}
    try:
      return self._client.ask(route, **named, **values)
    except messages.NotBegunError:
      self._lacks_begin, self._serial = True, self._serial + 1
      return None

  def _beat(self) -> None:
    while not self._over.wait(_BEAT):
      with contextlib.suppress(Exception):  # The next one may do better.
        if self._client.beat(self._stop_seconds()):
          self._stop()
