"""Tests several passes over a rollout's trajectories."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax.training import learner, loop, validation


def over(*, steps=4, epochs=2, old_logp="engine"):
  base = small_run.CONFIG
  return dataclasses.replace(
    base,
    curriculum=dataclasses.replace(
      base.curriculum,
      phase1_steps=0,
      steps_per_rollout=steps,
      total_steps=2 * steps,
      epochs=epochs,
    ),
    objective=config_lib.ObjectiveConfig(old_logp=old_logp),
  )


@pytest.fixture(scope="module")
def parts():
  return small_run.parts()


def steps(folder):
  lines = (folder / "steps.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


@pytest.mark.parametrize("old_logp", ["engine", "trainer"])
def test_an_epoch_has_the_batches_of_the_first_and_the_same_old_policy(
  parts, tmp_path, monkeypatch, old_logp
):
  packed, scored = [], []
  pack, score = learner.Learner.pack, learner.Learner._with_old_logp
  monkeypatch.setattr(
    learner.Learner,
    "pack",
    lambda self, x: packed.append(pack(self, x)) or packed[-1],
  )
  monkeypatch.setattr(
    learner.Learner,
    "_with_old_logp",
    lambda self, x: scored.append(x) or score(self, x),
  )
  small_run.train(tmp_path, parts, over(old_logp=old_logp))
  for a, b, again, b_again in packed:
    assert a is again
    assert b is b_again
    assert a is not b
  # Two batches in each of two rollouts, scored before the first step.
  assert len(scored) == (4 if old_logp == "trainer" else 0)
  first, second, third, fourth = steps(tmp_path)[:4]
  # The first step samples from the policy that it trains; each later one is
  # further from it, and its ratio is to that policy.
  assert first["loss/ratio_max"] == pytest.approx(1, abs=1e-4)
  moved = [x["loss/ratio_max"] - 1 for x in (second, third, fourth)]
  assert min(moved) > 1e-4
  assert moved[2] > moved[0]


def test_a_run_stopped_between_epochs_ends_on_the_same_bits(parts, tmp_path):
  config = over(steps=2)
  whole, stopped = tmp_path / "whole", tmp_path / "stopped"
  small_run.train(whole, parts, config)
  stopped.mkdir()
  trainer = loop.Trainer(config, folder=stopped, **parts)
  small_run.share_programs(trainer, config)
  learn = trainer._learner.steps

  def once(packed):
    for values in learn(packed):
      trainer.stop()
      yield values

  trainer._learner.steps = once
  assert not trainer.run()
  small_run.train(stopped, parts, config)
  ours, theirs = (
    (folder / "policy/model.safetensors").read_bytes()
    for folder in (stopped, whole)
  )
  assert ours == theirs
  np.testing.assert_array_equal(
    *([s["grad_norm"] for s in steps(f)] for f in (stopped, whole))
  )


def test_epochs_divide_the_steps_of_a_rollout():
  config = over(steps=4, epochs=3)
  with pytest.raises(ValueError, match="4 steps_per_rollout; .* of epochs, 3"):
    validation._curriculum(config.curriculum)
  # Eight trajectories in eight batches of one; the ninth has none.
  validation.validate(over(steps=16, epochs=2))
  with pytest.raises(ValueError, match="8 trajectories do not divide into 16"):
    validation.validate(over(steps=16, epochs=1))
