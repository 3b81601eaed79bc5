"""The side of a run that samples, for trainers in other processes.

Trainers begin a controller with the state of sampling before a rollout, publish
versions of the weights as folders that both sides see, and ask for rollouts.
Every request may be repeated: a trainer does so if it has no answer. A request
names the trainers' session and how often they have begun; a controller that was
restarted does not know it and is begun again. So nothing is kept here that
trainers could not give again:

    begin    identity, first rollout, state of sampling, stored rollouts
    publish  version (in its folder), expected scores of the fingerprint
    rollout  number; answered when it is sampled, None if that takes longer
    beat     the trainers live; answers whether they should stop
    end      the trainers have finished, or stopped
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import counting
from anysearch_jax.policy import hf, lora, sharding
from anysearch_jax.rollout import engines, searching
from anysearch_jax.training import collection, messages, pipeline, sampler
from anysearch_jax.training import timeline as timeline_lib

# Seconds until what was written on another machine is visible on this one.
_VISIBLE = 60.0
_LONGEST = 30.0  # Seconds that a request for a rollout may wait.
_LOOK = 0.05
_LINGER = 2.0  # Seconds for an answer that is repeated at the end.
_SILENT = 30.0  # Seconds without a sign of trainers that a stop waits for.


class BusyError(Exception):
  """The request should be repeated; says why."""


class AwayError(RuntimeError):
  """No trainers have been heard of for too long."""


class Controller:
  """Samples rollouts for trainers. Thread-safe.

  Args:
    make: returns a new sampler over the engine and the retriever.
    parts: engine and retriever, whose counters begin at 0 with a session.
    identity: plain values that trainers must have too.
    about: what trainers may ask of this side, plain values.
    folder: the run folder, which has the weights.
    rollouts, level: of the run, see `pipeline.Pipeline`.
    timeline: of the samplers.
    away: seconds that trainers may be silent.
  """

  def __init__(
    self,
    make: Callable[[], sampler.Sampler],
    *,
    parts: tuple[object, ...],
    identity: Mapping[str, Any],
    about: Mapping[str, Any],
    folder: pathlib.Path,
    rollouts: int,
    level: int,
    timeline: timeline_lib.Timeline,
    away: float,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._make, self._parts = make, parts
    self._identity, self._about = identity, dict(about)
    self._folder = folder / messages.WEIGHTS
    self._rollouts, self._level = rollouts, level
    self._timeline, self._away, self._clock = timeline, away, clock
    self._lock, self._fetching = threading.RLock(), threading.Lock()
    # (session, how often it has begun); None before the first begin.
    self._begun: tuple[str, int] | None = None
    self._ready = 0
    self._pipeline: pipeline.Pipeline | None = None
    self._next = 0  # The rollout to take from the pipeline next.
    self._given: dict[int, dict[str, Any]] = {}
    self._heard, self._grace = clock(), _SILENT
    self._stopping, self._over = threading.Event(), threading.Event()
    self._finished = self._closed = False
    self._error: Exception | None = None

  def answer(self, route: str, values: Mapping[str, Any]) -> Any:
    """Answers a request; None: not yet, ask again.

    Raises:
      messages.RefusedError: it is wrong, and would be again.
      messages.NotBegunError: begin first.
      BusyError: ask again later.
      Exception: what the sampler met, for the trainers.
    """
    self._heard = self._clock()
    match route:
      case "about":
        return self._about
      case "begin":
        return self._begin(values)
      case "publish":
        return self._publish(values)
      case "rollout":
        return self._rollout(values)
      case "beat":
        self._grace = values["grace"]
        return {"stopping": self._stopping.is_set()}
      case "end":
        return self._end(values)
    raise messages.RefusedError(f"Found the request {route!r}; there is none.")

  def stop(self) -> None:
    """Tells the trainers to save and stop; `wait` then returns."""
    self._stopping.set()

  def stop_seconds(self) -> float:
    """Returns the seconds that a stop may take."""
    return self._grace + _SILENT

  def said(self) -> str:
    """Returns what this waits for; "" if it samples."""
    silent = self._clock() - self._heard
    if self._begun is None or silent > _SILENT:
      return f"waits for trainers, {silent:.0f} of {self._away:.0f} s so far"
    queued = self._pipeline and self._pipeline.queued
    return "" if queued else "waits for the trainers' weights"

  @property
  def sampled(self) -> int:
    """The number of the rollout that trainers ask for next."""
    return self._next

  def wait(self) -> bool:
    """Waits for the end; returns whether the training has finished.

    Raises:
      AwayError: trainers have been silent for too long.
      Exception: what the sampler met; the trainers have been told.
    """
    try:
      while not self._over.wait(_LOOK * 10):
        silent = self._clock() - self._heard
        if self._error is not None:
          time.sleep(_LINGER)
          raise self._error
        if self._stopping.is_set() and (not self._begun or silent > _SILENT):
          return False
        if silent > self._away:
          raise AwayError(
            f"Heard nothing of trainers for {silent:.0f} seconds (--away). "
            "Start them and this command again; they resume."
          )
      time.sleep(_LINGER)
      return self._finished
    finally:
      self.close()

  def close(self) -> None:
    """Ends sampling; nobody can begin it again."""
    with self._lock:
      self._closed = True
      with contextlib.suppress(BusyError):
        self._drop()

  def _begin(self, values: Mapping[str, Any]) -> dict[str, int]:
    token = str(values["session"]), int(values["serial"])
    with self._lock:
      if self._closed:
        raise BusyError("The controller ends.")
      if self._begun == token:
        return {"ready": self._ready}
      if found := messages.difference(self._identity, values["identity"]):
        raise messages.RefusedError(
          f"The trainers have {found} as the controller has; expected the "
          "same configuration and data on both sides. Start both by the same "
          "command."
        )
      self._check_session(token[0])
      self._drop()
      made, stored = self._make(), values["stored"]
      made.state = messages.state_of(values["state"])
      first, ready = int(values["first"]), []
      if stored is not None:
        ready = made.score_stored(first, collection.StoredRollouts(**stored))
      self._pipeline = pipeline.Pipeline(
        made,
        ready,
        first=first,
        rollouts=self._rollouts,
        level=self._level,
        timeline=self._timeline,
        published=-1,
      )
      self._pipeline.__enter__()
      self._next, self._given, self._ready = first, {}, len(ready)
      self._begun = token
      logging.info("Trainers have begun at rollout %d.", first)
      return {"ready": self._ready}

  def _publish(self, values: Mapping[str, Any]) -> dict[str, int]:
    version, folder = int(values["version"]), self._folder
    with self._lock:
      ahead = self._pipeline_of(values)
      if not _visible((folder / str(version)).is_dir):
        raise messages.RefusedError(
          f"{folder / str(version)}: found no such folder, expected the "
          "trainers' weights. Give both sides an --output that both see."
        )

      def weights() -> sampler.HandedOver:
        return sampler.HandedOver(folder / str(version), values["scores"])

      ahead.fill(version, weights)
    return {"version": version}

  def _rollout(self, values: Mapping[str, Any]) -> dict[str, Any] | None:
    ahead, rollout = self._pipeline_of(values), int(values["rollout"])
    end = self._clock() + min(float(values["seconds"]), _LONGEST)

    def gives_up() -> bool:
      return self._clock() > end or self._pipeline is not ahead

    with self._fetching:
      while self._next <= rollout:
        if gives_up():
          self._pipeline_of(values)
          return None
        if not ahead.queued:
          time.sleep(_LOOK)
          continue
        try:
          sampled = ahead.take(gives_up)
        except sampler.StoppedError:
          raise messages.NotBegunError from None
        except Exception as error:
          self._error = error
          raise
        if sampled is not None:
          self._given = {
            self._next: messages.rollout_values(sampled, self._timeline)
          }
          self._next += 1
      self._pipeline_of(values)
      if rollout not in self._given:
        raise messages.RefusedError(
          f"Found a request for rollout {rollout}, expected "
          f"{self._next - 1} or a later one: earlier ones were given. Start "
          "the trainers again."
        )
      return self._given[rollout]

  def _end(self, values: Mapping[str, Any]) -> dict[str, bool]:
    with self._lock:
      if self._begun is None or self._begun[0] != values["session"]:
        # Trainers that found nothing left to train have begun nothing.
        self._check_session(values["session"])
      self._finished = bool(values["finished"])
    self._over.set()
    return {"finished": self._finished}

  def _check_session(self, session: str) -> None:
    """Refuses trainers that write elsewhere, or that others have replaced."""
    path = self._folder / messages.SESSION
    if not _visible(lambda: path.is_file() and path.read_text() == session):
      raise messages.RefusedError(
        f"{path}: found no session {session} in it; expected that of the "
        "trainers. Give both sides an --output that both see, and start one "
        "set of trainers."
      )

  def _pipeline_of(self, values: Mapping[str, Any]) -> pipeline.Pipeline:
    begun, ahead = self._begun, self._pipeline
    if ahead is None or begun != (values["session"], values["serial"]):
      raise messages.NotBegunError
    return ahead

  def _drop(self) -> None:
    """Ends sampling for the trainers that began last."""
    ahead, self._pipeline, self._begun = self._pipeline, None, None
    if ahead is not None:
      ahead.__exit__(None, None, None)
      if not ahead.ended:
        self._pipeline = ahead
        raise BusyError("The controller still ends what it sampled before.")
    for part in self._parts:
      counting.counters(part).clear()


def opened(
  config: config_lib.ExperimentConfig, retriever: types.Retriever
) -> tuple[hf.Policy, types.TrainableEngine]:
  """Returns a run's policy, without weights, and an engine for them.

  The in-process engine uses the devices of `mesh.rollout`, by default as many
  as the training mesh has, and not more than there are.

  Raises:
    types.EngineError: a server is unavailable or cannot be used.
    ValueError: the policy or the configuration cannot be used.
  """
  a, codec = hf.describe(config.policy)
  a = lora.attach(a, config.lora)
  policy = hf.Policy({}, a, codec, pathlib.Path(config.policy))
  first = policy
  if config.engine.kind == "jax":
    m = config.mesh
    count = min(m.size, jax.local_device_count())
    m = dataclasses.replace(m, rollout=m.rollout or tuple(range(count)))
    config = dataclasses.replace(config, mesh=m)
    mesh = sharding.rollout_mesh(m, a)
    dtype = lora.base_dtype(config.lora) if a.lora else config.compute_dtype
    params = hf.load(config.policy, mesh=mesh, dtype=dtype).params
    if a.lora is not None:
      params = lora.combine(params, lora.initialize(a, config.seed))
      params = jax.device_put(params, sharding.shardings(a, mesh))
    first = policy._replace(params=params)
  engine = engines.make(first, config, seed=config.seed)
  searching.attach(retriever, engine, codec)
  return policy, engine


def _visible(there: Callable[[], bool]) -> bool:
  """Waits until something is on the shared disk; returns whether it is."""
  end = time.monotonic() + _VISIBLE
  while not there():
    if time.monotonic() > end:
      return False
    time.sleep(_LOOK)
  return True
