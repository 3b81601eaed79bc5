"""Tests training while sampling: order, staleness, failures, stragglers.

The engine and the learner are scripted, see `scripted_runs`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
import traceback
from unittest import mock

import numpy as np
import pytest
import scripted_runs as runs

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import curriculum
from anysearch_jax.host import processes
from anysearch_jax.training import (
  checkpoint,
  health,
  pipeline,
  sampler,
  timeline,
)


@pytest.mark.parametrize("level", [0, 1, 3])
def test_every_rollout_is_sampled_exactly_level_versions_ago(level, finished):
  folder, versions, trained = finished(level)
  assert trained == [(k, max(0, k - level)) for k in range(runs.ROLLOUTS)]
  # Each version is published once, and only if a rollout is sampled with it.
  assert versions == list(range(1, runs.ROLLOUTS - level))
  told = [r["policy/staleness_max"] for r in runs.metrics(folder)]
  assert told == [min(k, level) for k in range(runs.ROLLOUTS)]


def test_sampling_continues_while_a_step_is_taken(
  parts, tmp_path, scripted, monkeypatch
):
  """A step of rollout 0 and a turn of rollout 1 each wait for the other."""
  stepping, playing = threading.Event(), threading.Event()

  def on_step(rollout, step):
    if rollout == 0:
      stepping.set()
      assert playing.wait(60)

  async def script(request):
    if request.address.rollout == 1:
      playing.set()
      while not stepping.is_set():
        await asyncio.sleep(0.01)

  monkeypatch.setattr(runs.Learner, "on_step", on_step)
  runs.run(tmp_path, parts, runs.at_level(1), engine=runs.Engine(parts, script))
  assert len(runs.metrics(tmp_path)) == runs.ROLLOUTS


def test_budgets_depend_on_the_outcomes_of_all_earlier_rollouts(finished):
  # At a high level all rollouts use the initial weights. Before each of them
  # the curriculum has seen the same outcomes as at level 0.
  folder, _, trained = finished(runs.ROLLOUTS)
  assert {version for _, version in trained} == {0}
  config = runs.SCRIPTED.curriculum
  state = curriculum.init(config, runs.SCRIPTED.seed)
  for record, groups in zip(
    runs.metrics(folder), runs.played(folder), strict=True
  ):
    assigned = curriculum.assign(state, num_groups=4, config=config)
    assert [g["budget"] for g in groups] == assigned.budgets.tolist()
    p = curriculum.distribution(state, config=config)
    assert [record["curriculum/p1"], record["curriculum/p2"]] == p.tolist()
    em = [t["em"] for g in groups for t in g["trajectories"]]
    state = curriculum.record(
      state,
      np.repeat(assigned.budgets, 2),
      np.asarray(em),
      np.ones(8, bool),
      config=config,
    )
  assert state.windows.any() and not state.windows.all()


@pytest.mark.parametrize(
  ("lie", "steps", "sentence"),
  [
    (-1, 4, "Rollout 2 holds tokens of policy version 0, expected 1 to 2"),
    (1, 0, "Rollout 0 holds tokens of policy version 1, expected 0 to 0"),
  ],
)
def test_tokens_of_a_wrong_version_stop_the_run(
  lie, steps, sentence, parts, tmp_path, scripted
):
  engine = runs.Engine(parts, lie=lie)
  with pytest.raises(sampler.StaleError, match=sentence):
    runs.run(tmp_path, parts, runs.at_level(1), engine=engine)
  # No optimizer step was taken on this rollout.
  assert runs.Learner.made.state.step == steps


@pytest.mark.parametrize(("level", "saved"), [(0, 4), (3, 2)])
def test_a_bug_of_the_sampler_is_raised_with_its_traceback(
  level, saved, parts, tmp_path, scripted
):
  engine = runs.Engine(
    parts, runs.fails_in(5, ZeroDivisionError("in the engine"))
  )
  with pytest.raises(ExceptionGroup) as raised:
    runs.run(tmp_path, parts, runs.at_level(level), engine=engine)
  text = "".join(traceback.format_exception(raised.value))
  assert "ZeroDivisionError: in the engine" in text
  assert "in script" in text and "in generate" in text
  # Earlier rollouts are not lost.
  assert checkpoint.sound(tmp_path / "checkpoints") == saved
  runs.run(tmp_path, parts, runs.at_level(level))
  assert len(runs.metrics(tmp_path)) == runs.ROLLOUTS


def test_a_bug_of_the_sampler_is_raised_before_the_next_step(
  parts, tmp_path, scripted, monkeypatch
):
  def wait_for_the_failure(rollout, step):
    if (rollout, step) == (1, 0):
      for thread in threading.enumerate():
        if thread.name == "sampler":
          thread.join(60)

  monkeypatch.setattr(runs.Learner, "on_step", wait_for_the_failure)
  engine = runs.Engine(parts, runs.fails_in(2, ZeroDivisionError()))
  with pytest.raises(ExceptionGroup):
    runs.run(tmp_path, parts, runs.at_level(1), engine=engine)
  assert runs.Learner.made.state.step == 3  # One of the two of rollout 1.


def test_weights_that_cannot_be_handed_over_are_a_sentence(
  parts, tmp_path, scripted
):
  class Engine(runs.Engine):
    def set_params(self, params, version):
      if version == 2:
        raise PermissionError(13, "Permission denied", "/shared/weights")
      super().set_params(params, version)

  with pytest.raises(
    types.EngineError, match="version 2 could not be handed"
  ) as (raised):
    runs.run(tmp_path, parts, runs.at_level(0), engine=Engine(parts))
  assert "'/shared/weights'. Look at the disk" in str(raised.value)
  # Earlier training is not lost.
  assert checkpoint.sound(tmp_path / "checkpoints") == 2


@pytest.fixture
def interruptible():
  """Makes Ctrl-C raise here, even if the tests' parent process ignores it."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("level", [0, 1])
