"""Tests resuming runs: kills while rollouts are pending, outages, changes.

The engine and the learner are scripted, see `scripted_runs`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter

import numpy as np
import pytest
import scripted_runs as runs
from spoken import of_authors

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.methods import systems
from anysearch_jax.training import checkpoint, collection, health, loop

GONE = types.EngineError("The server is gone.")
FASTER = config_lib.OptimizerConfig(learning_rate=2e-3)


@pytest.mark.parametrize(
  ("level", "kill"),
  [
    (0, 3),
    (1, 3),
    (3, 0),
    *(
      pytest.param(level, kill, marks=pytest.mark.slow)
      for level in range(4)
      for kill in (1, 2, 4)
    ),
  ],
)
def test_a_killed_run_resumes_exactly(
  level, kill, finished, parts, tmp_path, scripted
):
  runs.run(tmp_path, parts, runs.at_level(level), kill=kill)
  runs.run(tmp_path, parts, runs.at_level(level))
  assert runs.left(tmp_path) == runs.left(finished(level)[0])


def test_a_lower_level_drops_rollouts_that_are_too_old(
  parts, tmp_path, scripted
):
  runs.run(tmp_path, parts, runs.at_level(3, save_every=1), kill=0)
  # It holds rollouts 1 to 3, all of version 0.
  runs.run(tmp_path, parts, runs.at_level(1, save_every=1))
  assert runs.Learner.made.trained == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]
  records = runs.metrics(tmp_path)
  assert [r["rollout"] for r in records] == list(range(runs.ROLLOUTS))
  assert records[-1]["run/stale_rollouts"] == 2
  # Every rollout is counted exactly once.
  assert [r["run/trajectories"] for r in records] == [8, 16, 24, 32, 40, 48]


STAGED = """
import numpy as np

def reward(outcomes, config):
  done = outcomes.progress
  assert done.share == done.step / done.total
  assert done.step == done.rollout * config.curriculum.steps_per_rollout
  assert done.total in (1, config.curriculum.total_steps)  # 1: the trial.
  shape = outcomes.em.shape
  return {"total": outcomes.em * (1 + done.share),
          "rollout": np.full(shape, done.rollout)}
