"""Tests `launch.plan` as a user runs it: table, JSON, exit codes, errors."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import planned
import pytest

from anysearch_jax import config as config_lib
from launch import plan as command

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


# A small policy of one layer; `run` multiplies the other sizes by `times`.
SIZES = {
  "hidden_size": 64,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "intermediate_size": 128,
  "vocab_size": 512,
}


def run(tmp_path, *args, times=1, platforms=None, module="launch.plan"):
  """Runs the command in a process without the tests' simulated devices."""
  source = ROOT / "configs" / "shapes" / "Qwen2.5-7B-Instruct.json"
  sizes = {name: size * times for name, size in SIZES.items()}
  shape = json.loads(source.read_text()) | sizes | {"num_hidden_layers": 1}
  (tmp_path / "config.json").write_text(json.dumps(shape))
  (tmp_path / "small.py").write_text(CONFIG % tmp_path)
  env = {
    name: value
    for name, value in os.environ.items()
    if name not in ("JAX_PLATFORMS", "XLA_FLAGS")
  }
  if platforms:
    env["JAX_PLATFORMS"] = platforms
  return subprocess.run(
    [
      sys.executable,
      "-m",
      module,
      f"--config={tmp_path / 'small.py'}",
      *args,
    ],
    cwd=ROOT,
    env=env,
    capture_output=True,
    text=True,
    check=False,
  )


def test_a_configuration_that_fits(tmp_path):
  planned.need("h100")
  done = run(
    tmp_path,
    "--target=h100:1",
    f"--json={tmp_path / 'plan.json'}",
    f"--markdown={tmp_path / 'plan.md'}",
    platforms="cuda",
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("small on h100:1: mesh data 1 x fsdp 1")
  assert "Verdict: fits" in done.stdout
  # The output of compilers and plug-ins is not shown.
  assert done.stderr.splitlines() == [
    f"compiling the {name} for h100:1"
    for name in ("train step", "prefill", "decode")
  ]
  found = json.loads((tmp_path / "plan.json").read_text())
  assert found["fits"] is True
  assert set(found["programs"]) == {
    "train step",
    "prefill",
    "decode",
    "hand-over",
  }
  assert "| train step |" in (tmp_path / "plan.md").read_text()


@pytest.mark.parametrize(
  ("args", "sentence"),
  [
    (["--target=b200:1"], "target: found 'b200:1', expected one of h100"),
    (["--target=h100:1", "--mesh=pipeline=2"], "expected data, fsdp or tensor"),
    (["--target=h100:1", "--mesh=fsdp=2"], "needs more devices than h100:1"),
    (["--target=h100:1", "--config.policy=nowhere/X"], "policy: 'nowhere/X'"),
    (["--target=h100:1", "--config.seed=x"], "config.seed: found 'x'"),
    (["--target=h100:1", "--config.batch.remat=some"], "batch.remat: found"),
    (["--target=h100:1", "extra"], "Unexpected argument 'extra'"),
    ([], "--target"),
  ],
)
def test_invalid_arguments_are_refused(tmp_path, args, sentence):
  done = run(tmp_path, *args)
  assert done.returncode == 2
  assert sentence in done.stderr
  assert "Traceback" not in done.stderr
  assert not done.stdout


@pytest.mark.parametrize(
  ("axes", "sizes"),
  [
    (["fsdp=2", "tensor=2"], (1, 2, 2)),
    (["fsdp=4"], (1, 4, 1)),
    (["tensor=2", "data=2"], (2, 1, 2)),
  ],
)
def test_a_mesh_of_the_same_size_keeps_the_devices(axes, sizes):
  config = config_lib.ExperimentConfig(
    mesh=config_lib.MeshConfig(
      fsdp=2, tensor=2, trainer=(0, 1, 2, 3), rollout=(4, 5, 6, 7)
    )
  )
  mesh = command.with_mesh(config, axes).mesh
  assert (mesh.data, mesh.fsdp, mesh.tensor) == sizes
  assert mesh.trainer == (0, 1, 2, 3)
  assert mesh.rollout == (4, 5, 6, 7)


def test_a_mesh_of_another_size_shares_its_devices_with_sampling():
  config = config_lib.ExperimentConfig(
    mesh=config_lib.MeshConfig(
      fsdp=2, tensor=2, trainer=(0, 1, 2, 3), rollout=(4, 5, 6, 7)
    )
  )
  mesh = command.with_mesh(config, ["fsdp=1"]).mesh
  assert mesh == config_lib.MeshConfig()
  assert command.with_mesh(config, []) == config


@pytest.mark.parametrize("axis", ["fsdp", "fsdp=0", "fsdp=-1", "fsdp=x", "=2"])
def test_an_invalid_mesh_is_refused(axis):
  with pytest.raises(ValueError, match="--mesh: found .* expected data, fsdp"):
    command.with_mesh(config_lib.ExperimentConfig(), [axis])


def test_a_policy_without_weights_is_known_by_its_name():
  a = command.read_architecture("weights/Qwen2.5-7B-Instruct")
  assert (a.layers, a.d_model, a.kv_heads) == (28, 3584, 4)
  b = command.read_architecture("Llama-3.1-8B-Instruct")
  assert (b.layers, b.d_model, b.kv_heads) == (32, 4096, 8)


def test_a_folder_takes_precedence_over_a_name(tmp_path):
  folder = tmp_path / "Qwen2.5-7B-Instruct"
  folder.mkdir()
  source = ROOT / "configs" / "graded_world_policy" / "config.json"
  (folder / "config.json").write_text(source.read_text())
  assert command.read_architecture(str(folder)).d_model < 3584


def test_a_configuration_that_does_not_fit(tmp_path):
  planned.need("h100")
  done = run(
    tmp_path,
    "--target=h100:1",
    "--config.objective.kl_coefficient=0",
    times=256,
  )
  assert done.returncode == 1, done.stderr
  assert "Verdict: does not fit: train step" in done.stdout
  assert "What would make it fit:" in done.stdout
  assert "adapters (lora.rank=64" in done.stdout
  assert "Traceback" not in done.stderr


def test_a_dry_run_refuses_what_does_not_fit_its_target(tmp_path):
  planned.need("h100")
  done = run(
    tmp_path,
    "--dry_run",
    "--target=h100:1",
    "--config.objective.kl_coefficient=0",
    times=256,
    module="launch.train",
  )
  assert done.returncode == 1, done.stderr
  assert "optimizer steps in Phase I: 100" in done.stdout
  assert "launch.train: small on h100:1 does not fit" in done.stderr
