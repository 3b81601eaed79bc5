"""Tests that killed commands end with the files of undisturbed ones."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from anysearch_jax.training import checkpoint

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "support"
# A run advances at most one rollout between kills, so this number of rollouts
# suffices for all kills.
TRAINING_KILLS = 2 * ["turn"] + 3 * ["optimize"] + 2 * ["check"]
EVALUATION_KILLS = ["turn", "row", "row"]
ROLLOUTS = len(TRAINING_KILLS) + 1
LEVELS = (0, 1)
# Events in one process before the kill, and seconds from the event to the kill.
MOST = {"turn": 24, "optimize": 3, "check": 1, "row": 12}
LATER = {"turn": 0.02, "optimize": 0.1, "check": 0.4, "row": 0.0}
SMALL = [
  "questions=4",
  "group=3",
  "save_every=1",
  "curriculum.max_budget=3",
  "curriculum.steps_per_rollout=2",
  "curriculum.phase1_steps=6",
  f"curriculum.total_steps={2 * ROLLOUTS}",
  "engine.slots=12",
  "batch.row_lengths=576",
  "batch.micro_batch_tokens=576",
  "batch.max_micro_batches=16",
  "evaluation.questions=32",
  "evaluation.budgets=0,2",
]
# Times differ between runs; a resumed process counts compilations from 0.
PASSING = ("time/", "compile/", "search/", "train/tokens_per_second")


@pytest.fixture(scope="module")
def server():
  path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
  process = subprocess.Popen(
    [sys.executable, str(TESTS / "killing.py")],
    cwd=ROOT,
    # One device, as for a user; the other tests simulate eight.
    env=os.environ | {"PYTHONPATH": path, "XLA_FLAGS": ""},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  yield process
  process.kill()
  process.wait(120)


@pytest.fixture(scope="module")
def start(server, tmp_path_factory):
  """Starts a command with `argv` and kills it there; returns the outcome."""
  cache = tmp_path_factory.mktemp("compiled")

  def obey(command, *argv, kill=None):
    small = [f"--config.{value}" for value in SMALL]
    argv = [command, "--config=configs/quickstart.py", *small, *argv]
    argv += ["--threads=1", f"--cache={cache}"]
    print(json.dumps({"argv": argv, "kill": kill}), file=server.stdin)
    server.stdin.flush()
    return json.loads(server.stdout.readline())

  return obey


def train(start, folder, level, kill=None):
  return start(
    "train",
    f"--config.pipeline.async_level={level}",
    f"--output={folder}",
    kill=kill,
  )


def evaluate(start, folder, kill=None):
  return start(
    "evaluate",
    f"--hf={folder / 'policy'}",
    f"--output={folder / 'evaluation'}",
    kill=kill,
  )


def done(outcome):
  assert outcome["code"] == 0, outcome["said"]


def killed(outcome):
  assert outcome["code"] == -signal.SIGKILL, outcome["said"]


def moments(events, seed):
  """Returns when to kill: once at every event, in random order and delay."""
  drawn = random.Random(seed)
  events = drawn.sample(events, len(events))
  for event in events:
    yield [event, drawn.randint(1, MOST[event]), drawn.uniform(0, LATER[event])]


def lines(path):
  return [
    {k: v for k, v in json.loads(line).items() if not k.startswith(PASSING)}
    for line in path.read_text().splitlines()
  ]


def contents(folder):
  """Returns the bytes of the files in a folder."""
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in sorted(folder.rglob("*"))
    if path.is_file()
  }


def same(ours, theirs):
  for name in ("metrics.jsonl", "steps.jsonl"):
    assert lines(ours / name) == lines(theirs / name), name
  for name in ("trajectories", "policy", "source"):
    assert contents(ours / name) == contents(theirs / name), name
  for name in ("prompts.json", "evaluation/episodes.jsonl"):
    assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
  for name in (".", "evaluation"):
    left = [{p.name for p in (f / name).iterdir()} for f in (ours, theirs)]
    assert left[0] == left[1]
  folders = [folder / "checkpoints" for folder in (ours, theirs)]
  kept, others = (checkpoint.rollouts(folder) for folder in folders)
  assert kept == others
  newest = checkpoint.sound(folders[0])
  with checkpoint.ocp.StandardCheckpointer() as reader:
    for item in ("params", "optimizer", "curriculum"):
      found = (reader.restore(f / str(newest) / item) for f in folders)
      jax.tree.map(np.testing.assert_array_equal, *found)
  progress = [checkpoint.read_json(f, newest, "progress") for f in folders]
  assert progress[0] == progress[1]


@pytest.mark.parametrize("level", LEVELS)
def test_a_run_that_is_killed_ten_times_ends_on_the_same_bits(
  level, start, tmp_path
):
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  done(train(start, whole, level))
  done(evaluate(start, whole))
  for kill in moments(TRAINING_KILLS, f"training {level}"):
    killed(train(start, broken, level, kill))
  done(train(start, broken, level))
  for kill in moments(EVALUATION_KILLS, f"evaluation {level}"):
    killed(evaluate(start, broken, kill))
  done(evaluate(start, broken))
  same(broken, whole)
  # The test is only meaningful if the run learned and searched.
  steps = lines(whole / "steps.jsonl")
  assert all(step["grad_norm"] > 0 for step in steps)
  assert any(
    line["rollout/searches"] > 0 for line in lines(whole / "metrics.jsonl")
  )
