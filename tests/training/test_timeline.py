"""Tests spans, their totals and the trace."""

from __future__ import annotations

import itertools
import json

import pytest
import scripted_runs as runs

from anysearch_jax.training import timeline


def _spans(*times, track=timeline.SEARCHES, name="search"):
  return [timeline.Span(track, name, *each, {}) for each in times]


def test_metrics_sum_the_spans_of_a_rollout():
  trainer, sampler = timeline.TRAINER, timeline.SAMPLER
  spans = [
    *_spans((0, 4), track=trainer, name="idle"),
    *_spans((4, 9), track=trainer, name="train"),
    *_spans((9, 9.25), track=trainer, name="sync"),
    *_spans((10, 12), track=trainer, name="save"),
    *_spans((0, 0.5), track=sampler, name="idle"),
    *_spans((0.5, 0.75), track=sampler, name="sync"),
    *_spans((0.75, 3), track=sampler, name="collect"),
    *_spans((3, 4), track=sampler, name="score"),
    # Overlapping, nested, touching, separate, out of order.
    *_spans((1.25, 1.5), (1, 2), (1.5, 2.5), track=timeline.TURNS),
    *_spans((3, 4), (2, 2.5), (2.5, 2.75)),
  ]
  assert timeline.metrics(spans) == {
    "time/rollout": 2.25,
    "time/train": 1 + 5 + 0.25 + 0.25,
    "time/generating": 1.5,
    "time/searching": 1.75,
    "time/searches": 1.75,
    "time/scoring": 1,
    "time/training": 5,
    "time/syncing": 0.5,
    "time/saving": 2,
    "time/trainer_idle": 4,
    "time/sampler_idle": 0.5,
  }


def test_taking_a_rollout_removes_its_spans():
  clock = iter(range(100))
  line = timeline.Timeline(lambda: next(clock))  # The first tick is its own.
  with pytest.raises(KeyError), line.span(3, timeline.TRAINER, "train"):
    raise KeyError
  assert line.take(3) == [timeline.Span("trainer", "train", 1, 2, {})]
  assert line.take(3) == []


def _complete(events):
  return [e for e in events if e["ph"] == "X"]


def test_a_trace_is_valid_json_after_every_rollout(tmp_path):
  path = tmp_path / "timeline.json"
  path.write_text("of an older run")
  ticks = iter([100.0])
  with timeline.Timeline(lambda: next(ticks), path) as line:
    assert _complete(json.loads(path.read_text())) == []
    line.add(0, timeline.TRAINER, "train", 100.5, 102, note='"q"\n')
    line.add(0, timeline.SEARCHES, "search", 101, 103, query="é")
    line.add(0, timeline.SEARCHES, "search", 102, 104, query="b")
    line.take(0)
    events = json.loads(path.read_text())
    line.add(1, timeline.SAMPLER, "idle", 105, 105)
  (train,) = _complete(events)
  assert (train["name"], train["ts"], train["dur"]) == ("train", 5e5, 1.5e6)
  assert train["args"] == {"rollout": 0, "note": '"q"\n'}
  # Searches overlap, so each is a pair of events with its own id.
  pairs = [(e["ph"], e["id"], e["ts"]) for e in events if e["ph"] in "be"]
  assert pairs == [("b", 1, 1e6), ("e", 1, 3e6), ("b", 2, 2e6), ("e", 2, 4e6)]
  # Spans that were never taken are written at the end.
  assert [e["name"] for e in _complete(json.loads(path.read_text()))] == [
    "train",
    "idle",
  ]


def test_the_trace_of_a_run_has_all_tracks(parts, tmp_path, scripted):
  runs.run(tmp_path, parts, runs.at_level(1), trace=True)
  events = json.loads((tmp_path / "timeline.json").read_text())
  names = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
  for track, expected in (
    (timeline.TRAINER, {"idle", "train", "sync", "save"}),
    (timeline.SAMPLER, {"idle", "sync", "fingerprint", "collect", "score"}),
  ):
    mine = [e for e in _complete(events) if e["tid"] == names[track]]
    assert {e["name"] for e in mine} == expected
    # The spans of a thread do not overlap.
    mine.sort(key=lambda e: e["ts"])
    for before, after in itertools.pairwise(mine):
      assert before["ts"] + before["dur"] <= after["ts"] + 0.01
  turns = [e for e in events if e.get("cat") == "turns" and e["ph"] == "b"]
  played = {
    (e["args"]["rollout"], e["args"]["question"], e["args"]["sample"])
    for e in turns
  }
  assert len(played) == runs.ROLLOUTS * 4 * 2


def test_the_times_of_a_run_add_up(trained):
  records = [json.loads(line) for line in (trained / "metrics.jsonl").open()]
  for r in records:
    assert 0 < r["time/generating"] <= r["time/rollout"]
    assert r["time/searching"] <= r["time/searches"] + 1e-9
    assert r["time/train"] == pytest.approx(
      r["time/scoring"] + r["time/training"] + r["time/syncing"]
    )
    assert 0 < r["engine/lanes_occupied"] <= 1
  used, offered = (
    records[-1][f"engine/lanes_{name}"] for name in ("used", "offered")
  )
  shares = [r["engine/lanes_occupied"] for r in records]
  assert min(shares) <= used / offered <= max(shares)
