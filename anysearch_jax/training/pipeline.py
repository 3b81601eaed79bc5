"""Sampling ahead of training, on a thread of its own.

With `async_level` n, rollout k + n is sampled with the weights that stand
before rollout k is trained on. Each rollout has one set of weights, so what is
sampled depends on the level and not on who is faster:

    n = 0   sample 0 | train 0 | sample 1 | train 1 | ...
    n = 1   sample 0 | train 0, sample 1 | train 1, sample 2 | ...

Weights wait here until they are sampled with: up to n copies beside the
engine's own, where sampling is the slower side.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from absl import logging

from anysearch_jax import types
from anysearch_jax.policy import decoder
from anysearch_jax.training import sampler as sampler_lib
from anysearch_jax.training import timeline as timeline_lib

_LOOK = 0.1  # Seconds between looks at whether to stop.
_TELL = 600.0  # Seconds between words about a rollout that is waited for.


class _Ahead(NamedTuple):
  """A rollout that is to be trained on."""

  rollout: int
  version: int
  sampled: concurrent.futures.Future


class Pipeline:
  """A sampler at work; use as a context manager, which stops it at the end.

  What the sampler raises is raised by whatever is called next here.

  Args:
    sampler: nobody else uses it meanwhile.
    ready: consecutive rollouts that are sampled already.
    first: the first of them, or the first to sample.
    rollouts: of the whole run.
    level: `pipeline.async_level`.
    timeline: is told how long each side waits for the other.
    patience: seconds that a sampler which is told to stop may take.
  """

  def __init__(
    self,
    sampler: sampler_lib.Sampler,
    ready: Iterable[sampler_lib.Sampled] = (),
    *,
    first: int,
    rollouts: int,
    level: int,
    timeline: timeline_lib.Timeline,
    patience: float = 30.0,
  ):
    self._sampler = sampler
    self._timeline = timeline
    self._patience = patience
    self._end, self._level = rollouts, level
    self._ahead: deque[_Ahead] = deque()
    for sampled in ready:
      future = concurrent.futures.Future()
      future.set_result(sampled)
      self._ahead.append(_Ahead(sampled.rollout, first - 1, future))
    self._next = first + len(self._ahead)
    self._published = 0  # The version that an engine begins with.
    # With the weights to sample it with, None where the engine has them by
    # then. None instead of a job is the end.
    self._jobs: queue.SimpleQueue[
      tuple[_Ahead, decoder.Params | None] | None
    ] = queue.SimpleQueue()
    # A daemon, so that one which hangs in a device does not hold the process.
    self._thread = threading.Thread(
      target=self._work, name="sampler", daemon=True
    )

  def fill(self, version: int, published: Callable[[], decoder.Params]) -> None:
    """Has all rollouts sampled that this version of the weights may sample.

    Args:
      version: rollouts that were trained on.
      published: gives these weights; called where the engine needs them.
    """
    end = min(version + self._level + 1, self._end)
    if self._next >= end:
      return
    params = None
    if version != self._published:
      with self._timeline.span(self._next, timeline_lib.TRAINER, "sync"):
        params, self._published = published(), version
    for rollout in range(self._next, end):
      ahead = _Ahead(rollout, version, concurrent.futures.Future())
      self._ahead.append(ahead)
      self._jobs.put((ahead, params))
      params = None
    self._next = end

  def take(
    self, stopping: threading.Event | None = None
  ) -> sampler_lib.Sampled | None:
    """The next rollout, as soon as it is sampled.

    None if `stopping` is set before that; it stays the next one then.
    """
    sampled = self._wait(self._ahead[0], stopping)
    if sampled is not None:
      self._ahead.popleft()
    return sampled

  def sampled_before(self, version: int) -> list[sampler_lib.Sampled]:
    """The rollouts ahead that older weights sample, once they are sampled.

    They end before one that an outage prevented; `take` raises it.
    """
    found = []
    with contextlib.suppress(types.EngineError):
      for ahead in self._ahead:
        if ahead.version < version:
          found.append(self._wait(ahead))
    return found

  def check(self) -> None:
    """Raises what the sampler has raised, if it has, except an outage.

    `take` raises an outage, after the rollout in training is finished.
    """
    with contextlib.suppress(types.EngineError):
      for ahead in self._ahead:
        if ahead.sampled.done():
          ahead.sampled.result(timeout=0)

  def __enter__(self) -> Pipeline:
    self._thread.start()
    return self

  def __exit__(self, *unused) -> None:
    self._jobs.put(None)
    self._sampler.stop()
    self._thread.join(self._patience)
    if self._thread.is_alive():
      logging.warning(
        "The sampler was told to stop and still runs after %g seconds; it is "
        "left behind.",
        self._patience,
      )

  def _wait(
    self, ahead: _Ahead, stopping: threading.Event | None = None
  ) -> sampler_lib.Sampled | None:
    """The rollout once it is sampled; None if `stopping` is set before that.

    The deadlines of turns and searches bound it; it tells of itself meanwhile.
    """
    clock, sampled = self._timeline.clock, ahead.sampled
    start = told = clock()
    with self._timeline.span(ahead.rollout, timeline_lib.TRAINER, "idle"):
      while not sampled.done():
        if stopping is not None and stopping.is_set():
          return None
        concurrent.futures.wait([sampled], timeout=_LOOK)
        if not self._thread.is_alive() and not sampled.done():
          raise RuntimeError(
            f"Nobody samples rollout {ahead.rollout} any more."
          )
        if clock() - told >= _TELL:
          told = clock()
          logging.warning(
            "Training waits for rollout %d to be sampled, for %.0f seconds so "
            "far.",
            ahead.rollout,
            told - start,
          )
    return sampled.result(timeout=0)

  def _work(self) -> None:
    while self._sample_one():
      pass

  def _sample_one(self) -> bool:
    """Waits for a job and does it; False at the end and after a failure."""
    start = self._timeline.clock()
    job = self._jobs.get()
    if job is None:
      return False
    (rollout, version, sampled), params = job
    self._timeline.add(
      rollout, timeline_lib.SAMPLER, "idle", start, self._timeline.clock()
    )
    try:
      if params is not None:
        self._sampler.set_params(rollout, params, version)
      # While the engine samples, it alone holds its weights.
      del job, params
      sampled.set_result(self._sampler.sample(rollout))
    except BaseException as error:  # Raised again where the rollout is taken.
      sampled.set_exception(error)
      return False
    return True
