"""Tests that a stopped run resumes to the same results as an unstopped one."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax.policy import hf
from anysearch_jax.training import checkpoint, loop
from launch import stopping

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE = 300


def at_level(level):
  return dataclasses.replace(
    small_run.CONFIG, pipeline=config_lib.PipelineConfig(async_level=level)
  )


@pytest.fixture(scope="module")
def parts():
  return small_run.parts()


@pytest.fixture(scope="module")
def whole(parts, tmp_path_factory):
  """Returns the folder of a run that was not stopped, by `async_level`."""

  @functools.cache
  def run(level):
    folder = tmp_path_factory.mktemp(f"level{level}")
    small_run.train(folder, parts, at_level(level))
    return folder

  return run


def stop_after(steps, folder, parts, config):
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


def records(folder):
  """Returns what a run wrote, without times and counts of compilations."""
  return [
    {
      k: v
      for k, v in json.loads(line).items()
      if not k.startswith(("time/", "compile/", "search/seconds"))
      and "per_second" not in k
      and "search/" not in k
    }
    for name in ("metrics.jsonl", "steps.jsonl")
    for line in (folder / name).open()
  ]


def same(ours, theirs):
  assert records(ours) == records(theirs)
  found = (hf.load(folder / "policy").params for folder in (ours, theirs))
  jax.tree.map(np.testing.assert_array_equal, *found)


# Two steps a rollout, a checkpoint every second rollout: rollout 2 has a
# checkpoint before the stop.
@pytest.mark.parametrize(
  ("level", "steps", "saved"),
  [
    pytest.param(0, 1, 0, marks=pytest.mark.slow),
    pytest.param(0, 2, 1, marks=pytest.mark.slow),
    (0, 5, 2),
    (1, 3, 1),
  ],
)
def test_a_stopped_run_ends_on_the_same_bits(
  whole, parts, tmp_path, level, steps, saved
):
  assert not stop_after(steps, tmp_path, parts, at_level(level))
  assert checkpoint.rollouts(tmp_path / "checkpoints") == [saved]
  assert not (tmp_path / "policy").exists()
  small_run.train(tmp_path, parts, at_level(level))
  same(tmp_path, whole(level))


def test_a_stop_at_the_last_step_finishes_the_run(parts, tmp_path):
  assert stop_after(8, tmp_path, parts, small_run.CONFIG)
  assert (tmp_path / "policy").is_dir()


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
    curriculum=dataclasses.replace(c.curriculum, total_steps={steps}),
  )
"""


def command(tmp_path, output, steps):
  path = tmp_path / f"small{steps}.py"
  path.write_text(
    CONFIG.format(
      tests=str(ROOT / "tests" / "support"),
      policy=str(tmp_path / "start"),
      steps=steps,
    )
  )
  arguments = [f"--config={path}", f"--output={output}", "--threads=1"]
  return [sys.executable, "-m", "launch.train", *arguments]


@pytest.mark.parametrize(
  "how", ["SIGINT", pytest.param("pipe", marks=pytest.mark.slow)]
)
def test_a_stopped_command_saves_and_reports_it(parts, tmp_path, how):
  hf.save(tmp_path / "start", parts["policy"])
  folder = tmp_path / "run"
  reading, writing = os.pipe()
  process = subprocess.Popen(
    # As in a terminal, also if the tests run without one.
    ["env", "--default-signal=INT", *command(tmp_path, folder, 4000)],
    cwd=ROOT,
    stdout=writing,
    stderr=subprocess.PIPE,
    text=True,
  )
  os.close(writing)
  end = time.monotonic() + DEADLINE
  written = folder / "metrics.jsonl"
  while not (written.is_file() and len(written.read_text().splitlines()) > 3):
    assert process.poll() is None, process.stderr.read()
    assert time.monotonic() < end
    time.sleep(0.05)
  if how != "pipe":
    process.send_signal(signal.Signals[how])
  else:
    os.close(reading)
  _, said = process.communicate(timeout=DEADLINE)
  assert process.returncode == stopping.RESUME, said
  (saved,) = checkpoint.rollouts(folder / "checkpoints")
  assert f"saved checkpoint {saved}; the same command resumes from it" in said
  assert "Traceback" not in said
  assert 0 < stopping.patience(said.splitlines()) < DEADLINE
  done = [json.loads(line)["rollout"] for line in written.open()]
  assert saved == len(done) and done == list(range(saved))
