"""The platform that JAX computes on, and which of its devices are asked for."""

from __future__ import annotations

import importlib.util
import os
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  import jax

_DEV = pathlib.Path("/dev")
# By platform: the packages that make JAX compute on it, the device files of a
# machine that has it (/dev/dxg is that of Windows' Linux), and the variable
# that names the devices which a process may use.
_PLUGINS = {
  "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin"),
  "tpu": ("libtpu",),
}
_FILES = {
  "cuda": ("nvidia[0-9]*", "dxg"),
  "tpu": ("accel[0-9]*", "vfio/[0-9]*"),
}
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}


def expected() -> str:
  """Returns "cuda", "tpu" or "cpu": what JAX will compute on.

  JAX is not imported, because what depends on the answer is set before JAX
  starts. If a plug-in fails to load, JAX computes on the CPU all the same.
  """
  requested_platform = (
    os.environ.get("JAX_PLATFORMS", "").partition(",")[0].strip()
  )
  if requested_platform:
    return "cuda" if requested_platform == "gpu" else requested_platform
  for platform in _PLUGINS:
    hidden = os.environ.get(_VISIBLE[platform], "0") in ("", "-1")
    if plugins(platform) and not hidden and has_device(platform):
      return platform
  return "cpu"


def plugins(platform: str) -> list[str]:
  """Returns the installed packages that let JAX compute on a platform."""
  return [p for p in _PLUGINS[platform] if importlib.util.find_spec(p)]


def has_device(platform: str) -> bool:
  """Returns whether this machine shows a device of "cuda" or "tpu"."""
  return any(any(_DEV.glob(pattern)) for pattern in _FILES[platform])


def cpu() -> jax.Device:
  """Returns a CPU device, also where JAX computes on an accelerator.

  Raises:
    ValueError: JAX_PLATFORMS leaves the CPU out.
  """
  import jax

  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError as error:
    raise ValueError(
      f"JAX_PLATFORMS: found {os.environ.get('JAX_PLATFORMS')!r}, which leaves "
      "out the CPU that searches and encoders use; expected it to end in "
      "',cpu', or not to be set."
    ) from error


def accelerators() -> list[jax.Device] | None:
  """Returns this process's accelerators; None if JAX computes on the CPU."""
  import jax

  devices = jax.local_devices()
  return None if devices[0].platform == "cpu" else devices
