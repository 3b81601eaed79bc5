"""Checks an installation, and what a run of a configuration needs.

    python -m launch.doctor
    python -m launch.doctor --config=configs/qwen3_4b.py --output=runs/x

Each check prints one line: ok, warning or problem, what was found, and what to
do. Nothing is changed, started or paid for, except that --ask_web sends one
query to a web search engine. The exit code is 1 if there is a problem.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import pathlib
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any

from absl import flags
from packaging import requirements

from anysearch_jax import config as config_lib
from anysearch_jax.host import platforms
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import jax_setup, shipped
from anysearch_jax.launch.findings import (
  PROBLEM,
  WARNING,
  Finding,
  Look,
  ok,
  problem,
  warning,
)

_START = "import jax; jax.devices()"
_LONGEST = 300  # Characters of an error.
# By platform, the extras that make JAX compute on it.
_INSTALLS = {"cuda": "cuda13", "tpu": "tpu"}
_IMPORT_SECONDS = 110.0  # A check has 120 by default.
REQUIREMENTS = shipped.ROOT / "requirements.txt"
# The modules of packages that are imported under another name.
_MODULES = {
  "absl-py": "absl",
  "faiss-cpu": "faiss",
  "orbax-checkpoint": "orbax.checkpoint",
  "PyStemmer": "Stemmer",
  "python-docx": "docx",
}


def define_flags() -> None:
  launch_flags.define_config(required=False)
  launch_flags.define_output()
  flags.DEFINE_integer(
    "processes", 1, "Processes like this one that will train.", lower_bound=1
  )
  flags.DEFINE_bool("ask_web", False, "Ask a web search engine, for its price.")
  flags.DEFINE_float("deadline", 120, "Seconds that a check may take.", 0.1)
  flags.DEFINE_integer("threads", 0, "CPU threads; 0: XLA's own choice.")


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  # The checks only look at the devices, so they must not reserve their memory.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  config = launch_flags.read_config() if f.config or f.set_config else None
  names = ("output", "processes", "ask_web", "deadline", "threads")
  given: dict[str, Any] = {name: f[name].value for name in names}
  found = [finding.level for finding in examine(config, **given)]
  print(f"{found.count(PROBLEM)} problems, {found.count(WARNING)} warnings")
  sys.stdout.flush()
  # A hanging check could block an orderly exit.
  os._exit(1 if PROBLEM in found else 0)


def examine(
  config: config_lib.ExperimentConfig | None,
  *,
  output: str | None = None,
  processes: int = 1,
  ask_web: bool = False,
  deadline: float = 120.0,
  threads: int = 0,
) -> Iterator[Finding]:
  """Runs the checks, prints each finding at once, and yields it.

  Without a configuration the installation alone is checked. `deadline` is the
  seconds of each check, `threads` as for `jax_setup.configure`.
  """

  def look(name: str, check: Look) -> list[Finding]:
    found = run(check, deadline=deadline)
    for line in lines(name, found):
      print(line, flush=True)
    return found

  def started() -> Iterator[Finding]:
    jax_setup.configure(threads=threads, cache="")
    return devices()

  yield from look("python", python)
  yield from look("packages", packages)
  yield from (found := look("devices", started))
  # The remaining checks import JAX, so they need the ones above to pass.
  if config is None or any(x.level == PROBLEM for x in found):
    return
  from anysearch_jax.launch import run_checks

  folder = launch_flags.run_folder(config, output)
  checks = run_checks.Checks(config, folder, processes, ask_web)
  for name, check in checks.all():
    yield from look(name, check)


def run(look: Look, *, deadline: float) -> list[Finding]:
  """Returns what a check finds; a timeout or an exception is a problem too.

  The check may be slow, and may raise. It runs on a daemon thread, which is
  abandoned if it hangs for `deadline` seconds.
  """
  outcome: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()

  def work() -> None:
    try:
      found = look()
      outcome.put([found] if isinstance(found, Finding) else list(found))
    except (ValueError, OSError) as error:
      outcome.put([problem(str(error) or type(error).__name__)])
    except BaseException as error:  # A broken installation may raise anything.
      said = f"found {type(error).__name__}: {error}"
      todo = "look after what it names; where that is in order, report it."
      outcome.put([problem(said, todo)])

  threading.Thread(target=work, daemon=True).start()
  try:
    return outcome.get(timeout=deadline)
  except queue.Empty:
    said = f"found no answer within {deadline:g} seconds"
    todo = "see what it waits for (device, disk, server), or raise --deadline."
    return [problem(said, todo)]


def lines(name: str, findings: Iterable[Finding]) -> Iterator[str]:
  """Yields the printed lines of each finding."""
  for finding in findings:
    said = " ".join(finding.found.split())
    yield f"{finding.level:<8} {name:<11} {said}"
    if finding.todo:
      yield f"{'':<21}{finding.todo}"


def python() -> Finding:
  """Reports the version of the interpreter; older ones cannot come here."""
  return ok(".".join(map(str, sys.version_info[:3])))


def packages(path: pathlib.Path = REQUIREMENTS) -> Iterator[Finding]:
  """Compares versions with the list of requirements and imports each package.

  A package can have the right version and still fail to import, because it was
  copied only in part or because a system library is missing. Without the list
  the metadata of this package is read.
  """
  wanted = [requirements.Requirement(line) for line in _wanted(path)]
  good = []
  for want in wanted:
    found = _version(want.name)
    if found and want.specifier.contains(found, prereleases=True):
      good.append(want)
      continue
    yield problem(
      f"{want.name}: found {found or 'none'}, expected {want.specifier}",
      f"pip install '{want}'",
    )
  broken = _broken(tuple(want.name for want in good))
  for name, reason in broken.items():
    yield problem(
      f"{name}: found that it cannot be imported ({reason})",
      f"pip install --force-reinstall '{name}'; a library that it names comes "
      "from the system's packages.",
    )
  yield ok(
    f"{len(good) - len(broken)} of {len(wanted)} are as required and import"
  )
  own = _version("jax")
  for plugin in ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin"):
    if (found := _version(plugin)) not in (own, None):
      yield warning(
        f"{plugin}: found {found} beside jax {own}",
        f"pip install '{plugin}=={own}'",
      )


def _version(package: str) -> str | None:
  """Returns the version of an installed package."""
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


@functools.cache
def _broken(names: tuple[str, ...]) -> dict[str, str]:
  """Returns the packages that do not import, with the reason.

  They are imported in processes of their own: a broken library can end one.
  """
  code = {
    name: f"import {_MODULES.get(name, name.replace('-', '_'))}"
    for name in names
  }
  if not _failure("\n".join(code.values())):
    return {}
  with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    reasons = zip(code, pool.map(_failure, code.values()), strict=True)
    return {name: reason for name, reason in reasons if reason}


def _failure(code: str, **variables: str) -> str:
  """Returns why a process cannot run Python code; "" if it can.

  `variables` are set in its environment.
  """
  done = subprocess.run(
    [sys.executable, "-c", code],
    env=os.environ | variables,
    capture_output=True,
    text=True,
    timeout=_IMPORT_SECONDS,
    check=False,
  )
  if done.returncode == 0:
    return ""
  lines = filter(None, reversed(done.stderr.split("\n")))
  return next(lines, f"the process ended with {done.returncode}")[:_LONGEST]


def devices() -> Iterator[Finding]:
  """Reports the devices that JAX computes on.

  A plug-in that is installed may still fail to start; JAX then computes on the
  CPU. So the plug-in is started by itself, and its error is reported.
  """
  import jax

  found = jax.devices()
  first = found[0]
  yield ok(
    f"{len(found)} x {first.device_kind} ({first.platform}), "
    f"{len(jax.local_devices())} of this process"
  )
  for platform, extra in _INSTALLS.items():
    if first.platform == "cpu" and platforms.has_device(platform):
      yield warning(
        f"this machine has a {platform.upper()} device, and JAX computes on "
        f"the CPU ({_refusal(platform)})",
        f"Run `make setup EXTRAS={extra}` in a checkout, and see that "
        "JAX_PLATFORMS is not set (docs/one_gpu.md).",
      )


@functools.cache
def _refusal(platform: str) -> str:
  """Returns why JAX does not start on a platform, as its plug-in says."""
  if not platforms.plugins(platform):
    return "no plug-in is installed"
  failure = _failure(_START, JAX_PLATFORMS=platform)
  return failure or "it starts if JAX_PLATFORMS names it"


def _wanted(path: pathlib.Path) -> list[str]:
  if path.is_file():
    lines = (x.partition("#")[0].strip() for x in path.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("-")]
  listed = importlib.metadata.requires("anysearch_jax") or []
  return [line for line in listed if "extra ==" not in line]


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main)
