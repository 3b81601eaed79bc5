"""Checks an installation, and what a run of a configuration needs.

    anysearch doctor
    anysearch doctor --config=configs/qwen3_4b.py --output=runs/x

Each check prints one line: ok, warning or problem, what was found, and what to
do. Nothing is changed, started or paid for, except that --ask_web sends one
query to a web search engine, and --play=16 plays so many episodes, to see
whether a training would learn from their rewards. The exit code is 1 if there
is a problem.
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

from absl import flags
from packaging import requirements

from anysearch_jax import config as config_lib
from anysearch_jax.host import platforms
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import jax_setup, shipped
from anysearch_jax.launch.findings import (
  PROBLEM,
  WARNING,
  Check,
  Finding,
  ok,
  problem,
  warning,
)

_START = "import jax; jax.devices()"
_ERROR_CHARACTERS = 300
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
  "python-calamine": "python_calamine",
}


def define_flags() -> None:
  launch_flags.define_config(required=False)
  launch_flags.define_output()
  launch_flags.define_agents()
  flags.DEFINE_integer(
    "processes",
    1,
    "Processes like this one that will train; with more than one, the mesh is "
    "not compared with the devices of this one.",
    lower_bound=1,
  )
  flags.DEFINE_bool(
    "ask_web",
    False,
    "Send one query to the configured web search or paid MCP tool, for its "
    "price.",
  )
  flags.DEFINE_integer(
    "play",
    0,
    "Episodes of the policy to play first, 16 for example: if their rewards "
    "are equal, a training learns nothing.",
    0,
  )
  flags.DEFINE_float(
    "deadline",
    120,
    "Seconds that each check may take; raise it for a slow disk or server.",
    0.1,
  )


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  # The checks only look at the devices, so they must not reserve their memory.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  config = launch_flags.read_config() if f.config or f.set_config else None
  levels = [
    finding.level
    for finding in examine(
      config,
      output=f.output,
      processes=f.processes,
      ask_web=f.ask_web,
      deadline=f.deadline,
      episodes=f.play,
    )
  ]
  print(f"{levels.count(PROBLEM)} problems, {levels.count(WARNING)} warnings")
  sys.stdout.flush()
  # A hanging check could block an orderly exit.
  os._exit(1 if PROBLEM in levels else 0)


def examine(
  config: config_lib.ExperimentConfig | None,
  *,
  output: str | None = None,
  processes: int = 1,
  ask_web: bool = False,
  deadline: float = 120.0,
  episodes: int = 0,
) -> Iterator[Finding]:
  """Runs the checks, prints each finding at once, and yields it.

  Args:
    config: configuration of the run; None: the installation alone is checked.
    output: folder of the run.
    processes: number of processes like this one that will train.
    ask_web: whether to send a query to a web search engine.
    deadline: seconds that each check may take, but for the play of episodes,
      whose turns have deadlines of their own.
    episodes: number of episodes to play; 0: none.
  """
  checks: list[tuple[str, Check]] = [
    ("python", python),
    ("packages", packages),
    ("devices", devices),
  ]
  levels = []
  for name, check in checks:
    for finding in _run_and_print(name, check, deadline):
      levels.append(finding.level)
      yield finding
  # The remaining checks import JAX, so they need the ones above to pass.
  if config is None or PROBLEM in levels:
    return
  from anysearch_jax.launch import run_checks

  folder = launch_flags.run_folder(config, output)
  checks_of_run = run_checks.Checks(
    config=config,
    folder=folder,
    processes=processes,
    ask_web=ask_web,
    episodes=episodes,
  )
  for name, check in checks_of_run.all():
    limit = None if name == run_checks.PLAY else deadline
    yield from _run_and_print(name, check, limit)


def _run_and_print(
  name: str, check: Check, deadline: float | None
) -> list[Finding]:
  """Runs a check, prints its findings and returns them."""
  findings = run_check(check, deadline=deadline)
  for line in finding_lines(name, findings):
    print(line, flush=True)
  return findings


def run_check(check: Check, *, deadline: float | None) -> list[Finding]:
  """Returns the findings of a check; a timeout or an exception is a problem.

  The check may be slow, and may raise. It runs on a daemon thread, which is
  abandoned if it hangs for `deadline` seconds; None waits for its end.
  """
  outcome: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()

  def work() -> None:
    try:
      findings = check()
      outcome.put(
        [findings] if isinstance(findings, Finding) else list(findings)
      )
    except (ValueError, OSError) as error:
      outcome.put([problem(str(error) or type(error).__name__)])
    except BaseException as error:  # A broken installation may raise anything.
      sentence = f"found {type(error).__name__}: {error}"
      advice = "look after what it names; where that is in order, report it."
      outcome.put([problem(sentence, advice)])

  threading.Thread(target=work, daemon=True).start()
  try:
    return outcome.get(timeout=deadline)
  except queue.Empty:
    sentence = f"found no answer within {deadline:g} seconds"
    advice = (
      "see what it waits for (device, disk, server), or raise --deadline."
    )
    return [problem(sentence, advice)]


def finding_lines(name: str, findings: Iterable[Finding]) -> Iterator[str]:
  """Yields the printed lines of each finding."""
  for finding in findings:
    sentence = " ".join(finding.found.split())
    yield f"{finding.level:<8} {name:<11} {sentence}"
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
  required = [
    requirements.Requirement(line) for line in _requirement_lines(path)
  ]
  valid_names = []
  for requirement in required:
    version = _version(requirement.name)
    if version and requirement.specifier.contains(version, prereleases=True):
      valid_names.append(requirement.name)
      continue
    yield problem(
      f"{requirement.name}: found {version or 'none'}, expected "
      f"{requirement.specifier}",
      f"pip install '{requirement}'",
    )
  modules = [_MODULES.get(name, name.replace("-", "_")) for name in valid_names]
  # In a process of its own, which a broken library may end.
  reason = _failure("\n".join(f"import {module}" for module in modules))
  if reason:
    yield problem(
      f"found a package that cannot be imported ({reason})",
      "pip install --force-reinstall it; a library that it names comes from "
      "the system's packages.",
    )
  yield ok(f"{len(valid_names)} of {len(required)} are as required")


def _version(package: str) -> str | None:
  """Returns the version of an installed package."""
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _failure(code: str, **variables: str) -> str:
  """Returns why a process cannot run Python code; "" if it can.

  `variables` are set in its environment.
  """
  process = subprocess.run(
    [sys.executable, "-c", code],
    env=os.environ | variables,
    capture_output=True,
    text=True,
    timeout=_IMPORT_SECONDS,
    check=False,
  )
  if process.returncode == 0:
    return ""
  lines = filter(None, reversed(process.stderr.split("\n")))
  return next(lines, f"the process ended with {process.returncode}")[
    :_ERROR_CHARACTERS
  ]


def devices() -> Iterator[Finding]:
  """Reports the devices that JAX computes on.

  A plug-in that is installed may still fail to start; JAX then computes on the
  CPU. So the plug-in is started by itself, and its error is reported.
  """
  jax_setup.configure(threads=0, cache="")
  import jax

  all_devices = jax.devices()
  first_device = all_devices[0]
  yield ok(
    f"{len(all_devices)} x {first_device.device_kind} "
    f"({first_device.platform}), {len(jax.local_devices())} of this process"
  )
  for platform, extra in _INSTALLS.items():
    if first_device.platform == "cpu" and platforms.has_device(platform):
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


def _requirement_lines(path: pathlib.Path) -> list[str]:
  if path.is_file():
    lines = (x.partition("#")[0].strip() for x in path.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("-")]
  installed = importlib.metadata.requires("anysearch_jax") or []
  return [
    line
    for line in installed
    if "extra ==" not in line or 'extra == "train"' in line
  ]


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main)
