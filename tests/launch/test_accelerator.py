"""Policies of full size are not computed on a CPU by accident."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

from anysearch_jax.host import platforms
from anysearch_jax.policy import architecture, hf
from launch import doctor, jax_setup, run_checks

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHAPES = ROOT / "configs" / "shapes"


@pytest.fixture
def machine(monkeypatch):
  """Makes a machine by its backend and the devices that it shows."""

  def machine(backend, *devices):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(platforms, "has_device", devices.__contains__)

  return machine


def shape(name):
  return architecture.from_hf(json.loads((SHAPES / name).read_text()))


@pytest.mark.parametrize("path", sorted(SHAPES.glob("*.json")))
def test_every_policy_of_the_configurations_is_of_full_size(machine, path):
  machine("cpu")
  with pytest.raises(ValueError, match="--allow_cpu"):
    jax_setup.refuse_cpu(shape(path.name), allow=False)
  jax_setup.refuse_cpu(shape(path.name), allow=True)


def test_the_policy_of_the_quickstart_is_for_cpus(machine):
  machine("cpu")
  a, _ = hf.describe(str(ROOT / "configs" / "graded_world_policy"))
  jax_setup.refuse_cpu(a, allow=False)


def test_an_accelerator_takes_any_policy(machine):
  machine("gpu", "cuda")
  jax_setup.refuse_cpu(shape("Qwen3-4B.json"), allow=False)


def test_a_device_that_jax_does_not_use_is_named(machine):
  machine("cpu", "cuda")
  assert "has a CUDA device" in jax_setup.cpu_problem(shape("Qwen3-4B.json"))
  machine("cpu")
  assert "has a" not in jax_setup.cpu_problem(shape("Qwen3-4B.json"))


def test_doctor_reports_a_policy_of_full_size_on_a_cpu(machine):
  machine("cpu")
  found = run_checks.accelerated(shape("Qwen3-4B.json"))
  assert found.level == doctor.PROBLEM and "4.0 billion" in found.found
  machine("gpu")
  assert run_checks.accelerated(shape("Qwen3-4B.json")).level == doctor.OK


def test_training_refuses_a_policy_of_full_size_on_a_cpu(tmp_path):
  folder = tmp_path / "policy"
  shutil.copytree(ROOT / "configs" / "graded_world_policy", folder)
  values = json.loads((SHAPES / "Qwen3-0.6B.json").read_text())
  vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
  # Only the shape is read before the check, so there are no such weights.
  text = json.dumps(values | {"vocab_size": vocabulary})
  (folder / "config.json").write_text(text)
  done = subprocess.run(
    [
      *(sys.executable, "-m", "launch.train"),
      *("--config=configs/quickstart.py", f"--config.policy={folder}"),
      *(f"--output={tmp_path / 'run'}", "--cache="),
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=200,
    check=False,
  )
  assert done.returncode == 1
  assert "billion parameters" in done.stderr and "--allow_cpu" in done.stderr
  assert not (tmp_path / "run").exists()
