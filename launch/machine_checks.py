"""Checks of a machine: Python, packages, devices."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

from packaging import requirements

from anysearch_jax.host import platforms
from launch import checks, shipped

_PYTHON = (3, 11)
_START = "import jax; jax.devices()"
_LONGEST = 300  # Characters of an error.
# By platform, the lists of requirements that make JAX compute on it.
_INSTALLS = {
  "cuda": "requirements-cuda12.txt (or cuda13)",
  "tpu": "requirements-tpu.txt",
}
_IMPORT_SECONDS = 110.0  # A check has 120 by default.
REQUIREMENTS = shipped.ROOT / "requirements.txt"

# The modules of packages that are imported under another name.
_MODULES = {
  "absl-py": "absl",
  "faiss-cpu": "faiss",
  "orbax-checkpoint": "orbax.checkpoint",
  "PyStemmer": "Stemmer",
}
# Imports each argument, PACKAGE=MODULE, and writes a line before and after it.
_IMPORT = """
import importlib, sys
for argument in sys.argv[1:]:
  package, _, module = argument.partition("=")
  print("try", package, flush=True)
  try:
    importlib.import_module(module)
  except BaseException as error:
    text = " ".join(str(error).split())
    print("failed", package, f"{type(error).__name__}: {text}", flush=True)
  else:
    print("good", package, flush=True)
"""


def python() -> checks.Finding:
  """Checks the version of the interpreter."""
  found = ".".join(map(str, sys.version_info[:3]))
  if sys.version_info < _PYTHON:
    return checks.problem(
      f"found {found}, expected {'.'.join(map(str, _PYTHON))} or newer",
      "make the environment again with a newer Python.",
    )
  return checks.ok(found)


def packages(path: pathlib.Path = REQUIREMENTS) -> Iterator[checks.Finding]:
  """Compares versions with the list of requirements and imports each package.

  A package can have the right version and still fail to import, because it was
  copied only in part or because a system library is missing.

  Args:
    path: the list; if it is missing, the metadata of this package is read.
  """
  wanted = [requirements.Requirement(line) for line in _wanted(path)]
  good = []
  for want in wanted:
    try:
      found = importlib.metadata.version(want.name)
    except importlib.metadata.PackageNotFoundError:
      found = None
    if found and want.specifier.contains(found, prereleases=True):
      good.append(want)
      continue
    yield checks.problem(
      f"{want.name}: found {found or 'none'}, expected {want.specifier}",
      f"pip install '{want}'",
    )
  broken = _broken(tuple(want.name for want in good))
  for name, reason in broken.items():
    yield checks.problem(
      f"{name}: found that it cannot be imported ({reason})",
      f"pip install --force-reinstall '{name}'; a library that it names comes "
      "from the system's packages.",
    )
  yield checks.ok(
    f"{len(good) - len(broken)} of {len(wanted)} are as required and import"
  )
  yield from _plugins()


@functools.cache
def _broken(names: tuple[str, ...]) -> dict[str, str]:
  """Returns the packages that do not import, with the reason.

  They are imported in a process of their own: a broken library can end it.
  """
  modules = [f"{x}={_MODULES.get(x, x.replace('-', '_'))}" for x in names]
  reasons: dict[str, str] = {}
  while modules:
    done = subprocess.run(
      [sys.executable, "-c", _IMPORT, *modules],
      capture_output=True,
      text=True,
      timeout=_IMPORT_SECONDS,
      check=False,
    )
    tried = 0
    for line in done.stdout.splitlines():
      verdict, _, rest = line.partition(" ")
      tried += verdict == "try"
      if verdict == "failed":
        name, _, reason = rest.partition(" ")
        reasons[name] = reason
    if done.returncode == 0:
      break
    # The module that was tried last ended the process; continue after it.
    name = modules[tried - 1].partition("=")[0]
    reasons[name] = f"the process ended with {done.returncode}"
    modules = modules[tried:] if tried else []
  return reasons


def devices() -> Iterator[checks.Finding]:
  """Reports the devices that JAX computes on.

  A plug-in that is installed may still fail to start; JAX then computes on the
  CPU. So the plug-in is started by itself, and its error is reported.
  """
  import jax

  found = jax.devices()
  first = found[0]
  yield checks.ok(
    f"{len(found)} x {first.device_kind} ({first.platform}), "
    f"{len(jax.local_devices())} of this process"
  )
  for platform, files in _INSTALLS.items():
    if first.platform == "cpu" and platforms.has_device(platform):
      yield checks.warning(
        f"this machine has a {platform.upper()} device, and JAX computes on "
        f"the CPU ({_refusal(platform)})",
        f"pip install -r {files} --constraint requirements.lock, and see that "
        "JAX_PLATFORMS is not set (docs/accelerators.md).",
      )


@functools.cache
def _refusal(platform: str) -> str:
  """Returns why JAX does not start on a platform, as its plug-in says."""
  if not platforms.plugins(platform):
    return "no plug-in is installed"
  done = subprocess.run(
    [sys.executable, "-c", _START],
    env=os.environ | {"JAX_PLATFORMS": platform},
    capture_output=True,
    text=True,
    timeout=_IMPORT_SECONDS,
    check=False,
  )
  if done.returncode == 0:
    return "it starts if JAX_PLATFORMS names it"
  lines = done.stderr.split("\n")
  last = next(filter(None, reversed(lines)), f"code {done.returncode}")
  return last[:_LONGEST]


def available_memory() -> int | None:
  """Returns the bytes of available RAM; None if the system does not say."""
  try:
    text = pathlib.Path("/proc/meminfo").read_text()
  except OSError:
    return None
  match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.M)
  return int(match[1]) * 1024 if match else None


def device_memory() -> int | None:
  """Returns the memory of the smallest local device; None if not reported."""
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
  """Warns of JAX plugins whose version differs from JAX's own."""
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
