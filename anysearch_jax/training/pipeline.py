"""Samples ahead of training, on a separate thread.

With `async_level` n, rollout k + n is sampled with the weights from before
training on rollout k (docs/rollouts.md). All tokens of a rollout come from one
version of the weights, so the samples depend on the level and not on which
thread is faster. With `partial`, the rollout that is being sampled goes on with
new weights as soon as they are there.

Published weights are kept here until the sampler needs them. If sampling is
slower than training, that is up to n copies beside the engine's own.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from absl import logging

from anysearch_jax import types
from anysearch_jax.training import sampler as sampler_lib
from anysearch_jax.training import timeline as timeline_lib

if TYPE_CHECKING:
  from anysearch_jax.training import remote

_LOOK = 0.1  # Polling interval in seconds for a stop while waiting.
_PATIENCE = 30.0  # Seconds that a stop waits for the thread.


class Ahead(NamedTuple):
  """A rollout that is queued or sampled, and not taken by training yet.

  version: of the weights that it begins with.
  """

  rollout: int
  version: int
  sampled: concurrent.futures.Future[sampler_lib.ScoredRollout]


class Pipeline:
  """Runs a sampler on its thread; use as a context manager, which stops it.

  `ready` are consecutive rollouts that are sampled already; `first` is the
  first of them, or else the first to sample. `published` is the version that
  the engine begins with, -1 if that is unknown.
  """

  def __init__(
    self,
    sampler: sampler_lib.Sampler | remote.Sampler,
    ready: Iterable[sampler_lib.ScoredRollout] = (),
    *,
    first: int,
    rollouts: int,
    level: int,
    timeline: timeline_lib.Timeline,
    published: int = 0,
    partial: bool = False,
  ):
    self._sampler = sampler
    self._timeline = timeline
    self._end, self._level = rollouts, level
    self._ahead: deque[Ahead] = deque()
    for sampled in ready:
      future: concurrent.futures.Future[sampler_lib.ScoredRollout]
      future = concurrent.futures.Future()
      future.set_result(sampled)
      self._ahead.append(Ahead(sampled.rollout, first - 1, future))
    self._next = first + len(self._ahead)
    self._published = published
    # (rollout, what hands its weights over or waits for that; None if the
    # engine has them by then). A None job ends the thread.
    self._jobs: queue.SimpleQueue[
      tuple[Ahead, Callable[[], object] | None] | None
    ] = queue.SimpleQueue()
    self._beside = concurrent.futures.ThreadPoolExecutor(1) if partial else None
    # A daemon, so that a thread that hangs in a device call does not keep the
    # process from exiting.
    self._thread = threading.Thread(
      target=self._work, name="sampler", daemon=True
    )

  def fill(
    self,
    version: int,
    published: Callable[[], sampler_lib.HandedOver],
    before: Callable[[int], None] = lambda rollout: None,
  ) -> None:
    """Queues all rollouts that this version of the weights samples.

    Version v is that after training on v rollouts. `published` returns the
    weights; it is only called if a rollout is queued and the engine does not
    have them. `before` is called after that with the first rollout.
    """
    end = min(version + self._level + 1, self._end)
    if self._next >= end:
      return
    hand_over: Callable[[], object] | None = None
    if version != self._published:
      with self._timeline.span(self._next, timeline_lib.TRAINER, "sync"):
        hand_over = functools.partial(
          self._sampler.set_params,
          *(self._next, self._handed(version, published()), version),
        )
        self._published = version
      if self._beside:
        hand_over = self._beside.submit(hand_over).result
    before(self._next)
    for rollout in range(self._next, end):
      ahead = Ahead(rollout, version, concurrent.futures.Future())
      self._ahead.append(ahead)
      self._jobs.put((ahead, hand_over))
      hand_over = None
    self._next = end

  def take(
    self, gives_up: Callable[[], bool] = lambda: False
  ) -> sampler_lib.ScoredRollout | None:
    """Waits for the next rollout, removes it from the queue and returns it.

    Returns None if `gives_up()` before it is sampled; the rollout then stays in
    the queue.
    """
    if not self._wait(self._ahead[0], gives_up):
      return None
    sampled = self._ahead[0].sampled.result(timeout=0)
    self._ahead.popleft()
    return sampled

  def sampled_before(self, version: int) -> list[sampler_lib.ScoredRollout]:
    """Waits for the queued rollouts with weights older than `version`.

    The result ends before a rollout that an outage prevented; `take` raises the
    error.
    """
    found = []
    with contextlib.suppress(types.EngineError):
      for ahead in self._ahead:
        if ahead.version < version:
          self._wait(ahead)
          found.append(ahead.sampled.result(timeout=0))
    return found

  def check(self) -> None:
    """Raises the sampler's exception, if there is one, except an outage.

    `take` raises an outage, so that the rollout in training is finished first.
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
    if self._beside:
      self._beside.shutdown(wait=False, cancel_futures=True)
    self._thread.join(_PATIENCE)
    if self._thread.is_alive():
      logging.warning(
        "The sampler's thread did not stop within %g seconds and is abandoned.",
        _PATIENCE,
      )

  def _handed(
    self, version: int, weights: sampler_lib.HandedOver
  ) -> sampler_lib.HandedOver:
    return weights

  def _wait(
    self, ahead: Ahead, gives_up: Callable[[], bool] = lambda: False
  ) -> bool:
    """Waits for a rollout; returns False if `gives_up()` before its end.

    Deadlines of turns and searches bound the wait.
    """
    with self._timeline.span(ahead.rollout, timeline_lib.TRAINER, "idle"):
      while not self._is_sampled(ahead):
        if gives_up():
          return False
        concurrent.futures.wait([ahead.sampled], timeout=_LOOK)
    return True

  def _is_sampled(self, ahead: Ahead) -> bool:
    alive = self._thread.is_alive()
    if not alive and not ahead.sampled.done():
      raise RuntimeError(
        f"The sampler's thread ended before rollout {ahead.rollout}."
      )
    return ahead.sampled.done()

  def _work(self) -> None:
    """Does jobs until the last one, or an error."""
    while True:
      start = self._timeline.clock()
      job = self._jobs.get()
      if job is None:
        return
      (rollout, _, sampled), hand_over = job
      self._timeline.add(
        rollout, timeline_lib.SAMPLER, "idle", start, self._timeline.clock()
      )
      try:
        if hand_over is not None:
          hand_over()
        # Drop these references, so that the engine can free the weights when it
        # gets new ones.
        del job, hand_over
        sampled.set_result(self._sampler.sample(rollout))
      except BaseException as error:  # Raised again where the rollout is taken.
        sampled.set_exception(error)
        return
