"""Where a run's time goes: spans on tracks, what they add up to, a trace.

Whoever does something or waits for something records a span of it, from any
thread. A span belongs to a rollout; when that one is done, its spans are taken
and become the numbers of its record. The trace is a JSON array of trace events
as https://ui.perfetto.dev and `chrome://tracing` read them; it is a whole one
after every rollout.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from anysearch_jax.host import disk

# Tracks on which one span follows the other; on all others they overlap.
TRAINER, SAMPLER = "trainer", "sampler"
TURNS, SEARCHES = "turns", "searches"
_THREADS = (TRAINER, SAMPLER)
_CLOSE = b"\n]\n"


class Span(NamedTuple):
  """Something that took from `start` to `end`, in seconds of one clock."""

  track: str
  name: str
  start: float
  end: float
  detail: Mapping[str, Any]


class Timeline:
  """Collects spans; any thread may record.

  Args:
    clock: seconds.
    path: of the trace, which replaces one that is there; None writes none.
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
      with disk.writing(path):
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
    """Records a span that is over."""
    span = Span(track, name, start, end, detail)
    with self._lock:
      self._spans.setdefault(rollout, []).append(span)

  @contextlib.contextmanager
  def span(
    self, rollout: int, track: str, name: str, **detail
  ) -> Iterator[None]:
    """Records what happens inside, however it ends."""
    start = self.clock()
    try:
      yield
    finally:
      self.add(rollout, track, name, start, self.clock(), **detail)

  def take(self, rollout: int) -> list[Span]:
    """The spans of a rollout so far; they are written out and forgotten."""
    with self._lock:
      spans = self._spans.pop(rollout, [])
    self._write(rollout, spans)
    return spans

  def __enter__(self) -> Timeline:
    return self

  def __exit__(self, *unused) -> None:
    """Writes what nobody took."""
    for rollout in sorted(self._spans):
      self.take(rollout)

  def _write(self, rollout: int, spans: Iterable[Span]) -> None:
    if self._path is None or not spans:
      return
    events = [e for span in spans for e in self._events(rollout, span)]
    with disk.writing(self._path), self._path.open("r+b") as file:
      file.seek(-len(_CLOSE), 2)
      file.write(b",\n" + _joined(events) + _CLOSE)

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
    # Those that overlap are pairs of their own, not one inside the other.
    self._written += 1
    event |= {"tid": 0, "id": self._written}
    return [event | {"ph": "b"}, event | {"ph": "e", "ts": end, "args": {}}]


def total(spans: Iterable[Span], track: str, *names: str) -> float:
  """Seconds of the spans of a track, those of the names if any are given."""
  return sum(s.end - s.start for s in _of(spans, track, names))


def covered(spans: Iterable[Span], track: str, *names: str) -> float:
  """Seconds in which at least one of these spans was under way."""
  seconds, reached = 0.0, float("-inf")
  for span in sorted(_of(spans, track, names), key=lambda s: s.start):
    seconds += max(0.0, span.end - max(span.start, reached))
    reached = max(reached, span.end)
  return seconds


def metrics(spans: Iterable[Span]) -> dict[str, float]:
  """The seconds of one rollout, `time/...`.

  rollout: of playing it. generating, searching: at least one turn, one search
  was under way meanwhile; searches: those of all searches together. train: of
  scoring, training and syncing (weights to the engine) together. saving: a
  checkpoint. trainer_idle: waiting for the rollout; sampler_idle: for weights
  to sample it with.
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
  }


def _of(
  spans: Iterable[Span], track: str, names: tuple[str, ...]
) -> Iterator[Span]:
  return (
    s for s in spans if s.track == track and (not names or s.name in names)
  )


def _names() -> list[dict[str, Any]]:
  """The events that name the process and its threads."""
  named = [("process_name", 0, "anysearch")] + [
    ("thread_name", tid, track) for tid, track in enumerate(_THREADS, start=1)
  ]
  return [
    {"name": kind, "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}
    for kind, tid, name in named
  ]


def _joined(events: Iterable[Mapping[str, Any]]) -> bytes:
  return ",\n".join(map(json.dumps, events)).encode()
