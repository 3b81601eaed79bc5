"""Runs the whole quickstart: four trainings, evaluations, one report.

    python -m launch.quickstart            # `make quickstart`
    python -m launch.quickstart --full     # every budget, full n, 3 seeds

Each command is printed when it starts, so that you can run it by hand. Three
run at a time, each on one thread; their output goes to `<output>/logs/`. The
first training compiles the programs of all; the others wait for them. A stage
whose result exists is not run again, even if the code or the configuration has
changed: remove the folder to start over.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence

from absl import flags

from launch import flags as launch_flags
from launch import progress, shipped, stopping, supervisor

_MAIN = "configs/quickstart.py"
# Presets of the configuration, and their names in the report.
_METHODS = {
  "anysearch": "AnySearch",
  "priced": "Priced search",
  "no_tool": "No tool reward",
  "search_r1": "Search-R1-like",
}
# The longest training starts first, so that none runs alone at the end.
_ORDER = ("search_r1", "no_tool", "priced", "anysearch")
# Agents that know the world's statistics, see docs/quickstart.md.
_EXACT = {
  "optimum": "Optimum",
  "everything": "Search everything",
  "unknown_only": "Search the unknown",
}


_POLL = 0.2  # Seconds between polls of the running processes.
_SHOW = 5.0  # Seconds between progress lines of one process.


def plan(root: pathlib.Path, *, full: bool) -> list[Job]:
  """Returns the jobs in the order to start them: trainings first, report last.

  The warm start's evaluation runs beside the first training. The other
  trainings start when the first one has trained on a rollout: all programs are
  then in the compilation cache.

  `full` runs every budget, all questions and three seeds.
  """
  seeds = (42, 43, 44) if full else (42,)

  def evaluation(
    name: str,
    player: str,
    folder: pathlib.Path,
    seeds: tuple[int, ...],
    *,
    few: bool = False,
    scaffold: bool = False,
    after: tuple[str, ...] = (),
  ) -> Job:
    output = folder / "evaluation" / ("scaffold" if scaffold else "plain")
    budgets = "0,1,2,3,4,5,6,7,8" if full else "0,1,2,3,5,8"
    questions = 1000 if full else 300 if few else 600
    command = [
      *("-m", "launch.evaluate", f"--config={_MAIN}", player),
      f"--config.evaluation.budgets={budgets}",
      f"--config.evaluation.questions={questions}",
      f"--config.evaluation.seeds={','.join(map(str, seeds))}",
      f"--config.evaluation.scaffold={str(scaffold).lower()}",
      *(f"--output={output}", "--threads=1"),
    ]
    return Job(name, command, output / "episodes.jsonl", after)

  trainings: list[Job] = []
  evaluations: list[Job] = []
  compiled = root / f"{_ORDER[0]}-{seeds[0]}" / "metrics.jsonl"
  for seed in seeds:
    for method in _ORDER:
      folder = root / f"{method}-{seed}"
      train = Job(
        f"train {method} {seed}",
        [
          *("-m", "launch.train", f"--config={_MAIN}:{method}"),
          f"--config.seed={seed}",
          *(f"--output={folder}", "--threads=1"),
        ],
        folder / "policy" / "config.json",
        once=compiled if trainings else None,
      )
      trainings.append(train)
      name, player = (
        f"evaluate {method} {seed}",
        f"--policy={folder / 'policy'}",
      )
      after = (train.name,)
      evaluations.append(evaluation(name, player, folder, (seed,), after=after))
      if method == "anysearch":
        name += " with scaffold"
        evaluations.append(
          evaluation(
            name, player, folder, (seed,), few=True, scaffold=True, after=after
          )
        )
  warm_start = evaluation(
    "evaluate warm start",
    "--policy=configs/graded_world_policy",
    root / "warm_start",
    seeds,
    few=True,
  )
  exact = [
    evaluation(f"play {name}", f"--scripted={name}", root / name, seeds[:1])
    for name in _EXACT
  ]
  jobs = [trainings[0], warm_start, *exact, *trainings[1:], *evaluations]
  return [*jobs, _report(root, seeds, jobs)]


def _report(root: pathlib.Path, seeds: tuple[int, ...], jobs: list[Job]) -> Job:
  def rows(*names: str, kind: str = "plain") -> str:
    return "+".join(str(root / name / "evaluation" / kind) for name in names)

  def trained(method: str) -> list[str]:
    return [f"{method}-{seed}" for seed in seeds]

  output = root / "report.html"
  notes = "\n".join(shlex.join(["python", *job.command]) for job in jobs)
  command = [
    *("-m", "launch.report"),
    *(f"{label}={rows(*trained(name))}" for name, label in _METHODS.items()),
    f"Warm start={rows('warm_start')}",
    f"AnySearch + scaffold={rows(*trained('anysearch'), kind='scaffold')}",
    *(f"{label}={rows(name)}" for name, label in _EXACT.items()),
    *(f"--notes={notes}", f"--output={output}"),
  ]
  after = tuple(job.name for job in jobs)
  return Job("report", command, output, after, reports=True)


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("output", "runs/quickstart", "Folder.")
  flags.DEFINE_bool(
    "full", False, "Every budget, full n, three training seeds."
  )
  flags.DEFINE_integer("jobs", 3, "Processes at a time.", lower_bound=1)


def main(argv: Sequence[str]) -> None:
  del argv
  root = pathlib.Path(flags.FLAGS.output)
  started = time.monotonic()
  print(f"{os.cpu_count()} cores, load average {_load()} before the start")
  run(
    plan(root, full=flags.FLAGS.full), root / "logs", at_once=flags.FLAGS.jobs
  )
  took = progress.duration(time.monotonic() - started)
  print(f"all done in {took}, load average {_load()}")


def _load() -> str:
  """Returns the load average of the last minute."""
  return f"{os.getloadavg()[0]:.1f}"


@dataclasses.dataclass
class Job:
  """One command of the Python interpreter.

  Attributes:
    name: the displayed name, also the name of its log.
    command: arguments of the interpreter.
    result: the file that exists once the job is done.
    after: names of the jobs that it needs.
    once: a file of another job; while others run, this one starts only when
      that file has content.
    reports: whether it runs again if its result exists, and its output is
      printed at the end.
  """

  name: str
  command: list[str]
  result: pathlib.Path
  after: tuple[str, ...] = ()
  once: pathlib.Path | None = None
  reports: bool = False

  def held(self) -> bool:
    """Returns whether the file that it waits for is missing or empty."""
    return self.once is not None and not (
      self.once.is_file() and self.once.stat().st_size
    )

  def shown(self) -> str:
    """Returns the command as a user would type it."""
    # The notes are all other commands, which were shown before.
    brief = [a for a in self.command if not a.startswith("--notes=")]
    return shlex.join(["python", *brief])


def run(jobs: Sequence[Job], logs: pathlib.Path, *, at_once: int) -> None:
  """Runs the jobs when the jobs that they need are done, in the given order.

  At most `at_once` processes run at a time; their output goes to `logs`.

  Raises:
    SystemExit: a command failed or a signal arrived. The other commands are
      stopped and may save first; a second signal kills them.
  """
  asked, urged = threading.Event(), threading.Event()

  def first(number: int) -> None:
    stopping.say(f"stopping on {signal.Signals(number).name}")
    asked.set()

  logs.mkdir(parents=True, exist_ok=True)
  done = {j.name for j in jobs if j.result.is_file() and not j.reports}
  if done:
    print(f"Results stand in {logs.parent}; remove it to start over.")
  for name in sorted(done):
    print(f"already there, not run again: {name}", flush=True)
  reports = {job.name for job in jobs if job.reports}
  waiting = [job for job in jobs if job.name not in done]
  running: dict[str, supervisor.Running] = {}
  with stopping.heard(first, lambda number: urged.set()):
    try:
      while waiting or running:
        for job in [j for j in waiting if set(j.after) <= done]:
          if len(running) < at_once and not (running and job.held()):
            waiting.remove(job)
            running[job.name] = _started(job, logs)
        if not running:
          needed = {name for job in waiting for name in job.after} - done
          sys.exit(
            f"Nothing can run: {', '.join(sorted(needed))} is not there."
          )
        if asked.wait(_POLL):
          raise stopping.StoppedError(stopping.RESUME)
        for name in [n for n in running if _ended(running[n])]:
          ended = running.pop(name)
          done.add(name)
          if name in reports:
            print(ended.text(), flush=True)
    finally:
      supervisor.stop(list(running.values()), urged=urged.is_set)


def _started(job: Job, logs: pathlib.Path) -> supervisor.Running:
  print(f"\n[{job.name}] {job.shown()}", flush=True)
  name = job.name.replace(" ", "-")  # Also of its log.
  part = supervisor.Part(name, (*shipped.python(), *job.command))
  return supervisor.Running(part, logs, every=_SHOW)


def _ended(each: supervisor.Running) -> bool:
  """Prints progress; returns whether a command is done."""
  if (code := each.code) is None:
    each.show()
    return False
  if code == stopping.RESUME:
    each.say("was stopped, and so are the others")
    raise stopping.StoppedError(code)
  if code:
    sys.exit(str(each.failure(f"failed with code {code}")))
  each.say(f"done in {each.took}")
  return True


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, resumes=True)
