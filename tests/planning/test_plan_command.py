"""Tests `launch.plan` as a user runs it: table, JSON, exit codes, errors."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import commands
import planned
import pytest

from anysearch_jax.launch import plan as command

ROOT = pathlib.Path(__file__).resolve().parents[2]

CONFIG = """
from anysearch_jax import config
def get_config():
  return config.ExperimentConfig(
    name="small",
    policy="%s",
    questions=8,
    engine=config.EngineConfig(
      slots=4, max_context=128, lanes=(4,), prefill_lanes=2, decode_steps=2
    ),
    batch=config.BatchConfig(
      row_lengths=(128,), micro_batch_tokens=512, max_micro_batches=2
    ),
    episode=config.EpisodeConfig(max_context=128, max_generated=64),
  )
"""


# A small policy of one layer; `written` multiplies the other sizes.
SIZES = {
  "hidden_size": 64,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "intermediate_size": 128,
  "vocab_size": 512,
}


def written(folder, times=1):
  """Writes a policy and its configuration; returns the latter's flag."""
  source = ROOT / "configs" / "shapes" / "Qwen2.5-7B-Instruct.json"
  sizes = {name: size * times for name, size in SIZES.items()}
  shape = json.loads(source.read_text()) | sizes | {"num_hidden_layers": 1}
  (folder / "config.json").write_text(json.dumps(shape))
  (folder / "small.py").write_text(CONFIG % folder)
  return f"--config={folder / 'small.py'}"


def run(config, *args, platforms=None):
  """Runs a command in a process without the tests' simulated devices."""
  env = {
    name: value
    for name, value in os.environ.items()
    if name not in ("JAX_PLATFORMS", "XLA_FLAGS")
  }
  env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"
  if platforms:
    env["JAX_PLATFORMS"] = platforms
  return subprocess.run(
    [sys.executable, "-m", "anysearch_jax.launch.plan", config, *args],
    cwd=ROOT,
    env=env,
    capture_output=True,
    text=True,
    check=False,
  )


def test_a_configuration_that_fits(tmp_path):
  planned.need("h100")
  done = run(
    written(tmp_path),
    "--target=h100:1",
    f"--json={tmp_path / 'plan.json'}",
    platforms="cuda",
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("small on h100:1: mesh data 1 x fsdp 1")
  assert "Verdict: fits" in done.stdout
  # The output of compilers and plug-ins is not shown.
  names = ["train step", "prefill", "decode"]
  assert done.stderr.splitlines() == [
    f"compiling the {name} for h100:1" for name in names
  ]
  found = json.loads((tmp_path / "plan.json").read_text())
  assert found["fits"] is True
  assert set(found["programs"]) == {*names, "hand-over"}


@pytest.mark.parametrize(
  ("args", "sentence"),
  [
    (["--target=b300:1"], "target: found 'b300:1', expected one of h100"),
    (["--target=h100:1", "--config.mesh.fsdp=2"], "more devices than h100:1"),
    (["--target=h100:1", "--config.policy=nowhere/X"], "policy: 'nowhere/X'"),
    (["--target=h100:1", "--config.seed=x"], "config.seed: found 'x'"),
    (["--target=h100:1", "--config.batch.remat=some"], "batch.remat: found"),
    ([], "--target"),
  ],
)
def test_invalid_arguments_are_refused(tmp_path, monkeypatch, args, sentence):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
  said = commands.run(command, written(tmp_path), *args)
  assert sentence in said
  assert "Traceback" not in said


def test_a_policy_is_a_folder_or_a_known_name(tmp_path):
  a = command.read_architecture("weights/Qwen2.5-7B-Instruct")
  assert (a.layers, a.d_model, a.kv_heads) == (28, 3584, 4)
  folder = tmp_path / "Qwen2.5-7B-Instruct"
  folder.mkdir()
  source = ROOT / "configs" / "graded_world_policy" / "config.json"
  (folder / "config.json").write_text(source.read_text())
  assert command.read_architecture(str(folder)).d_model < 3584


def test_a_configuration_that_does_not_fit(tmp_path):
  planned.need("h100")
  done = run(
    written(tmp_path, times=256),
    *("--target=h100:1", "--config.objective.kl_coefficient=0"),
  )
  assert done.returncode == 1, done.stderr
  assert "Verdict: does not fit: train step" in done.stdout
  assert "Traceback" not in done.stderr
