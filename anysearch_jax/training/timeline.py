"""Records where a run's time goes: spans on tracks, and their totals.

Any thread records spans. A span belongs to a rollout, after which it is removed
and summed into metrics. While JAX's profiler runs, its trace has the spans too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax

# The spans of one of these tracks never overlap.
TRAINER = "trainer"
SAMPLER = "sampler"
# The spans of one of these do.
TURNS = "turns"
SEARCHES = "searches"
WEIGHTS = "weights"


class Span(NamedTuple):
  """A part of a rollout's time.

  Attributes:
    track: one of this module's.
    name: of the work, such as `train`.
    start, end: seconds of one clock.
  """

  track: str
  name: str
  start: float
  end: float


class Timeline:
  """Collects spans. Thread-safe."""

  def __init__(self, clock: Callable[[], float]):
    self.clock = clock
    self._lock = threading.Lock()
    self._spans: dict[int, list[Span]] = {}

  def add(
    self,
    rollout: int,
    track: str,
    name: str,
    start: float,
    end: float,
  ) -> None:
    """Records a completed span.

    Args:
      rollout: the rollout that it belongs to.
      track: one of this module's.
      name: of the span.
      start, end: seconds of `clock`.
    """
    span = Span(track, name, start, end)
    with self._lock:
      self._spans.setdefault(rollout, []).append(span)

  @contextlib.contextmanager
  def span(
    self, rollout: int, track: str, name: str, **detail
  ) -> Iterator[None]:
    """Records the duration of the `with` block, also if it raises.

    Args:
      rollout: the rollout that it belongs to.
      track: one of this module's.
      name: of the span.
      **detail: values that JAX's trace shows with it.
    """
    start = self.clock()
    annotation = jax.profiler.TraceAnnotation(
      f"{track}: {name}", rollout=rollout, **detail
    )
    try:
      with annotation:
        yield
    finally:
      self.add(rollout, track, name, start, self.clock())

  def take(self, rollout: int) -> list[Span]:
    """Removes and returns the spans of a rollout."""
    with self._lock:
      return self._spans.pop(rollout, [])


def total(spans: Iterable[Span], track: str, *names: str) -> float:
  """Sums the seconds of a track's spans, of all names if none is given."""
  return sum(
    span.end - span.start
    for span in spans
    if span.track == track and (not names or span.name in names)
  )


def covered(spans: Iterable[Span], track: str) -> float:
  """Returns the seconds in which at least one span of a track was active."""
  seconds = 0.0
  covered_until = float("-inf")
  for span in sorted(spans, key=lambda s: s.start):
    if span.track == track:
      seconds += max(0.0, span.end - max(span.start, covered_until))
      covered_until = max(covered_until, span.end)
  return seconds


def metrics(spans: Iterable[Span]) -> dict[str, float]:
  """Returns the seconds of one rollout as metrics `time/...`.

  rollout: playing the episodes.
  generating, searching: at least one turn, or at least one search, was active.
  searches: the sum over all searches, which overlap.
  train: the sum of scoring, training and syncing (weights to the engine).
  saving: writing checkpoints.
  trainer_idle: training waited for the rollout.
  sampler_idle: sampling waited for weights.
  elapsed: the trainer did or awaited anything; summed over all rollouts, this
    is the time of the training.
  """
  spans = list(spans)
  sync = total(spans, TRAINER, "sync") + total(spans, SAMPLER, "sync")
  scoring = total(spans, SAMPLER, "score")
  training = total(spans, TRAINER, "train")
  return {
    "time/rollout": total(spans, SAMPLER, "collect"),
    "time/train": scoring + training + sync,
    "time/generating": covered(spans, TURNS),
    "time/searching": covered(spans, SEARCHES),
    "time/searches": total(spans, SEARCHES),
    "time/scoring": scoring,
    "time/training": training,
    "time/syncing": sync,
    "time/saving": total(spans, TRAINER, "save"),
    "time/trainer_idle": total(spans, TRAINER, "idle"),
    "time/sampler_idle": total(spans, SAMPLER, "idle"),
    "time/elapsed": covered(spans, TRAINER),
  }
