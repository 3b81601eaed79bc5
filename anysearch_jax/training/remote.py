"""The trainers' side of a controller: its sampler, and a pipeline to share it.

The first process talks to the controller: its sampler's thread asks for one
rollout after another. The threads that train share what has arrived with the
other processes (`host/processes`), so all processes start their collectives in
the same order, and training can overlap with sampling at any `async_level`.

A request that has no answer is repeated, also to a controller that was
restarted: a version's folder remains until its rollouts have arrived.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from anysearch_jax import config as config_lib
from anysearch_jax.host import disk, processes, redaction
from anysearch_jax.policy import hf
from anysearch_jax.training import collection, messages, pipeline
from anysearch_jax.training import sampler as sampler_lib
from anysearch_jax.training import timeline as timeline_lib

_ROUND = 2.0  # Seconds that a request for a rollout may wait.
# Scores of stored rollouts take long. A rollout that has not arrived is
# answered so, after at most what a controller waits for.
_CONNECT, _ANSWER, _LATE = 10.0, 600.0, 120.0
_QUIET = 10.0  # Seconds without an answer of which it tells.
_PAUSE = 0.2
_BEAT = 2.0
_FAREWELLS = 3  # Tries to tell the controller of the end.


@dataclasses.dataclass(eq=False, kw_only=True, repr=False)
class Client:
  """Asks a controller; only the first process does. Thread-safe.

  Attributes:
    url: of the controller.
    key: shared secret, "" if it needs none.
    identity: plain values that the controller must have too.
    away: seconds without an answer after which it raises an error.
    adapts: whether the controller's servers load adapters alone.

  `session` names this client to the controller, in all processes of a run.
  """

  url: str
  key: str = ""
  identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  away: float = 1800.0
  adapts: bool = False

  def __post_init__(self):
    import httpx2  # Runs in one process need no HTTP.

    self._timeout = functools.partial(httpx2.Timeout, connect=_CONNECT)
    self._error = httpx2.HTTPError
    self.session = processes.on_main(lambda: secrets.token_hex(8))
    self._redact = redaction.Redactor(self.key)
    # When it last answered, and what was met since then.
    self._answered, self._met = time.monotonic(), ""
    self._asked = math.inf  # When, if it has not answered.
    headers = {"Content-Type": "application/octet-stream"}
    if self.key:
      headers["Authorization"] = f"Bearer {self.key}"
    self._http = httpx2.Client(
      headers=headers,
      follow_redirects=False,
      timeout=self._timeout(_ANSWER),
      trust_env=False,
    )

  def waits(self) -> str:
    """Returns what the run waits for; "" if the controller answers."""
    now, asked = time.monotonic(), self._asked
    if not self._met and now - asked < _QUIET:
      return ""
    silent = now - (self._answered if self._met else asked)
    return (
      f"waits for the controller, {silent:.0f} of {self.away:.0f} s so far: "
      f"{self._met or 'it does not answer'}"
    )

  def ask(self, route: str, **values: Any) -> Any:
    """Makes one request; None: no answer yet.

    Raises:
      messages.AwayError: there was no answer for too long.
      messages.RefusedError: it refuses the request.
      Exception: what its sampler met.
    """
    self._asked = began = time.monotonic()
    late = _LATE if route == "sample" else _ANSWER
    found, met = self._try(route, values, seconds=late)
    self._asked = math.inf
    if not met:
      self._answered, self._met = time.monotonic(), ""
      return found
    if not self._met:  # It may have been asked nothing for long.
      self._answered = began
    self._met = met
    if time.monotonic() - self._answered > self.away:
      raise messages.AwayError(
        f"{self.url}: found no controller for {self.away:.0f} seconds (--away),"
        f" the last met {met}. Start it and the same command again; it resumes."
      )
    time.sleep(_PAUSE)
    return None

  @contextlib.contextmanager
  def begun(
    self,
    folder: pathlib.Path,
    stop: Callable[[], None],
    stop_seconds: Callable[[], float],
  ) -> Iterator[None]:
    """Gives signs of life inside; all processes of the run call it together.

    Args:
      folder: for published weights, which all of them and the controller see.
      stop: makes the run stop, because the controller does.
      stop_seconds: returns how long that may take.
    """
    over = threading.Event()

    def beat() -> None:
      while not over.wait(_BEAT):
        with contextlib.suppress(Exception):  # The next one may do better.
          values = {"grace": stop_seconds()}
          found, _ = self._try("beat", values, seconds=_CONNECT)
          if found and found["stopping"]:
            stop()

    def begin() -> None:
      path = folder / messages.SESSION
      with disk.translate_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        disk.write_whole(path, self.session)
      threading.Thread(target=beat, daemon=True).start()

    processes.on_main(begin)
    try:
      yield
    finally:
      over.set()

  def end(self, *, finished: bool) -> None:
    """Tells the controller of the end, if it still answers."""
    values = {"finished": finished}
    for _ in range(_FAREWELLS):
      with contextlib.suppress(Exception):
        if not self._try("end", values, seconds=_CONNECT)[1]:
          return
      time.sleep(_PAUSE)

  def _try(
    self, route: str, values: Mapping[str, Any], seconds: float = _ANSWER
  ) -> tuple[Any, str]:
    """Returns an answer, or what was met instead."""
    common = {"session": self.session, "identity": dict(self.identity)}
    try:
      response = self._http.post(
        f"{self.url}/{route}",
        content=processes.encode(common | dict(values)),
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
    if status // 100 == 4 and status != 408:
      raise messages.RefusedError(f"{self.url}: {said}")
    return None, f"HTTP {status}: {said}"


class Sampler:
  """Stands for the controller's sampler, see `sampler.Sampler`.

  Args:
    client: of the controller.
    stream: the questions of the run.
    timeline: gets the spans of the controller's rollouts too.
    stopping: whether the run should stop; it ends the wait for stored rollouts.

  state: the state of sampling before the next rollout.
  arrived: in the first of several processes, rollouts that are to be shared.
  """

  state: sampler_lib.SamplerState

  def __init__(
    self,
    client: Client,
    stream: collection.QuestionStream,
    *,
    timeline: timeline_lib.Timeline,
    stopping: Callable[[], bool],
  ):
    self._client, self._stopping = client, stopping
    self.adapts, self.session = client.adapts, client.session
    self.restored = functools.partial(
      messages.rollout_of, stream=stream, timeline=timeline
    )
    self.arrived: dict[int, dict[str, Any]] = {}
    self._weights: dict[str, Any] = {}
    self._stopped = threading.Event()

  def set_params(
    self, rollout: int, weights: sampler_lib.HandedOver, version: int
  ) -> None:
    """Notes the weights that sample from `rollout` on; they are published."""
    assert isinstance(weights.params, pathlib.Path)
    self._weights = {
      "version": version,
      "scores": weights.scores,
    }

  def sample(self, rollout: int) -> sampler_lib.ScoredRollout:
    """Waits for the next rollout; raises as `Client.ask` does."""
    state, values = messages.state_values(self.state), None
    while values is None:
      if self._stopped.is_set():
        raise sampler_lib.StoppedError("The sampler was stopped.")
      values = self._client.ask(
        "sample", rollout=rollout, state=state, seconds=_ROUND, **self._weights
      )
    found = self.restored(values)
    if jax.process_count() > 1:
      self.arrived[rollout] = values
    self.state = found.state
    return found

  def score_stored(
    self, first: int, packed: collection.StoredRollouts
  ) -> list[sampler_lib.ScoredRollout]:
    """Scores stored rollouts; all processes call this together.

    Nothing is scored if a process should stop before.
    """
    state, stored = messages.state_values(self.state), packed._asdict()

    def ask() -> dict[str, Any] | None:
      return self._client.ask("score", first=first, state=state, stored=stored)

    while not any(processes.all_gather(self._stopping)):
      if (found := processes.on_main(ask)) is not None:
        self.state = messages.state_of(found["state"])
        return [self.restored(values) for values in found["rollouts"]]
    return []

  def stop(self) -> None:
    """Ends `sample`."""
    self._stopped.set()


class Pipeline(pipeline.Pipeline):
  """A pipeline whose calls all processes make together, each with its results.

  Args:
    sampler, ready, first, timeline: as for `pipeline.Pipeline`.
    config: of the run.
    policy: with the trained architecture; its weights are not used.
    folder: for published weights, which all processes and the controller see.
  """

  def __init__(
    self,
    sampler: Sampler,
    ready: Iterable[sampler_lib.ScoredRollout],
    *,
    config: config_lib.ExperimentConfig,
    policy: hf.Policy,
    folder: pathlib.Path,
    **settings: Any,
  ):
    super().__init__(sampler, ready, published=-1, **settings)
    self._remote, self._config = sampler, config
    self._policy, self._folder = policy, folder

  def check(self) -> None:
    """Raises in all processes what the first one's sampler met."""
    processes.on_main(super().check)

  def __enter__(self) -> Pipeline:
    if processes.is_main():
      super().__enter__()
    return self

  def __exit__(self, *unused: Any) -> None:
    if processes.is_main():
      super().__exit__()

  def _wait(
    self, ahead: pipeline.Ahead, gives_up: Callable[[], bool] = lambda: False
  ) -> bool:
    return super()._wait(ahead, lambda: any(processes.all_gather(gives_up)))

  def _is_sampled(self, ahead: pipeline.Ahead) -> bool:
    """Shares a rollout when it has arrived, or its error."""
    is_sampled = super()._is_sampled

    def arrived() -> list[dict[str, Any]]:
      if not is_sampled(ahead):
        return []
      ahead.sampled.result(timeout=0)
      return [self._remote.arrived.pop(ahead.rollout, {})]

    found = processes.on_main(arrived)
    if found and not ahead.sampled.done():
      ahead.sampled.set_result(self._remote.restored(found[0]))
    return bool(found)

  def _handed(
    self, version: int, weights: sampler_lib.HandedOver
  ) -> sampler_lib.HandedOver:
    """Writes a version, and removes those that no rollout needs any more."""
    # Runs without a controller may need neither.
    from anysearch_jax.rollout.servers import weights as weights_lib

    assert not isinstance(weights.params, pathlib.Path)
    config, session = self._config, self._remote.session
    path = messages.published(self._folder, version, session)
    policy = self._policy._replace(params=weights.params)
    with disk.translate_errors(path):
      if config.engine.kind == "jax":
        hf.save_weights(path, policy)
      elif self._remote.adapts:
        base, dtype = config.policy, config.compute_dtype
        hf.save_adapter(path, policy, base=base, dtype=dtype)
      else:
        hf.save(path, policy, dtype=config.compute_dtype)
    # The engine has the ones before until it has loaded this one.
    held = weights_lib.held_adapters(config.pipeline.async_level)
    oldest = min([version, *(ahead.version for ahead in self._ahead)])
    oldest -= held if self._remote.adapts else 1
    if processes.is_main():
      for folder in self._folder.glob("[0-9]*-*"):
        if not oldest <= int(folder.name.partition("-")[0]) <= version:
          shutil.rmtree(folder, ignore_errors=True)
    return weights._replace(params=path)
