"""Checks an installation, and what a run of a configuration needs.

    python -m launch.doctor
    python -m launch.doctor --config=configs/qwen3_4b.py --output=runs/x

Each check prints one line: ok, warning or problem, what was found, and what to
do. Nothing is changed, started or paid for, except that --ask_web sends one
query to a web search engine. The exit code is 1 if there is a problem.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
from collections.abc import Iterator

from absl import app, flags

from anysearch_jax import config as config_lib
from launch import checks, jax_setup, machine_checks
from launch import flags as launch_flags


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  launch_flags.define_config(required=False)
  launch_flags.define_output()
  flags.DEFINE_integer(
    "processes", 1, "Processes like this one that will train.", lower_bound=1
  )
  flags.DEFINE_bool("ask_web", False, "Ask a web search engine, for its price.")
  flags.DEFINE_float(
    "deadline", 120, "Seconds that a check may take.", lower_bound=0.1
  )
  flags.DEFINE_integer("threads", 0, "CPU threads; 0: XLA's own choice.")


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  # The checks only look at the devices, so they must not reserve their memory.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  config = launch_flags.read_config() if f.config or f.set_config else None
  found = list(
    examine(
      config,
      output=f.output,
      processes=f.processes,
      ask_web=f.ask_web,
      deadline=f.deadline,
      threads=f.threads,
    )
  )
  problems = sum(finding.level == checks.PROBLEM for finding in found)
  warnings = sum(finding.level == checks.WARNING for finding in found)
  print(f"{problems} problems, {warnings} warnings")
  sys.stdout.flush()
  # A hanging check could block an orderly exit.
  os._exit(1 if problems else 0)


def examine(
  config: config_lib.ExperimentConfig | None,
  *,
  output: str | None = None,
  processes: int = 1,
  ask_web: bool = False,
  deadline: float = 120.0,
  threads: int = 0,
) -> Iterator[checks.Finding]:
  """Runs the checks, prints each finding at once, and yields it.

  Args:
    config: configuration of a run; None checks the installation only.
    output: folder of the run; None is the default folder.
    processes: number of processes like this one that will train.
    ask_web: whether to send a query to a web search engine.
    deadline: seconds that each check may take.
    threads: CPU threads, as for `jax_setup.configure`.
  """

  def look(name: str, check) -> list[checks.Finding]:
    found = checks.run(checks.Check(name, check), deadline=deadline)
    for line in checks.lines(name, found):
      print(line, flush=True)
    return found

  yield from look("python", machine_checks.python)
  yield from look("packages", machine_checks.packages)
  setup = functools.partial(jax_setup.configure, threads=threads, cache="")

  def devices() -> Iterator[checks.Finding]:
    setup()
    return machine_checks.devices()

  yield from (found := look("devices", devices))
  # The remaining checks import JAX, so they need the ones above to pass.
  if config is None or any(x.level == checks.PROBLEM for x in found):
    return
  yield from _of_run(
    config,
    look,
    folder=launch_flags.run_folder(config, output),
    processes=processes,
    ask_web=ask_web,
  )


def _of_run(
  config: config_lib.ExperimentConfig,
  look,
  *,
  folder: pathlib.Path,
  processes: int,
  ask_web: bool,
) -> Iterator[checks.Finding]:
  """Yields the findings about what a configuration needs."""
  from launch import policy_checks, run_checks

  yield from look("config", lambda: run_checks.configuration(config))
  held: list[policy_checks.Described] = []

  def policy() -> checks.Finding:
    held.append(policy_checks.folder(config.policy))
    return checks.ok(held[0].words)

  yield from look("policy", policy)
  if held:
    a, codec, _ = held[0]
    yield from look("texts", lambda: policy_checks.texts(codec, config))
    yield from look("mesh", lambda: run_checks.mesh(a, config, processes))
    yield from look("accelerator", lambda: run_checks.accelerated(a))
    yield from look("memory", lambda: run_checks.memory(a, config))
    yield from look("disk", lambda: run_checks.disk(a, config, folder))
    if config.engine.kind == "sglang":
      yield from look("weights", lambda: run_checks.handed_over(a, config))
  yield from look("output", lambda: run_checks.output(folder))
  yield from look("data", lambda: run_checks.data(config))
  yield from look(
    "retriever", lambda: run_checks.retriever(config, ask_web=ask_web)
  )
  if config.engine.kind == "sglang":
    yield from look("servers", lambda: run_checks.servers(config))


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main)
