"""Tests what the benches share: turns, ratios, tables, workers, examples."""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.training import batching, throughput
from bench import harness, policies

ROOT = pathlib.Path(__file__).resolve().parents[2]
BENCH = """
from absl import flags
from bench import harness

def double(x):
  return {"doubled": 2 * int(x)}

def main():
  return harness.in_worker("double", flags.FLAGS.x)

if __name__ == "__main__":
  flags.DEFINE_integer("x", 1, "A number.")
  harness.run(main, workers={"double": double})
"""


def test_sides_take_turns_and_ratios_are_those_of_rounds():
  order = []

  def measure(side):
    order.append(side)
    return {"speed": {"ours": 6.0, "theirs": 2.0}[side] * len(order)}

  found = harness.in_turns(("ours", "theirs"), measure, rounds=3)
  assert order == ["ours", "theirs"] * 3
  assert found.values("ours", "speed") == [6, 18, 30]
  assert found.medians("theirs") == {"speed": 8}
  # By round: 6 / 4, 18 / 8, 30 / 12.
  assert found.ratios("speed", "ours", "theirs") == [1.5, 2.25, 2.5]
  ratio = found.ratio("speed", "ours", "theirs")
  assert ratio == (2.25, 1.5, 2.5)
  assert str(ratio) == "2.25x [1.50, 2.50]"


def test_a_bench_runs_its_worker_and_keeps_its_numbers(tmp_path):
  (tmp_path / "tiny_bench.py").write_text(BENCH)
  out = tmp_path / "out.json"
  subprocess.run(
    [sys.executable, "-m", "tiny_bench", f"--json={out}", "--x=21"],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    check=True,
    timeout=60,
  )
  assert json.loads(out.read_text()) == {"doubled": 42}


@pytest.mark.parametrize("tokens", [256, 1024, 2048 + 32])
def test_trajectories_fill_the_rows_that_run(tokens):
  config = config_lib.ExperimentConfig(
    batch=config_lib.BatchConfig(
      row_lengths=(256,), micro_batch_tokens=256, max_micro_batches=10
    )
  )
  work = policies.train_examples(row=256, vocab=64, tokens=tokens)
  (rows,) = packed = batching.pack(work, config=config.batch)
  assert throughput.count([packed]).tokens == tokens
  assert rows.used == math.ceil(tokens / 256)
  assert sum(x.weights[1:].sum() for x in work) == pytest.approx(1)
  assert len({x.weights.size for x in work}) > 1
