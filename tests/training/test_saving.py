"""Tests saves by the clock, and how long a stop may take."""

from __future__ import annotations

import itertools
import math

import jax.numpy as jnp
import pytest
import scripted_runs as runs
import small_checkpoint as small
import small_run

from anysearch_jax.training import checkpoint, learner


def test_a_checkpoint_is_due_after_the_configured_minutes():
  times = iter([0, 100, 1799, 1800, 1900, 3599, 3700])
  pace = checkpoint.Pace(30, lambda: next(times))
  assert [pace.rollout() for _ in range(3)] == [False, False, True]
  pace.saved()  # At 1900.
  assert [pace.rollout() for _ in range(2)] == [False, True]
  assert pace.longest == 3599 - 1800


def test_zero_minutes_disable_saves_by_the_clock():
  times = iter([0, 1e9])
  assert not checkpoint.Pace(0, lambda: next(times)).rollout()


def test_a_stop_may_take_twice_as_long_as_the_last_save_at_its_speed():
  def seconds(size, last):
    return checkpoint.stop_seconds(size, last=last, longest_rollout=0)

  measured = checkpoint.Save(bytes=91_000_000_000, seconds=310)
  whole = seconds(91_000_000_000, measured)
  assert whole - seconds(0, measured) == pytest.approx(2 * 310)
  assert seconds(182_000_000_000, measured) - whole == pytest.approx(2 * 310)
  # Before the first save no speed is known, and a slow disk is assumed.
  assert seconds(91_000_000_000, None) > whole
  for broken in (checkpoint.Save(0, 0.0), checkpoint.Save(0, 5.0)):
    assert math.isfinite(seconds(91_000_000_000, broken))


def test_a_stop_may_take_the_longest_rollout():
  def seconds(longest):
    return checkpoint.stop_seconds(1, last=None, longest_rollout=longest)

  assert seconds(900) - seconds(600) == 600
  assert seconds(1) == seconds(0) > 60


def test_the_size_of_a_state_is_that_of_its_arrays():
  state = {"a": jnp.zeros((3, 5)), "b": [jnp.zeros(7, jnp.bfloat16)]}
  assert checkpoint.state_size(state) == 3 * 5 * 4 + 7 * 2


def test_a_save_is_measured(tmp_path):
  ticks = itertools.count(0, 60)
  with checkpoint.Checkpoints(
    tmp_path,
    config={},
    keep=small.CONFIG.checkpoint,
    clock=lambda: next(ticks),
  ) as checkpoints:
    assert checkpoint.read_save(tmp_path) is None
    checkpoints.save(small.saved(2), small.QUALITY)
  written = sum(
    path.stat().st_size
    for path in (tmp_path / "2").rglob("*")
    if path.is_file() and path.name not in checkpoint._LATE
  )
  found = checkpoint.read_save(tmp_path)
  assert found.seconds == 60
  # Orbax writes some metadata later, which then enters the manifest.
  assert 0.7 * written < found.bytes < written


@pytest.mark.parametrize("text", ["", "[1]", '{"bytes": "x"}', "{}"])
def test_an_unreadable_record_of_a_save_is_ignored(tmp_path, text):
  (tmp_path / "last_save.json").write_text(text)
  assert checkpoint.read_save(tmp_path) is None


def test_minutes_add_checkpoints_and_change_nothing_else(tmp_path, monkeypatch):
  monkeypatch.setattr(learner, "Learner", runs.Learner)
  parts = small_run.parts()
  for name, minutes in (("plain", 0), ("minutes", 1)):
    ticks = itertools.count()
    config = runs.at_level(1, save_minutes=minutes)
    runs.run(
      tmp_path / name, parts, config, clock=lambda ticks=ticks: 7 * next(ticks)
    )
  assert runs.left(tmp_path / "plain") == runs.left(tmp_path / "minutes")
  found = {
    name: checkpoint.rollouts(tmp_path / name / "checkpoints")
    for name in ("plain", "minutes")
  }
  # The two newest checkpoints remain.
  assert found == {"plain": [4, 6], "minutes": [5, 6]}
