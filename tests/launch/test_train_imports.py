"""What a training loads: the rooms that it uses, and no others."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Starts the quickstart's training and prints what is loaded where its first
# rollout would begin.
CODE = """
import json, sys
from launch import train
from absl import flags
train.define_flags()
flags.FLAGS(["train", *sys.argv[1:]])

def run(trainer, *unused):
  print(json.dumps(sorted(sys.modules)))
  sys.exit()

from anysearch_jax.training import loop
loop.Trainer.run = run
train.main(["train"])
"""
ROOMS = {
  "anysearch_jax.algorithms",
  "anysearch_jax.budgets",
  "anysearch_jax.config",
  "anysearch_jax.data",
  "anysearch_jax.environment",
  "anysearch_jax.host",
  "anysearch_jax.methods",
  "anysearch_jax.policy",
  "anysearch_jax.rollout",
  "anysearch_jax.training",
  "anysearch_jax.types",
  "anysearch_jax.world",
  "launch",
  "retrieval",
}


def rooms(modules):
  return {
    ".".join(name.split(".")[:2]) if name.startswith("anysearch_jax.") else top
    for name in modules
    if (top := name.split(".")[0]) in ("anysearch_jax", "retrieval", "launch")
    and name != "anysearch_jax"
  }


def test_a_training_loads_the_rooms_that_it_uses(tmp_path):
  done = subprocess.run(
    [
      *(sys.executable, "-c", CODE),
      *("--config=configs/quickstart.py", f"--output={tmp_path / 'run'}"),
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  loaded = json.loads(done.stdout.splitlines()[-1])
  assert rooms(loaded) == ROOMS
  # Parts of rooms that other configurations need.
  others = {"launch.plan", "anysearch_jax.data.prepared"}
  others |= {"retrieval.encoder.encoder", "retrieval.index.opening"}
  assert not others & set(loaded)
  unused = ("sglang", "host.http", "retrieval.clients", "retrieval.service")
  assert not [m for m in loaded if any(name in m for name in unused)]


def test_metrics_are_written_without_torch(tmp_path):
  code = (
    "import sys\n"
    "from anysearch_jax.training import metrics\n"
    "metrics.Writer(sys.argv[1])\n"
    "print('torch' in sys.modules)\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code, tmp_path],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.stdout == "False\n", done.stderr[-1000:]
