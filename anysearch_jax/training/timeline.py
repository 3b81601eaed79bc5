"""Records where a run's time goes: spans on tracks, their totals, and a trace.

Any thread records spans. A span belongs to a rollout, after which it is removed
and summed into metrics. The trace is a JSON array of trace events for
https://ui.perfetto.dev and `chrome://tracing`, valid after every rollout.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from anysearch_jax.host import disk

# The spans of these two tracks never overlap; those of the others do.
TRAINER, SAMPLER = "trainer", "sampler"
TURNS, SEARCHES, WEIGHTS = "turns", "searches", "weights"
_THREADS = (TRAINER, SAMPLER)
_CLOSE = b"\n]\n"


class Span(NamedTuple):
  """Something that lasted from `start` to `end`, in seconds of one clock."""

  track: str
  name: str
  start: float
  end: float
  detail: Mapping[str, Any]


class Timeline(contextlib.AbstractContextManager["Timeline"]):
  """Collects spans. Thread-safe.

  The trace replaces the file at `path`; None writes no trace.
  """

  def __init__(
    self, clock: Callable[[], float], path: pathlib.Path | None = None
  ):
    self.clock = clock
    self._path = path
    self._lock = threading.Lock()
    self._spans: dict[int, list[Span]] = {}
    self._began = clock()
    self._written = 0
    if path is not None:
      with disk.translate_errors(path):
        path.write_bytes(b"[\n" + _joined(_names()) + _CLOSE)

  def add(
    self,
    rollout: int,
    track: str,
    name: str,
    start: float,
    end: float,
    **detail,
  ) -> None:
    """Records a completed span."""
    span = Span(track, name, start, end, detail)
    with self._lock:
      self._spans.setdefault(rollout, []).append(span)

  @contextlib.contextmanager
  def span(
    self, rollout: int, track: str, name: str, **detail
  ) -> Iterator[None]:
    """Records the duration of the `with` block, also if it raises."""
    start = self.clock()
    try:
      yield
    finally:
      self.add(rollout, track, name, start, self.clock(), **detail)

  def take(self, rollout: int) -> list[Span]:
    """Removes and returns the spans of a rollout; writes them to the trace."""
    with self._lock:
      spans = self._spans.pop(rollout, [])
    if self._path is not None and spans:
      events = [e for span in spans for e in self._events(rollout, span)]
      with disk.translate_errors(self._path), self._path.open("r+b") as file:
        file.seek(-len(_CLOSE), 2)
        file.write(b",\n" + _joined(events) + _CLOSE)
    return spans

  def __exit__(self, *unused) -> None:
    """Writes the spans that were never taken."""
    for rollout in sorted(self._spans):
      self.take(rollout)

  def _events(self, rollout: int, span: Span) -> list[dict[str, Any]]:
    start, end = (
      round(1e6 * (seconds - self._began), 3)
      for seconds in (span.start, span.end)
    )
    event = {"name": span.name, "cat": span.track, "pid": 1, "ts": start}
    event["args"] = {"rollout": rollout, **span.detail}
    if span.track in _THREADS:
      tid = 1 + _THREADS.index(span.track)
      return [event | {"ph": "X", "tid": tid, "dur": round(end - start, 3)}]
    # Overlapping spans are pairs of asynchronous events ("b", "e"): complete
    # events ("X") of one thread must nest.
    self._written += 1
    event |= {"tid": 0, "id": self._written}
    return [event | {"ph": "b"}, event | {"ph": "e", "ts": end, "args": {}}]


def total(spans: Iterable[Span], track: str, *names: str) -> float:
  """Sums the seconds of a track's spans, of all names if none is given."""
  return sum(
    span.end - span.start
    for span in spans
    if span.track == track and (not names or span.name in names)
  )


def covered(spans: Iterable[Span], track: str) -> float:
  """Returns the seconds in which at least one span of a track was active."""
  seconds, reached = 0.0, float("-inf")
  for span in sorted(spans, key=lambda s: s.start):
    if span.track == track:
      seconds += max(0.0, span.end - max(span.start, reached))
      reached = max(reached, span.end)
  return seconds


def metrics(spans: Iterable[Span]) -> dict[str, float]:
  """Returns the seconds of one rollout as metrics `time/...`.

  rollout: playing it. generating, searching: at least one turn, or at least one
  search, was active; searches: the sum over all searches. train: the sum of
  scoring, training and syncing (weights to the engine). saving: checkpoints.
  trainer_idle: training waited for the rollout; sampler_idle: sampling waited
  for weights. elapsed: the trainer did or awaited anything; over all rollouts,
  the time of the training.
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


def _names() -> list[dict[str, Any]]:
  """Returns the trace events that name the process and its threads."""
  named = [("process_name", 0, "anysearch")] + [
    ("thread_name", tid, track) for tid, track in enumerate(_THREADS, start=1)
  ]
  return [
    {"name": kind, "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}
    for kind, tid, name in named
  ]


def _joined(events: Iterable[Mapping[str, Any]]) -> bytes:
  return ",\n".join(map(json.dumps, events)).encode()
