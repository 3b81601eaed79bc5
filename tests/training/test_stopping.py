"""Tests that a stopped run resumes to the same results as an unstopped one."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax.policy import hf
from anysearch_jax.training import checkpoint, learner, loop
from launch import stopping

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE = 300


def stop_after(steps, folder, parts, config=small_run.CONFIG):
  """Trains, and calls `stop` after a number of optimizer steps."""
  folder.mkdir(exist_ok=True)
  trainer = loop.Trainer(config, folder=folder, **parts)
  small_run.share_programs(trainer, config)
  learn, taken = trainer._learner.steps, 0

  def counted(packed):
    nonlocal taken
    for values in learn(packed):
      taken += 1
      if taken == steps:
        trainer.stop()
      yield values

  trainer._learner.steps = counted
  return trainer.run()


# Two steps a rollout, a checkpoint every second rollout: rollout 2 has a
# checkpoint before the stop.
@pytest.mark.parametrize(
  ("level", "steps", "saved"),
  [(0, 5, 2), (1, 3, 1), pytest.param(0, 2, 1, marks=pytest.mark.slow)],
)
def test_a_stopped_run_ends_on_the_same_bits(
  trained, parts, tmp_path, level, steps, saved
):
  config = dataclasses.replace(
    small_run.CONFIG, pipeline=config_lib.PipelineConfig(level)
  )
  folder, whole = tmp_path / "stopped", trained
  if level:
    whole = tmp_path / "whole"
    small_run.train(whole, parts, config)
  assert not stop_after(steps, folder, parts, config)
  assert checkpoint.rollouts(folder / "checkpoints") == [saved]
  assert not (folder / "policy").exists()
  small_run.train(folder, parts, config)
  small_run.assert_same_bits(folder, whole)


def test_a_stop_at_the_last_step_finishes_the_run(parts, tmp_path):
  assert stop_after(8, tmp_path, parts)
  assert (tmp_path / "policy").is_dir()


# Several passes over a rollout's trajectories.


def over(*, steps, old_logp="engine"):
  return dataclasses.replace(
    small_run.CONFIG,
    curriculum=dataclasses.replace(
      small_run.CONFIG.curriculum,
      phase1_steps=0,
      steps_per_rollout=steps,
      total_steps=2 * steps,
      epochs=2,
    ),
    objective=config_lib.ObjectiveConfig(old_logp=old_logp),
  )


def test_an_epoch_has_the_batches_of_the_first_and_the_same_old_policy(
  parts, tmp_path, monkeypatch
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
  small_run.train(tmp_path, parts, over(steps=4, old_logp="trainer"))
  for a, b, again, b_again in packed:
    assert a is again and b is b_again and a is not b
  # Two batches in each of two rollouts, scored before the first step.
  assert len(scored) == 4
  steps = small_run.records(tmp_path, "steps.jsonl")
  # The first step samples from the policy that it trains; each later one is
  # further from it, and its ratio is to that policy.
  first, *moved = [x["loss/ratio_max"] - 1 for x in steps[:4]]
  assert abs(first) < 1e-4 < min(moved)
  assert moved[2] > moved[0]


def test_a_run_stopped_between_epochs_ends_on_the_same_bits(parts, tmp_path):
  whole, stopped = tmp_path / "whole", tmp_path / "stopped"
  small_run.train(whole, parts, over(steps=2))
  assert not stop_after(1, stopped, parts, over(steps=2))
  small_run.train(stopped, parts, over(steps=2))
  small_run.assert_same_bits(stopped, whole)


# The command.

CONFIG = """
import dataclasses, pathlib, sys
sys.path.insert(0, {tests!r})
import small_run

def get_config():
  c = small_run.CONFIG
  return dataclasses.replace(
    c,
    policy={policy!r},
    save_every=1000,
    curriculum=dataclasses.replace(c.curriculum, total_steps=4000),
  )
"""


def test_a_stopped_command_saves_and_reports_it(parts, tmp_path):
  hf.save(tmp_path / "start", parts["policy"])
  tests, policy = ROOT / "tests" / "support", tmp_path / "start"
  config, folder = tmp_path / "small.py", tmp_path / "run"
  config.write_text(CONFIG.format(tests=str(tests), policy=str(policy)))
  process = subprocess.Popen(
    [
      # As in a terminal, also if the tests run without one.
      *("env", "--default-signal=INT", sys.executable, "-m", "launch.train"),
      *(f"--config={config}", f"--output={folder}", "--threads=1"),
    ],
    cwd=ROOT,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )
  end = time.monotonic() + DEADLINE
  written = folder / "metrics.jsonl"
  while not (written.is_file() and len(written.read_text().splitlines()) > 3):
    assert process.poll() is None, process.stderr.read()
    assert time.monotonic() < end
    time.sleep(0.05)
  process.send_signal(signal.SIGINT)
  _, said = process.communicate(timeout=DEADLINE)
  assert process.returncode == stopping.RESUME, said
  (saved,) = checkpoint.rollouts(folder / "checkpoints")
  assert f"saved checkpoint {saved}; the same command resumes from it" in said
  assert "Traceback" not in said
  assert 0 < stopping.patience(said.splitlines()) < DEADLINE
  done = [json.loads(line)["rollout"] for line in written.open()]
  assert saved == len(done) and done == list(range(saved))
