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


def test_a_missing_cpu_is_an_error_that_names_the_variable(monkeypatch):
  def devices(backend=None):
    raise RuntimeError("Unknown backend cpu")

  monkeypatch.setattr(jax, "local_devices", devices)
  with pytest.raises(ValueError, match="JAX_PLATFORMS"):
    platforms.cpu()
