"""Tests what the benches share: turns, ratios, tables, workers."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

from bench import harness

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


def test_cells_of_a_table_are_aligned(capsys):
  table = harness.Table("what", "ours", "ratio", first=8, least=8)
  table.row("rollout", 1234.5678, "2.00x")
  head, row = capsys.readouterr().out.splitlines()
  assert head == "what        ours   ratio"
  assert row == "rollout     1235   2.00x"


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