def test_an_interrupt_ends_a_sampler_that_never_returns(
  level, parts, tmp_path, scripted, interruptible
):
  """Ctrl-C arrives while training waits for rollout 2."""
  main = threading.main_thread().ident

  async def script(request):
    if request.address.rollout == 2:
      if request.address.question == 0 and request.address.sample == 0:
        signal.pthread_kill(main, signal.SIGINT)
      await asyncio.sleep(3600)

  engine = runs.Engine(parts, script)
  with pytest.raises(KeyboardInterrupt):
    runs.run(tmp_path, parts, runs.at_level(level), engine=engine)
  assert not engine.open  # Its episodes were released.
  runs.run(tmp_path, parts, runs.at_level(level))
  assert len(runs.metrics(tmp_path)) == runs.ROLLOUTS


def test_a_step_that_is_not_finite_stops_the_sampler(
  parts, tmp_path, scripted, monkeypatch
):
  def steps(self, packed, start):
    yield {"finite": 0.0, "loss/total": float("nan"), "grad_norm": 1.0}

  async def script(request):
    if request.address.rollout == 1:
      await asyncio.sleep(3600)

  config = runs.at_level(1, watch=config_lib.WatchConfig(bad_steps=1))
  monkeypatch.setattr(runs.Learner, "steps", steps)
  with pytest.raises(health.NotFiniteError, match="not-finite-0"):
    runs.run(tmp_path, parts, config, engine=runs.Engine(parts, script))
  assert "sampler" not in {thread.name for thread in threading.enumerate()}


class _Stuck:
  """A sampler in a call that does not return."""

  def __init__(self):
    self.let_go = threading.Event()

  def sample(self, rollout):
    self.let_go.wait(60)

  def stop(self):
    pass


def test_a_sampler_that_hangs_in_a_device_is_left_behind(caplog, monkeypatch):
  monkeypatch.setattr(pipeline, "_PATIENCE", 0.1)
  stuck = _Stuck()
  clock = timeline.Timeline(time.monotonic)
  ahead = pipeline.Pipeline(stuck, first=0, rollouts=2, level=1, timeline=clock)
  with pytest.raises(runs.KilledError), ahead:
    ahead.fill(0, dict)
    raise runs.KilledError
  assert "did not stop within 0.1 seconds" in caplog.text
  stuck.let_go.set()


