"""The side of a run that samples, for trainers in other processes.

A request names all that its answer follows from, so this side keeps nothing
that trainers could not give again, and every request may be repeated.

    about   what trainers ask of this side before they begin
    score   first rollout, state of sampling, stored rollouts; answers these
            with their scores, and the state after them
    sample  rollout, state of sampling before it, version of the weights,
            whether a delta is with them, scores that their fingerprint expects;
            None: it takes longer
    beat    the trainers live; answers whether they should stop
    end     the trainers have finished, or stopped

All but the first name the trainers' session, those that begin sampling also
what both sides must have in common.
"""

from __future__ import annotations

import concurrent.futures
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
from anysearch_jax.training import collection, messages, sampler
from anysearch_jax.training import timeline as timeline_lib

# Seconds until what was written on another machine is visible on this one.
_VISIBLE = 60.0
_LONGEST = 30.0  # Seconds that a request for a rollout may wait.
_PATIENCE = 30.0  # Seconds for a rollout to end that nobody wants any more.
_LOOK = 0.05
_LINGER = 2.0  # Seconds for an answer that is repeated at the end.
_SILENT = 30.0  # Seconds without a sign of trainers that a stop waits for.


class BusyError(Exception):
  """The request should be repeated; says why."""


class Controller:
  """Samples rollouts for trainers. Thread-safe.

  Args:
    make: returns a new sampler over the engine and the retriever.
    parts: engine and retriever, whose counters begin at 0 with a session.
    identity: plain values that trainers must have too.
    about: what trainers may ask of this side, plain values.
    folder: the run folder, which has the weights.
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
    timeline: timeline_lib.Timeline,
    away: float,
  ):
    self._make, self._parts = make, parts
    self._identity, self._about = identity, dict(about)
    self._folder = folder / messages.WEIGHTS
    self._timeline, self._away = timeline, away
    self._lock = threading.Lock()
    # Of the session that sampled last; the engine has weights of `_version`.
    self._session, self._sampler = "", make()
    self._version, self._loading = -1, threading.Lock()
    # The rollout that was asked for last.
    self._job: concurrent.futures.Future[dict[str, Any]] | None = None
    self._rollout = -1
    self._heard, self._grace = time.monotonic(), _SILENT
    self._stopping, self._over = threading.Event(), threading.Event()
    self._finished = self._closed = False
    self._error: Exception | None = None

  def answer(self, route: str, values: Mapping[str, Any]) -> Any:
    """Answers a request; None: not yet, ask again.

    Raises:
      messages.RefusedError: it is wrong, and would be again.
      BusyError: ask again later.
      Exception: what the sampler met, for the trainers.
    """
    self._heard = time.monotonic()
    match route:
      case "about":
        return self._about
      case "score":
        return self._score(values)
      case "sample":
        return self._sample(values)
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
    silent = time.monotonic() - self._heard
    if not self._session or silent > _SILENT:
      return f"waits for trainers, {silent:.0f} of {self._away:.0f} s so far"
    samples = self._job is not None and not self._job.done()
    return "" if samples else "waits for the trainers' weights"

  def wait(self) -> bool:
    """Waits for the end; returns whether the training has finished.

    Raises:
      messages.AwayError: trainers have been silent for too long.
      Exception: what the sampler met; the trainers have been told.
    """
    try:
      while not self._over.wait(_LOOK * 10):
        silent = time.monotonic() - self._heard
        if self._error is not None:
          time.sleep(_LINGER)
          raise self._error
        if self._stopping.is_set() and (not self._session or silent > _SILENT):
          return False
        if silent > self._away:
          raise messages.AwayError(
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

  def _score(self, values: Mapping[str, Any]) -> dict[str, Any]:
    stored = collection.StoredRollouts(**values["stored"])
    with self._lock:
      made = self._begun(values)
      ready = made.score_stored(int(values["first"]), stored)
      return {
        "rollouts": [messages.rollout_values(x, self._timeline) for x in ready],
        "state": messages.state_values(made.state),
      }

  def _sample(self, values: Mapping[str, Any]) -> dict[str, Any] | None:
    asked = values["session"], int(values["rollout"])
    with self._lock:
      job, known = self._job, asked == (self._session, self._rollout)
      if job is None or not known:
        made, known = self._begun(values), False
        self._rollout, self._job = (
          asked[1],
          (job := concurrent.futures.Future()),
        )
        # A daemon, so that a thread that hangs in a device call does not keep
        # the process from exiting.
        threading.Thread(
          target=self._work,
          args=(job, made, values),
          name="sampler",
          daemon=True,
        ).start()
      made = self._sampler
    seconds = min(float(values["seconds"]), _LONGEST)
    try:
      # Newer ones than it began with: `pipeline.partial`.
      if known and not (job.done() or self._loading.locked()):
        self._load(made, values)
      if not concurrent.futures.wait([job], seconds).done:
        return None
      return job.result()
    except sampler.StoppedError:
      raise BusyError("The controller ended this rollout.") from None
    except Exception as error:
      if not isinstance(error, messages.RefusedError):
        self._error = error
      raise

  def _work(
    self,
    job: concurrent.futures.Future[dict[str, Any]],
    made: sampler.Sampler,
    values: Mapping[str, Any],
  ) -> None:
    """Samples a rollout with the weights of a version."""
    try:
      self._load(made, values)
      sampled = made.sample(int(values["rollout"]))
      job.set_result(messages.rollout_values(sampled, self._timeline))
    except BaseException as error:  # Raised again where it is asked for.
      job.set_exception(error)

  def _load(self, made: sampler.Sampler, values: Mapping[str, Any]) -> None:
    """Loads a version, unless it is there or other trainers have begun."""
    rollout, version = int(values["rollout"]), int(values["version"])
    with self._loading:
      if version <= self._version or values["session"] != self._session:
        return
      folder = messages.published(self._folder, version, values["session"])
      newest = folder
      if not _visible(newest.exists):
        raise messages.RefusedError(
          f"{newest}: found no such file, expected the trainers' weights. "
          "Give both sides an --output that both see."
        )
      weights = sampler.HandedOver(folder, values["scores"])
      made.set_params(rollout, weights, version)
      self._version = version if values["session"] == self._session else -1

  def _begun(self, values: Mapping[str, Any]) -> sampler.Sampler:
    """Returns the sampler of a session, with the state that it names."""
    if self._closed:
      raise BusyError("The controller ends.")
    if found := messages.difference(self._identity, values["identity"]):
      raise messages.RefusedError(
        f"The trainers have {found} as the controller has; expected the same "
        "configuration and data on both sides. Start both by the same command."
      )
    if (session := values["session"]) != self._session:
      self._check_session(session)
      self._drop()
      self._session, self._sampler = session, self._make()
      logging.info("Trainers have begun with session %s.", session)
    self._sampler.state = messages.state_of(values["state"])
    return self._sampler

  def _end(self, values: Mapping[str, Any]) -> dict[str, bool]:
    with self._lock:
      if values["session"] != self._session:
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

  def _drop(self) -> None:
    """Ends sampling for the session that sampled last."""
    self._sampler.stop()
    if self._job is not None:
      if not concurrent.futures.wait([self._job], _PATIENCE).done:
        raise BusyError("The controller still ends what it sampled before.")
    self._session, self._version, self._job = "", -1, None
    for part in self._parts:
      counting.counters(part).clear()


def opened(
  config: config_lib.ExperimentConfig, retriever: types.Retriever
) -> tuple[hf.Policy, types.TrainableEngine]:
  """Returns a run's policy, without weights, and an engine for them.

  The in-process engine uses the devices of `mesh.rollout`, by default as many
  as the training mesh has, and not more than there are.

  Raises as `engines.make`, and ValueError if the policy cannot be used.
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
