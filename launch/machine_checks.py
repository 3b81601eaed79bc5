"""What a machine has: Python, packages, devices."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
import sys
from collections.abc import Iterator

from packaging import requirements

from launch import checks

_PYTHON = (3, 11)
REQUIREMENTS = pathlib.Path(__file__).resolve().parent.parent / (
  "requirements.txt"
)


def python() -> checks.Finding:
  """The interpreter's version."""
  found = ".".join(map(str, sys.version_info[:3]))
  if sys.version_info < _PYTHON:
    return checks.problem(
      f"found {found}, expected {'.'.join(map(str, _PYTHON))} or newer",
      "make the environment again with a newer Python.",
    )
  return checks.ok(found)


def packages(path: pathlib.Path = REQUIREMENTS) -> Iterator[checks.Finding]:
  """Versions against the list of what is required.

  Args:
    path: of the list; where it is not there, what the package says itself.
  """
  wanted = _wanted(path)
  good = 0
  for line in wanted:
    want = requirements.Requirement(line)
    try:
      found = importlib.metadata.version(want.name)
    except importlib.metadata.PackageNotFoundError:
      found = None
    if found and want.specifier.contains(found, prereleases=True):
      good += 1
      continue
    yield checks.problem(
      f"{want.name}: found {found or 'none'}, expected {want.specifier}",
      f"pip install '{want}'",
    )
  yield checks.ok(f"{good} of {len(wanted)} are as required")
  yield from _plugins()


def devices() -> Iterator[checks.Finding]:
  """What JAX computes on."""
  import jax

  found = jax.devices()
  first = found[0]
  yield checks.ok(
    f"{len(found)} x {first.device_kind} ({first.platform}), "
    f"{len(jax.local_devices())} of this process"
  )
  gpus = sorted(pathlib.Path("/dev").glob("nvidia[0-9]*"))
  if gpus and first.platform == "cpu":
    yield checks.warning(
      f"this machine has {len(gpus)} NVIDIA GPUs, and JAX computes on the CPU",
      "pip install 'jax[cuda12]' of JAX's own version, and see that "
      "JAX_PLATFORMS is not set.",
    )


def available_memory() -> int | None:
  """Bytes of RAM that are free for use; None where nobody says."""
  try:
    text = pathlib.Path("/proc/meminfo").read_text()
  except OSError:
    return None
  match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.M)
  return int(match[1]) * 1024 if match else None


def device_memory() -> int | None:
  """Bytes of the smallest device's own memory; None where it has none."""
  import jax

  limits = [
    (device.memory_stats() or {}).get("bytes_limit")
    for device in jax.local_devices()
    if device.platform != "cpu"
  ]
  return min((limit for limit in limits if limit), default=None)


def _wanted(path: pathlib.Path) -> list[str]:
  if path.is_file():
    lines = (x.partition("#")[0].strip() for x in path.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("-")]
  listed = importlib.metadata.requires("anysearch_jax") or []
  return [line for line in listed if "extra ==" not in line]


def _plugins() -> Iterator[checks.Finding]:
  """JAX's plugins have to be of its own version."""
  own = importlib.metadata.version("jax")
  for plugin in ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin"):
    try:
      found = importlib.metadata.version(plugin)
    except importlib.metadata.PackageNotFoundError:
      continue
    if found != own:
      yield checks.warning(
        f"{plugin}: found {found} beside jax {own}",
        f"pip install '{plugin}=={own}'",
      )
