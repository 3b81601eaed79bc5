"""Samples ahead of training, on a separate thread.

With `async_level` n, rollout k + n is sampled with the weights from before
training on rollout k (docs/rollouts.md). All tokens of a rollout come from one
version of the weights, so the samples depend on the level and not on which
thread is faster. With `partial`, the rollout that is being sampled continues
with new weights as soon as they are published.

With several processes, the first one drives: it alone has the sampler, whose
thread makes no collective. All processes train on the rollouts that it sampled.
If each process has an in-process engine, all of them sample, in the threads
that train.

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
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from absl import logging

from anysearch_jax import types
from anysearch_jax.host import processes
from anysearch_jax.training import sampler as sampler_lib
from anysearch_jax.training import timeline as timeline_lib

_POLL = 0.1  # Seconds between looks for a stop while waiting.
_PATIENCE = 30.0  # Seconds that a stop waits for the thread.


class QueuedRollout(NamedTuple):
  """A rollout that is queued or sampled, and not taken by training yet.

  Attributes:
    rollout: its number.
    version: of the weights that it begins with.
    sampled: gets the rollout, or the sampler's exception.
  """

  rollout: int
  version: int
  sampled: concurrent.futures.Future[sampler_lib.ScoredRollout]


class Pipeline:
  """Runs a sampler on its thread; use as a context manager, which stops it.

  All processes of a run make its calls together.

  Args:
    sampler: None in a process that samples nothing.
    ready: consecutive rollouts that are sampled already.
    first: number of the first of `ready`; without any, the first to sample.
    rollouts: number of rollouts of the run.
    level: `pipeline.async_level`.
    timeline: gets the spans of waiting and of handing over.
    partial: whether weights are handed over while the sampler samples.
    together: whether all processes have a sampler and call it together, in
      their own threads; `level` is then 0.
  """

  def __init__(
    self,
    sampler: sampler_lib.Sampler | None,
    ready: Iterable[sampler_lib.ScoredRollout] = (),
    *,
    first: int,
    rollouts: int,
    level: int,
    timeline: timeline_lib.Timeline,
    partial: bool = False,
    together: bool = False,
  ):
    self._sampler = sampler
    self._together = together
    self._timeline = timeline
    self._end = rollouts
    self._level = level
    self._queued: deque[QueuedRollout] = deque()
    for sampled in ready:
      future: concurrent.futures.Future[sampler_lib.ScoredRollout]
      future = concurrent.futures.Future()
      future.set_result(sampled)
      self._queued.append(QueuedRollout(sampled.rollout, first - 1, future))
    self._next = processes.on_main(lambda: first + len(self._queued))
    self._published = 0  # The version of the engine's weights.
    # (rollout, what hands its weights over or waits for that; None if the
    # engine has them by then). A None job ends the thread.
    self._jobs: queue.SimpleQueue[
      tuple[QueuedRollout, Callable[[], object] | None] | None
    ] = queue.SimpleQueue()
    # With `partial`, hands weights over while the sampler samples.
    self._hander = concurrent.futures.ThreadPoolExecutor(1) if partial else None
    # A daemon, so that a thread that hangs in a device call does not keep the
    # process from exiting.
    self._thread = threading.Thread(
      target=self._work, name="sampler", daemon=True
    )

  def fill(
    self,
    version: int,
    published: Callable[[], sampler_lib.HandedOver],
    prepare: Callable[[int], None] = lambda rollout: None,
  ) -> None:
    """Queues all rollouts that this version of the weights samples.

    Args:
      version: of the weights; version v is that after training on v rollouts.
      published: returns the weights; it is only called if a rollout is queued
        and the engine does not have them.
      prepare: called after that with the first rollout.
    """
    end = min(version + self._level + 1, self._end)
    if self._next >= end:
      return
    hand_over: Callable[[], object] | None = None
    if version != self._published:
      with self._timeline.span(self._next, timeline_lib.TRAINER, "sync"):
        weights = published()
        self._published = version
      if self._sampler is not None:
        hand_over = functools.partial(
          _hand_over, self._sampler, self._next, weights, version
        )
        if self._hander:
          hand_over = self._hander.submit(hand_over).result
    prepare(self._next)
    if self._sampler is not None:
      for rollout in range(self._next, end):
        queued = QueuedRollout(rollout, version, concurrent.futures.Future())
        self._queued.append(queued)
        self._jobs.put((queued, hand_over))
        hand_over = None
    self._next = end

  def wait(self, gives_up: Callable[[], bool] = lambda: False) -> bool:
    """Waits until the next rollout is sampled, in all processes.

    Deadlines of turns and searches bound the wait.

    Args:
      gives_up: returns whether this process stops waiting; then all processes
        stop.

    Returns:
      Whether the rollout is sampled; it remains in the queue.

    Raises:
      Exception: the sampler's.
    """

    def look() -> tuple[bool, bool]:
      stops = gives_up()
      return self._has_arrived(0.0 if stops else _POLL), stops

    with self._waiting():
      if self._together:
        self._play()
        return True
      while True:
        # In short rounds, so that no process waits long in a collective.
        rounds = processes.all_gather(look)
        arrived, _ = rounds[0]
        if arrived or any(stops for _, stops in rounds):
          return arrived

  def take(self) -> sampler_lib.ScoredRollout | None:
    """Removes the next rollout, for which `wait` has waited, from the queue.

    Returns:
      The rollout; None in a process that has no sampler.
    """
    if self._sampler is None:
      return None
    return self._queued.popleft().sampled.result(timeout=0)

  def sampled_before(self, version: int) -> list[sampler_lib.ScoredRollout]:
    """Waits for the queued rollouts with weights older than `version`.

    Args:
      version: of the weights.

    Returns:
      The rollouts, where there is a sampler. They end before one that an outage
      prevented; `wait` raises the error.
    """
    older = [queued for queued in self._queued if queued.version < version]
    rollouts: list[sampler_lib.ScoredRollout] = []

    def is_waiting() -> bool:
      rollouts.clear()
      with contextlib.suppress(types.EngineError):
        for queued in older:
          if not self._is_sampled(queued):
            return True
          rollouts.append(queued.sampled.result(timeout=0))
      return False

    with self._waiting():
      while processes.on_main(is_waiting):
        concurrent.futures.wait([x.sampled for x in older], timeout=_POLL)
    return rollouts

  def check(self) -> None:
    """Raises the sampler's exception, if there is one, except an outage.

    `wait` raises an outage, so that the rollout in training is finished first.
    """

    def look() -> None:
      with contextlib.suppress(types.EngineError):
        for queued in self._queued:
          if queued.sampled.done():
            queued.sampled.result(timeout=0)

    processes.on_main(look)

  def __enter__(self) -> Pipeline:
    if self._sampler is not None and not self._together:
      self._thread.start()
    return self

  def __exit__(self, *unused) -> None:
    self._jobs.put(None)
    if self._sampler is not None:
      self._sampler.stop()
    if self._hander:
      self._hander.shutdown(wait=False, cancel_futures=True)
    if self._thread.ident is not None:
      self._thread.join(_PATIENCE)
    if self._thread.is_alive():
      logging.warning(
        "The sampler's thread did not stop within %g seconds and is abandoned.",
        _PATIENCE,
      )

  @contextlib.contextmanager
  def _waiting(self) -> Iterator[None]:
    """Records that training waits for a rollout, where there is one."""
    rollout = self._queued[0].rollout if self._queued else self._next
    with self._timeline.span(rollout, timeline_lib.TRAINER, "idle"):
      yield

  def _has_arrived(self, seconds: float) -> bool:
    """Returns whether the next rollout is sampled within these seconds.

    It raises the sampler's exception. In a process without a sampler it returns
    False.
    """
    if self._sampler is None:
      return False
    queued = self._queued[0]
    if not self._is_sampled(queued):
      concurrent.futures.wait([queued.sampled], timeout=seconds)
    if not self._is_sampled(queued):
      return False
    queued.sampled.result(timeout=0)
    return True

  def _is_sampled(self, queued: QueuedRollout) -> bool:
    """Returns whether a rollout is sampled, or failed."""
    alive = self._together or self._thread.is_alive()
    if not alive and not queued.sampled.done():
      raise RuntimeError(
        f"The sampler's thread ended before rollout {queued.rollout}."
      )
    return queued.sampled.done()

  def _play(self) -> None:
    """Samples the next rollout in this thread, and raises its exception."""
    queued = self._queued[0]
    while not queued.sampled.done():
      self._run_job()
    queued.sampled.result(timeout=0)

  def _work(self) -> None:
    """Runs jobs until the last one, or an error."""
    with processes.alone():
      while self._run_job():
        pass

  def _run_job(self) -> bool:
    """Runs the next job; returns whether others may follow."""
    assert self._sampler is not None
    start = self._timeline.clock()
    job = self._jobs.get()
    if job is None:
      return False
    (rollout, _, sampled), hand_over = job
    now = self._timeline.clock()
    self._timeline.add(rollout, timeline_lib.SAMPLER, "idle", start, now)
    try:
      if hand_over is not None:
        hand_over()
      # Drop these references, so that the engine can free the weights when it
      # gets new ones.
      del job, hand_over
      sampled.set_result(self._sampler.sample(rollout))
    except BaseException as error:  # Raised again where the rollout is awaited.
      sampled.set_exception(error)
      return False
    return True


def _hand_over(
  sampler: sampler_lib.Sampler,
  rollout: int,
  weights: sampler_lib.HandedOver,
  version: int,
) -> None:
  """Gives a sampler its weights, in any thread."""
  with processes.alone():
    sampler.set_params(rollout, weights, version)
