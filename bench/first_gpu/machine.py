"""The installation, and what the device can do at most."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bench import copying, harness
from bench.first_gpu import notes as notes_lib

_PACKAGES = (
  "jax",
  "jaxlib",
  "jax-cuda12-plugin",
  "jax-cuda13-plugin",
  "nvidia-cudnn-cu12",
  "nvidia-cudnn-cu13",
  "libtpu",
  "flax",
  "optax",
  "orbax-checkpoint",
  "chex",
  "numpy",
  "safetensors",
  "tokenizers",
  "transformers",
  "absl-py",
)
_SMI = "name,driver_version,memory.total,power.limit,clocks.max.sm"
_CALLS = 20
_WARM = 3


def doctor(notes: notes_lib.Notes) -> None:
  """Reports versions, devices and what launch.doctor finds."""
  notes.add({name: found for name in _PACKAGES if (found := _version(name))})
  devices = jax.local_devices()
  notes.add(
    {
      "python": platform.python_version(),
      "cores": os.cpu_count(),
      "backend": jax.default_backend(),
      "devices": len(devices),
      "device": devices[0].device_kind,
      "compute capability": str(
        getattr(devices[0], "compute_capability", "none")
      ),
      "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
  )
  if stats := devices[0].memory_stats():
    limit = stats.get("bytes_limit", 0)
    notes.add({"memory that JAX may use, GiB": limit / 2**30})
  notes.case("nvidia-smi", _nvidia_smi)
  notes.case("launch.doctor", _launch_doctor)


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _nvidia_smi() -> Mapping[str, Any]:
  if shutil.which("nvidia-smi") is None:
    raise notes_lib.SkippedError("there is no nvidia-smi")
  done = subprocess.run(
    ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader"],
    capture_output=True,
    text=True,
    timeout=30,
    check=True,
  )
  return dict(zip(_SMI.split(","), done.stdout.splitlines()[0].split(", ")))


def _launch_doctor() -> Mapping[str, Any]:
  """Returns findings that are not ok; packages that the bench lacks count."""
  from launch import checks
  from launch import doctor as doctor_lib

  found = [x for x in doctor_lib.examine(None) if x.level != checks.OK]
  return {f"finding {i}": str(x) for i, x in enumerate(found, 1)}


def peaks(notes: notes_lib.Notes) -> None:
  """Measures matrix products, at sizes of training and decode, and copies."""
  large, rows = (256, 8) if notes.rehearse else (8192, 128)
  products: tuple[tuple[str, tuple[int, int, int], str], ...] = (
    ("square bfloat16", (large, large, large), "bfloat16"),
    ("square float32", (large // 2, large // 2, large // 2), "float32"),
    # Qwen3-4B's gate and up, for a micro-batch and for a decode step.
    ("training bfloat16", (2 * large, 2560, 9728), "bfloat16"),
    ("decode bfloat16", (rows, 2560, 9728), "bfloat16"),
  )
  for name, (m, k, n), dtype in products:
    if notes.rehearse:
      k, n = min(k, large), min(n, large)
    notes.case(name, functools.partial(_product, m, k, n, dtype))
  for size in (22, 24) if notes.rehearse else (28, 32):
    notes.case(
      f"copy of 2^{size} bytes",
      functools.partial(_copy, 2**size),
    )
  notes.case(
    "from the host", lambda: _transfer(2**22 if notes.rehearse else 2**30)
  )


def _copy(size: int) -> Mapping[str, Any]:
  return {"GB/s": copying.bandwidth(size) / 1e9}


def _product(m: int, k: int, n: int, dtype: str) -> Mapping[str, Any]:
  a = jax.random.normal(jax.random.key(0), (m, k), dtype)
  b = jax.random.normal(jax.random.key(1), (k, n), dtype)
  product = jax.jit(jnp.matmul)
  seconds = _each(lambda: product(a, b))
  moved = a.nbytes + b.nbytes + m * n * a.dtype.itemsize
  return {
    "shape": f"{m} x {k} x {n}",
    "ms": 1e3 * seconds,
    "TFLOP/s": 2 * m * k * n / seconds / 1e12,
    "GB/s at least": moved / seconds / 1e9,
  }


def _each(call: Callable[[], jax.Array]) -> float:
  """Returns the seconds of one of many calls that wait for each other only."""
  for _ in range(_WARM):
    jax.block_until_ready(call())

  def calls() -> None:
    jax.block_until_ready([call() for _ in range(_CALLS)])

  return min(harness.seconds(calls) for _ in range(3)) / _CALLS


def _transfer(size: int) -> Mapping[str, Any]:
  """Measures copies between the host and the device."""
  import numpy as np

  host = np.ones(size // 4, np.float32)
  jax.device_put(host).block_until_ready()
  there = harness.seconds(lambda: jax.device_put(host).block_until_ready())
  on_device = jax.device_put(host) + 1
  on_device.block_until_ready()
  back = harness.seconds(lambda: np.asarray(on_device))
  return {
    "to the device, GB/s": size / there / 1e9,
    "to the host, GB/s": size / back / 1e9,
  }