def test_waiting_for_a_rollout_ends_if_the_sampler_thread_dies():
  clock = timeline.Timeline(time.monotonic)
  ahead = pipeline.Pipeline(
    _Stuck(), first=0, rollouts=2, level=0, timeline=clock
  )
  with pytest.raises(RuntimeError, match="rollout 0"):
    ahead.fill(0, dict)
    ahead.wait()  # Its thread was never started.


@pytest.mark.parametrize("error", [ZeroDivisionError, types.EngineError])
def test_a_bug_is_raised_between_steps_and_an_outage_later(error):
  """Of what came before an outage, all is kept."""

  class Sampler:
    def sample(self, rollout):
      if rollout == 1:
        raise error
      return "sampled"

    def stop(self):
      pass

  clock = timeline.Timeline(time.monotonic)
  ahead = pipeline.Pipeline(
    Sampler(), first=0, rollouts=3, level=2, timeline=clock
  )
  is_bug = error is ZeroDivisionError
  with ahead:
    ahead.fill(0, dict)
    ahead._thread.join(30)
    with pytest.raises(error) if is_bug else contextlib.nullcontext():
      ahead.check()
    with pytest.raises(error) if is_bug else contextlib.nullcontext():
      assert ahead.sampled_before(1) == ["sampled"]
    assert ahead.wait() and ahead.take() == "sampled"
    with pytest.raises(error):
      ahead.wait()


def test_a_process_without_a_sampler_follows(monkeypatch):
  """It takes the weights' turns, and no rollout."""
  monkeypatch.setattr(processes, "on_main", lambda make: 2)  # As told.
  clock = timeline.Timeline(time.monotonic)
  ahead = pipeline.Pipeline(None, first=1, rollouts=5, level=1, timeline=clock)
  gather = mock.Mock()
  begun, gathers = [], []
  for version in (1, 2, 3, 4):
    ahead.fill(version, gather, begun.append)
    gathers.append(gather.call_count)
  # Rollout 1 was stored, and the last version samples nothing.
  assert (gathers, begun) == ([1, 2, 3, 3], [2, 3, 4])
  rounds = [[[False, False], [False, False]], [[True, False], [False, True]]]
  monkeypatch.setattr(processes, "all_gather", lambda make: rounds.pop(0))
  assert ahead.wait() and ahead.take() is None
  rounds.append([[False, False], [False, True]])
  assert not ahead.wait(lambda: True)
  with ahead:
    assert not ahead._thread.is_alive()


def test_stragglers_are_cancelled_and_their_questions_consumed(
  parts, tmp_path, scripted
):
  """Phase II draws a budget for each group; kept groups keep theirs."""
  config = runs.at_level(1, extra_groups=2, save_every=1)
  config = config_lib.changed(config, curriculum={"phase1_steps": 0})
  engine = runs.Engine(parts, runs.slow(1, 3), questions=6)
  runs.run(tmp_path, parts, config, engine=engine)
  assert not engine.open
  played = list(runs.played(tmp_path))
  for number, groups in enumerate(played):
    asked = [parts["questions"][(6 * number + i) % 32].id for i in (0, 2, 4, 5)]
    assert [g["question_id"] for g in groups] == asked
    assert all(len(g["trajectories"]) == 2 for g in groups)
  records = runs.metrics(tmp_path)
  assert [r["rollout/stragglers"] for r in records] == [2] * runs.ROLLOUTS
  assert records[-1]["run/stragglers"] == 2 * runs.ROLLOUTS
  assert records[-1]["run/trajectories"] == 8 * runs.ROLLOUTS
  progress = checkpoint.read_json(
    tmp_path / "checkpoints", runs.ROLLOUTS, "progress"
  )
  assert progress["questions"] == {"epoch": 1, "position": 4, "of": 32}
  state = curriculum.init(config.curriculum, config.seed)
  drawn = curriculum.assign(state, num_groups=6, config=config.curriculum)
  kept = drawn.budgets[np.asarray([0, 2, 4, 5])].tolist()
  assert sorted(kept) != sorted(drawn.budgets[:4].tolist())
  assert [g["budget"] for g in played[0]] == kept
  assert records[0]["curriculum/count2"] == kept.count(2)
