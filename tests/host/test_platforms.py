"""Which platform JAX will compute on, and which devices it is left."""

from __future__ import annotations

import importlib.util
import os

import jax
import pytest

from anysearch_jax.host import platforms


@pytest.fixture
def machine(tmp_path, monkeypatch):
  """Makes a machine with device files, packages and variables."""

  def machine(*files, packages=(), **variables):
    for name in files:
      (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
      (tmp_path / name).touch()
    monkeypatch.setattr(platforms, "_DEV", tmp_path)
    monkeypatch.setattr(
      importlib.util, "find_spec", lambda name: name in packages or None
    )
    # A plain dict, because `restrict` sets variables.
    monkeypatch.setattr(os, "environ", variables)

  return machine


@pytest.mark.parametrize(
  ("files", "settings", "expected"),
  [
    ([], {}, "cpu"),
    (["nvidia0"], {}, "cpu"),
    ([], {"packages": ["jax_cuda12_plugin"]}, "cpu"),
    (["nvidia0"], {"packages": ["jax_cuda12_plugin"]}, "cuda"),
    (["nvidia3"], {"packages": ["jax_cuda13_plugin"]}, "cuda"),
    (["nvidiactl"], {"packages": ["jax_cuda12_plugin"]}, "cpu"),
    (
      ["nvidia0"],
      {"packages": ["jax_cuda12_plugin"], "CUDA_VISIBLE_DEVICES": ""},
      "cpu",
    ),
    (
      ["nvidia0"],
      {"packages": ["jax_cuda12_plugin"], "JAX_PLATFORMS": "cpu"},
      "cpu",
    ),
    ([], {"JAX_PLATFORMS": "gpu,cpu"}, "cuda"),
    (["accel0"], {"packages": ["libtpu"]}, "tpu"),
    (["vfio/0"], {"packages": ["libtpu"]}, "tpu"),
  ],
)
def test_platform_is_known_before_jax(machine, files, settings, expected):
  machine(*files, **settings)
  assert platforms.expected() == expected


@pytest.mark.parametrize(
  ("devices", "visible", "expected"),
  [
    ("all", None, None),
    ("0,1", None, "0,1"),
    ("1", "4,5", "5"),
    ("0", "GPU-a,GPU-b", "GPU-a"),
  ],
)
def test_devices_are_indices_into_the_visible_ones(
  machine, devices, visible, expected
):
  machine(**({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
  platforms.restrict(devices)
  assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected
  assert "JAX_PLATFORMS" not in os.environ


def test_no_accelerator_is_left_to_a_command_on_the_cpu(machine):
  machine("nvidia0", packages=["jax_cuda12_plugin"])
  platforms.restrict("cpu")
  assert platforms.expected() == "cpu"


@pytest.mark.parametrize(
  ("devices", "variables"),
  [
    ("gpu", {}),
    ("0;1", {}),
    ("2", {"CUDA_VISIBLE_DEVICES": "4,5"}),
    ("0", {"CUDA_VISIBLE_DEVICES": ""}),
  ],
)
def test_invalid_devices_are_refused(machine, devices, variables):
  machine(**variables)
  with pytest.raises(ValueError, match=f"'{devices}'"):
    platforms.restrict(devices)


def test_a_missing_cpu_is_an_error_that_names_the_variable(monkeypatch):
  def devices(backend=None):
    raise RuntimeError("Unknown backend cpu")

  monkeypatch.setattr(jax, "local_devices", devices)
  with pytest.raises(ValueError, match="JAX_PLATFORMS"):
    platforms.cpu()