"""


def test_a_reward_in_stages_sees_the_same_progress_after_a_resume(
  parts, tmp_path, scripted
):
  file = tmp_path / "staged.py"
  file.write_text(STAGED)
  reward = dataclasses.replace(runs.SCRIPTED.reward, function=f"{file}:reward")
  config = runs.at_level(1, reward=reward)
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  runs.run(whole, parts, config)
  runs.run(killed, parts, config, kill=3)
  runs.run(killed, parts, config)
  assert runs.left(killed) == runs.left(whole)
  seen = [r["reward/rollout"] for r in runs.metrics(killed)]
  assert sorted({*seen}) == list(range(runs.ROLLOUTS))


def test_pending_rollouts_survive_a_round_trip():
  """Through JSON, with a dropped group and a failed trajectory."""
  whole = of_authors(
    3,
    0,
    [0, 1, 1, 2, 1],
    logps=np.asarray([0, -1e-42, -np.float32(1 / 3), 0, -0.0], np.float32),
    versions=np.asarray([-1, 5, 6, -1, 6], np.int32),
    spans=(
      types.Span(types.Author.MODEL, "<search> é\n</search>"),
      types.Span(types.Author.ENVIRONMENT, "found"),
    ),
    searches=1,
    queries=("é",),
    observations=(
      types.Observation("search", "é", 0, (types.Passage("p", "t", "x"),), 3),
    ),
    search_ends=(1,),
    violation=True,
    experts=np.arange(20, dtype=np.uint8).reshape(5, 2, 2),
    outcome=types.Outcome.TRUNCATED,
    reason="max_context",
  )
  failed = of_authors(
    3, 1, [], question=whole.question, outcome=types.Outcome.FAILED
  )
  rollout = collection.RolloutBatch(
    groups=[None, types.Group(whole.question, 2, True, (whole, failed))],
    places=np.asarray([1, 3]),
    dropped=1,
    resampled=2,
    failed=3,
    stragglers=4,
    engine=Counter(sampled_tokens=3),
    search=Counter(call_seconds=0.1),
  )
  packed = collection.serialize([rollout, rollout])
  packed = packed._replace(values=json.loads(json.dumps(packed.values)))
  for back in collection.deserialize(
    packed, lambda r, place: {(0, 3): whole.question}[r, place]
  ):
    none, group = back.groups
    assert none is None
    assert (group.trajectories[1].experts == 255).all()  # No record.
    for mine, theirs in zip(group.trajectories, (whole, failed), strict=True):
      for name, value in vars(theirs).items():
        found = getattr(mine, name)
        if isinstance(value, np.ndarray):
          np.testing.assert_array_equal(found, value, strict=True)
        elif name != "experts":
          assert found == value
    assert back.places.tolist() == [1, 3]
    assert back[2:] == rollout[2:]


# Outages.


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


@pytest.mark.parametrize(
  ("level", "gone"),
  [(0, 2), (1, 2), pytest.param(3, 3, marks=pytest.mark.slow)],
)
def test_a_run_resumes_after_an_outage(
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


def test_a_checkpoint_that_holds_an_outage_samples_it_again(
  parts, tmp_path, scripted, caplog
):
  config = runs.at_level(3)
  engine = runs.Engine(parts, runs.fails_in(2, GONE))
  runs.run(tmp_path, parts, config, engine=engine, kill=1)
  assert checkpoint.sound(tmp_path / "checkpoints") == 2
  runs.run(tmp_path, parts, config)
  check_whole(tmp_path, 3, first=2)
  # All rollouts ahead are sampled again: their budgets depend on this one.
  assert runs.metrics(tmp_path)[-1]["run/failed_rollouts"] == 3
  assert "Rollout 2: 16 of 16 episodes failed" in caplog.text


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


@pytest.mark.parametrize(("level", "gone"), [(0, 3), (1, 2)])
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


@pytest.mark.parametrize(
  ("level", "script", "trained", "counted"),
  [
    # An outage in the rollout ahead: it is sampled again.
    (
      1,
      runs.fails_in(4, GONE),
      [(3, 2), (4, 3), (5, 4)],
      {"run/failed_rollouts": 1},
    ),
    # A lower level: taken steps count, a fresh sample gives the others.
    (0, None, [(3, 3), (4, 4), (5, 5)], {"run/stale_rollouts": 2}),
  ],
)
def test_a_rollout_in_training_keeps_its_steps(
  level, script, trained, counted, parts, tmp_path, scripted, monkeypatch
):
  """A stop after the first of the two steps of rollout 3, at level 1."""
  engine = runs.Engine(parts, script)
  config = runs.at_level(1, save_every=100)
  trainer = loop.Trainer(
    config,
    method=systems.trained(config),
    folder=tmp_path,
    engine=engine,
    **parts,
  )
  with monkeypatch.context() as patch:
    patch.setattr(
      runs.Learner,
      "on_step",
      lambda *at: trainer.stop() if at == (3, 0) else None,
    )
    assert not trainer.run()
  progress = checkpoint.read_json(tmp_path / "checkpoints", 3, "progress")
  assert len(progress["steps"]) == 1
  runs.run(tmp_path, parts, runs.at_level(level, save_every=100))
  assert runs.Learner.made.trained == trained
  assert runs.Learner.made.state.step == 2 * runs.ROLLOUTS
  records = runs.metrics(tmp_path)
  assert [r["rollout"] for r in records] == list(range(runs.ROLLOUTS))
  assert counted.items() <= records[-1].items()


# Settings that differ from the checkpoint's.


@pytest.mark.parametrize(
  ("changes", "allow", "sentence"),
  [
    (
      {"optimizer": FASTER},
      False,
      "checkpoints/2: found optimizer.learning_rate 0.001 -> 0.002: .*"
      "--allow_changes",
    ),
    ({"seed": 7}, False, "checkpoints/2: found seed 42 -> 7: .* never change"),
    ({"group": 3}, True, "found group 2 -> 3"),
  ],
)
def test_a_checkpoint_is_compared_by_its_own_configuration(
  changes, allow, sentence, parts, tmp_path, scripted
):
  runs.run(tmp_path, parts, runs.SCRIPTED, kill=1)
  other = dataclasses.replace(runs.SCRIPTED, **changes)
  with pytest.raises(checkpoint.MismatchError, match=sentence):
    runs.run(tmp_path, parts, other, allow_changes=allow)


def test_a_change_of_learning_holds_from_the_checkpoint_on(
  parts, tmp_path, scripted
):
  """Pending rollouts of the checkpoint are sampled again."""
  told = []
  runs.run(tmp_path, parts, runs.at_level(1), kill=1)
  config = runs.at_level(1, optimizer=FASTER)
  loop.Trainer(
    config,
    method=systems.trained(config),
    folder=tmp_path,
    engine=runs.Engine(parts),
    allow_changes=True,
    **parts,
  ).run(on_start=lambda *start: told.append(start))
  ((rollout, (change,)),) = told
  assert rollout == 2 and change.kind == "learning"
  assert str(change) == "optimizer.learning_rate 0.001 -> 0.002"
  assert runs.Learner.made.trained == [(2, 2), (3, 2), (4, 3), (5, 4)]
  records = runs.metrics(tmp_path)
  assert [r["rollout"] for r in records] == list(range(runs.ROLLOUTS))
  assert records[-1]["run/stale_rollouts"] == 1
  stored = checkpoint.read_json(tmp_path / "checkpoints", 6, "config")
  assert stored["optimizer"]["learning_rate"] == pytest.approx(2e-3)


def test_minutes_add_checkpoints_and_change_nothing_else(
  parts, tmp_path, scripted
):
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
