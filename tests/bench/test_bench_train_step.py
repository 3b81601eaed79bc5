"""Runs `bench.train_step` as in its docstring, with a tiny shape."""

from __future__ import annotations

import json
import math
import os
import pathlib
import shlex
import subprocess
import sys

import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.training import batching, throughput
from bench import policies
from bench import train_step as bench

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZES = {
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 1,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 8,
  "vocab_size": 64,
}
# Embedding, q k v o, gate up down, layer norms, head norms, final norm.
PARAMETERS = 64 * 32 + 2 * 32 * (32 + 16) + 3 * 32 * 48 + 2 * 32 + 2 * 8 + 32
STEPS, MICRO_BATCHES, MICRO_BATCH, ROW = 3, 2, 256, 128


def documented(name: str) -> list[str]:
  """Returns the arguments of the docstring's command for one GPU."""
  text = bench.__doc__[bench.__doc__.index(f"--config=configs/{name}") :]
  end = text.index("\n        on one GPU")
  return shlex.split(text[:end].replace("\\\n", " "))


@pytest.mark.slow
def test_the_documented_command_measures_what_it_says(tmp_path):
  source = json.loads((ROOT / "configs/shapes/Qwen3-4B.json").read_text())
  (tmp_path / "config.json").write_text(json.dumps(source | SIZES))
  arguments = [
    *(x for x in documented("qwen3_4b.py") if not x.startswith("--profile")),
    # Overrides the flag above, because the last one counts.
    f"--shape={tmp_path / 'config.json'}",
    f"--config.batch.row_lengths=({ROW},)",
    f"--config.batch.micro_batch_tokens={MICRO_BATCH}",
    f"--micro_batches={MICRO_BATCHES}",
    f"--steps={STEPS}",
    "--peak_tflops=1",
    "--cache=",
    f"--json={tmp_path / 'out.json'}",
  ]
  env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  out = subprocess.run(
    [sys.executable, "-m", "bench.train_step", *arguments],
    cwd=ROOT,
    env=env,
    capture_output=True,
    text=True,
    check=False,
  )
  assert out.returncode == 0, out.stdout + out.stderr
  found = json.loads((tmp_path / "out.json").read_text())
  lines = dict(line.rsplit(maxsplit=1) for line in out.stdout.splitlines())
  assert lines.keys() == found.keys()
  assert (found["device"], found["devices"]) == ("cpu", 1)
  assert found["parameters"] == found["trained"] == PARAMETERS
  assert found["tokens"] == MICRO_BATCHES * MICRO_BATCH
  assert found["programs compiled"] == 1
  step = found["step, s"]
  assert found["fastest, s"] <= step <= found["slowest, s"]
  assert step < found["first call, s"]  # The first call compiles.
  assert found["train/mfu"] == pytest.approx(found["model TFLOP a step"] / step)
  # Masters and two moments are read and written, gradients read.
  assert found["optimizer's least traffic, GB"] == pytest.approx(
    28 * PARAMETERS / 1e9, rel=1e-2
  )


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
