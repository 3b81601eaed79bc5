"""Tests that killed commands end with the files of undisturbed ones."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from anysearch_jax.training import checkpoint

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE = 300
# Lines of a file after which a command is killed, within a second.
KILLS = {
  "train": ("metrics.jsonl", (0, 1, 3, 5)),
  "evaluate": ("episodes.partial.jsonl", (5, 40)),
}
SMALL = [
  *("questions=4", "group=3", "save_every=1", "curriculum.max_budget=3"),
  *("curriculum.steps_per_rollout=2", "curriculum.phase1_steps=6"),
  *("curriculum.total_steps=16", "engine.slots=12", "batch.row_lengths=576"),
  *("batch.micro_batch_tokens=576", "batch.max_micro_batches=16"),
  *("evaluation.questions=32", "evaluation.budgets=0,2"),
]
# Times differ between runs; a resumed process counts compilations from 0.
PASSING = ("time/", "compile/", "search/", "train/tokens_per_second")


def start(cache, command, output, *arguments, kill_after=None):
  """Runs a command to its end, or kills it after so many lines of its file."""
  process = subprocess.Popen(
    [
      *(sys.executable, "-m", f"anysearch_jax.launch.{command}", "--threads=1"),
      *("--config=configs/quickstart.py", f"--cache={cache}"),
      *(f"--config.{value}" for value in SMALL),
      *(f"--output={output}", *arguments),
    ],
    cwd=ROOT,
    # One device, as for a user; the other tests simulate eight.
    env=os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace("=8", "=1")},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )
  if kill_after is not None:
    written = output / KILLS[command][0]
    end = time.monotonic() + DEADLINE
    while (
      not written.is_file() or written.read_bytes().count(b"\n") < kill_after
    ):
      assert process.poll() is None, process.stderr.read()
      assert time.monotonic() < end
      time.sleep(0.01)
    time.sleep(random.Random(f"{output} {kill_after}").random() * 0.5)
    process.kill()
  _, said = process.communicate(timeout=DEADLINE)
  assert process.returncode == (0 if kill_after is None else -signal.SIGKILL), (
    said
  )


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


@pytest.mark.parametrize("level", [0, 1])
def test_commands_that_are_killed_end_on_the_same_bits(level, tmp_path):
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  for folder in (whole, broken):
    for command, output, *arguments in (
      ("train", folder, f"--config.pipeline.async_level={level}"),
      ("evaluate", folder / "evaluation", f"--hf={folder / 'policy'}"),
    ):
      kills = KILLS[command][1] if folder == broken else ()
      for kill_after in (*kills, None):
        start(
          tmp_path / "compiled",
          command,
          output,
          *arguments,
          kill_after=kill_after,
        )
  same(broken, whole)
  # The test is only meaningful if the run learned and searched.
  steps = lines(whole / "steps.jsonl")
  assert all(step["grad_norm"] > 0 for step in steps)
  assert any(
    line["rollout/searches"] > 0 for line in lines(whole / "metrics.jsonl")
  )
