"""Tests that runs stop and resume: the same results, or changed settings."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import signal
import subprocess
import sys
import time

import commands
import pytest
import scripted_runs as runs
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax.launch import flags, node, stopping, train
from anysearch_jax.methods import systems
from anysearch_jax.policy import hf
from anysearch_jax.training import checkpoint, learner, loop, train_step

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE = 300


def stop_after(steps, folder, parts, config=small_run.CONFIG):
  """Trains, and calls `stop` after a number of optimizer steps."""
  folder.mkdir(exist_ok=True)
  trainer = loop.Trainer(
    config, method=systems.trained(config), folder=folder, **parts
  )
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
  return config_lib.changed(
    small_run.CONFIG,
    curriculum={"phase1_steps": 0, "steps_per_rollout": steps, "epochs": 2}
    | {"total_steps": 2 * steps},
    objective=config_lib.ObjectiveConfig(old_logp=old_logp),
  )


def test_an_epoch_has_the_batches_of_the_first_and_the_same_old_policy(
  parts, tmp_path, monkeypatch
):
  packed, scored = [], []
  pack, make = learner.Learner.pack, train_step.make_scorer
  monkeypatch.setattr(
    learner.Learner,
    "pack",
    lambda self, x: packed.append(pack(self, x)) or packed[-1],
  )

  def scorer(*args, **kwargs):
    score = make(*args, **kwargs)

    def counted(*batch):
      scored.append(batch)
      return score(*batch)

    counted._cache_size = score._cache_size
    return counted

  monkeypatch.setattr(train_step, "make_scorer", scorer)
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
import dataclasses, sys
sys.path.insert(0, {support!r})
import small_run

def get_config():
  return dataclasses.replace(small_run.CONFIG, policy={policy!r})
"""


@pytest.fixture
def config_file(parts, tmp_path):
  hf.save(tmp_path / "start", parts["policy"])
  path, support = tmp_path / "small.py", str(ROOT / "tests" / "support")
  policy = str(tmp_path / "start")
  path.write_text(CONFIG.format(support=support, policy=policy))
  return path


def test_a_stopped_command_saves_and_reports_it(config_file, tmp_path):
  folder = tmp_path / "run"
  process = subprocess.Popen(
    [
      # As in a terminal, also if the tests run without one.
      *(
        "env",
        "--default-signal=INT",
        sys.executable,
        "-m",
        "anysearch_jax.launch.train",
      ),
      *(f"--config={config_file}", f"--output={folder}", "--threads=1"),
      *("--config.save_every=1000", "--config.curriculum.total_steps=4000"),
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
  announced = re.search(r"it may take up to (\d+) s", said)
  assert announced and 0 < int(announced[1]) < DEADLINE
  done = [json.loads(line)["rollout"] for line in written.open()]
  assert saved == len(done) and done == list(range(saved))


HANGS = """
import itertools, runpy, threading
from anysearch_jax.training import learner, loop
steps, loop.BOUND, loop._TIMES = learner.Learner.steps, 1, 1

def hangs(self, packed):
  yield from itertools.islice(steps(self, packed), loop._FIRST > 1)
  threading.Event().wait()

learner.Learner.steps = hangs
runpy.run_module("anysearch_jax.launch.train", run_name="__main__")
"""


@pytest.mark.parametrize("bound", ["_FIRST", "_HANGS"])  # Of step 0, of 1.
def test_a_step_that_does_not_end_is_given_up(bound, config_file, tmp_path):
  flags = f"--config={config_file}", f"--output={tmp_path / 'run'}", "--grace=1"
  code = HANGS.replace("BOUND", bound)
  run = [sys.executable, "-c", code, *flags, "--threads=1"]
  done = subprocess.run(run, cwd=ROOT, stderr=subprocess.PIPE, timeout=DEADLINE)
  assert done.returncode == stopping.RESUME, done.stderr
  assert b"ten times any" in done.stderr
  assert b"no checkpoint within 1 s" in done.stderr


# Settings that differ from the checkpoint's.


def said(command, *arguments, capfd):
  """Returns a command's standard error, or the error that ended it."""
  with commands.defined(command):
    try:
      argv = flags._parse_argv(["command", "--cache=", *arguments])
      flags.call_command(command.main, argv)
    except SystemExit as ended:
      return str(ended.code)
  return capfd.readouterr().err


@pytest.mark.slow
def test_the_command_resumes_on_another_mesh_and_notes_what_changed(
  config_file, tmp_path, capfd
):
  folder = tmp_path / "run"
  config = flags.load_config(str(config_file))
  world = train.parts.source(config)
  small_run.train(
    folder,
    {
      "policy": hf.load(config.policy),
      "questions": world.questions("train", 16, config.seed),
      "retriever": world.retriever,
    },
    config,
    rollouts=2,
  )
  given = [f"--config={config_file}", f"--output={folder}"]
  moved = [*given, "--config.mesh.data=2", "--config.engine.slots=4"]
  learns = [*moved, "--config.optimizer.learning_rate=0.002"]
  sentence = said(train, *learns, capfd=capfd)
  assert "optimizer.learning_rate 0.001 -> 0.002" in sentence
  assert "--allow_changes" in sentence
  assert len(runs.metrics(folder)) == 2
  # The refused start did not hide the run's configuration.
  stored = json.loads((folder / "config.json").read_text())
  assert stored["optimizer"]["learning_rate"] == 0.002
  told = said(train, *learns, "--allow_changes", capfd=capfd)
  assert (
    "changed from rollout 2 on: optimizer.learning_rate 0.001 -> 0.002 "
    "(learning), engine.slots 8 -> 4 (placement), mesh.data 1 -> 2 (placement)"
  ) in told
  assert [r["rollout"] for r in runs.metrics(folder)] == [0, 1, 2, 3]
  (change,) = json.loads((folder / "provenance.json").read_text())["changes"]
  assert change == {
    "rollout": 2,
    "settings": {
      "optimizer.learning_rate": [0.001, 0.002],
      "engine.slots": [8, 4],
      "mesh.data": [1, 2],
    },
  }


def test_a_node_refuses_before_it_starts_a_server(config_file, tmp_path, capfd):
  folder = tmp_path / "run"
  folder.mkdir()
  config = flags.load_config(str(config_file))
  train.run_history.check_config(
    folder, config, allow=False
  )  # There is no run.
  stored = dataclasses.asdict(config)
  (folder / "config.json").write_text(json.dumps(stored))
  given = [f"--config={config_file}", f"--output={folder}", "--dry_run"]
  for setting, sentence in (
    ("seed=7", "seed 42 -> 7"),
    ("reward.alpha=0.1", "reward.alpha 0.5 -> 0.1"),
  ):
    assert sentence in said(node, *given, f"--config.{setting}", capfd=capfd)
  free = "--config.pipeline.async_level=1"
  assert said(node, *given, free, capfd=capfd) == ""
  learns = [*given, "--config.reward.alpha=0.1", "--allow_changes"]
  with commands.defined(node):
    node.main(flags._parse_argv(["command", *learns]))
  assert "--allow_changes=True" in capfd.readouterr().out
