"""Tests resuming runs that an outage of the engine stopped."""

from __future__ import annotations

import pytest
import scripted_runs as runs
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.training import checkpoint, health, learner, loop

GONE = types.EngineError("The server is gone.")


@pytest.fixture(scope="module")
def parts():
  return small_run.parts()


@pytest.fixture
def scripted(monkeypatch):
  """Replaces the trainer's learner by `scripted_runs.Learner`."""
  monkeypatch.setattr(learner, "Learner", runs.Learner)
  monkeypatch.setattr(runs.Learner, "on_step", lambda rollout, step: None)


@pytest.fixture(scope="module")
def finished(parts, tmp_path_factory):
  return runs.finished(parts, tmp_path_factory)


def check_whole(folder, level, first):
  """Checks that the run ended and trained once on each rollout from `first` on.

  Rollouts with an outage are sampled with the checkpoint's weights.
  """
  assert runs.Learner.made.trained == [
    (k, max(first, k - level)) for k in range(first, runs.ROLLOUTS)
  ]
  assert runs.Learner.made.state.step == 2 * runs.ROLLOUTS
  records = runs.metrics(folder)
  assert [r["rollout"] for r in records] == list(range(runs.ROLLOUTS))
  assert [r["run/trajectories"] for r in records] == [8, 16, 24, 32, 40, 48]
  assert [r["run/failed"] for r in records] == [0] * runs.ROLLOUTS


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize(
  "gone",
  [
    pytest.param(1, marks=pytest.mark.slow),
    2,
    pytest.param(3, marks=pytest.mark.slow),
  ],
)
def test_a_run_resumes_after_an_outage_at_every_level(
  level, gone, parts, finished, tmp_path, scripted
):
  config = runs.at_level(level)  # Saves before rollouts 2, 4 and 6.
  engine = runs.Engine(parts, runs.fails_in(gone, GONE))
  with pytest.raises(
    health.FailedEpisodesError, match=f"Rollout {gone}: 16 of"
  ):
    runs.run(tmp_path, parts, config, engine=engine)
  # The training up to the outage is saved.
  assert checkpoint.sound(tmp_path / "checkpoints") == gone
  runs.run(tmp_path, parts, config)
  check_whole(tmp_path, level, first=gone)
  if level == 0:
    assert runs.left(tmp_path) == runs.left(finished(0)[0])


@pytest.mark.parametrize("level", [1, 3])
def test_a_checkpoint_that_holds_an_outage_samples_it_again(
  level, parts, tmp_path, scripted, caplog
):
  config = runs.at_level(level)
  engine = runs.Engine(parts, runs.fails_in(2, GONE))
  runs.run(tmp_path, parts, config, engine=engine, kill=1)
  assert checkpoint.sound(tmp_path / "checkpoints") == 2
  runs.run(tmp_path, parts, config)
  check_whole(tmp_path, level, first=2)
  # All rollouts ahead are sampled again: their budgets depend on this one.
  assert runs.metrics(tmp_path)[-1]["run/failed_rollouts"] == level
  assert "Rollout 2: 16 of 16 episodes failed" in caplog.text
  assert f"stored rollouts from this one on, {level} in all" in caplog.text


def test_a_rollout_without_a_token_is_sampled_again(parts, tmp_path, scripted):
  """All groups of rollout 1 are dropped: an outage at any `max_failed`."""
  bearing = config_lib.WatchConfig(max_failed=1.0)
  config = runs.at_level(1, save_every=1, watch=bearing)
  engine = runs.Engine(parts, runs.fails_in(1, GONE))
  runs.run(tmp_path, parts, config, engine=engine, kill=0)
  assert not (tmp_path / "checkpoints" / "1" / "tokens").exists()
  with pytest.raises(health.FailedEpisodesError, match="no group.*gone"):
    runs.run(tmp_path, parts, config, engine=engine)
  assert len(runs.metrics(tmp_path)) == 1
  runs.run(tmp_path, parts, config)
  check_whole(tmp_path, 1, first=1)


@pytest.mark.parametrize(("level", "gone"), [(0, 3), (1, 2), (1, 3), (3, 2)])
def test_an_engine_that_refuses_weights_loses_no_rollout(
  level, gone, parts, tmp_path, scripted
):
  """Its server is gone between two rollouts; `gone` is the refused version."""

  class Engine(runs.Engine):
    def set_params(self, params, version):
      if version == gone:
        raise GONE
      super().set_params(params, version)

  config = runs.at_level(level, save_every=100)
  with pytest.raises(types.EngineError, match="is gone"):
    runs.run(tmp_path, parts, config, engine=Engine(parts))
  # Version v samples rollout v + level; all earlier ones are trained on.
  first = gone + level
  assert checkpoint.sound(tmp_path / "checkpoints") == first
  runs.run(tmp_path, parts, config)
  check_whole(tmp_path, level, first=first)


def stop_within(folder, parts, config, rollout, monkeypatch, **kwargs):
  """Trains, and stops after the first of the two steps of `rollout`."""
  folder.mkdir(exist_ok=True)
  engine = runs.Engine(parts, **kwargs)
  trainer = loop.Trainer(config, folder=folder, engine=engine, **parts)
  with monkeypatch.context() as patch:
    patch.setattr(
      runs.Learner,
      "on_step",
      lambda *at: trainer.stop() if at == (rollout, 0) else None,
    )
    assert not trainer.run()
  progress = checkpoint.read_json(folder / "checkpoints", rollout, "progress")
  assert len(progress["steps"]) == 1


def test_an_outage_ahead_of_a_stop_is_sampled_again(
  parts, tmp_path, scripted, monkeypatch
):
  config = runs.at_level(1, save_every=100)
  stop_within(
    tmp_path, parts, config, 3, monkeypatch, script=runs.fails_in(4, GONE)
  )
  runs.run(tmp_path, parts, config)
  # The stop was within rollout 3, whose second step remains.
  assert runs.Learner.made.trained == [(3, 2), (4, 3), (5, 4)]
  assert runs.Learner.made.state.step == 2 * runs.ROLLOUTS
  records = runs.metrics(tmp_path)
  assert [r["rollout"] for r in records] == list(range(runs.ROLLOUTS))
  assert records[-1]["run/failed_rollouts"] == 1


def test_a_rollout_in_training_at_a_lower_level_keeps_its_steps(
  parts, tmp_path, scripted, monkeypatch
):
  """Taken steps count; a fresh sample of the rollout gives the others."""
  stop_within(tmp_path, parts, runs.at_level(1, save_every=100), 3, monkeypatch)
  runs.run(tmp_path, parts, runs.at_level(0, save_every=100))
  assert runs.Learner.made.trained == [(3, 3), (4, 4), (5, 5)]
  assert runs.Learner.made.state.step == 2 * runs.ROLLOUTS
  records = runs.metrics(tmp_path)
  assert [r["policy/staleness_max"] for r in records] == [0, 1, 1, 0, 0, 0]
  assert records[-1]["run/stale_rollouts"] == 2
