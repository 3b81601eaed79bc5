"""Runs the whole quickstart: trainings, evaluations, one report.

    python -m launch.quickstart            # `make quickstart`
    python -m launch.quickstart --full     # `make quickstart-full`

Trains a policy for every budget and, beside it, one for a budget of one search.
The report compares them with their warm start and the optimum. `--full` also
trains the other methods, twice as long, with three seeds, and plays more
questions, budgets and agents.

Each command is printed when it starts, so that you can run it by hand. As many
run at a time as there are cores, at most three, each on one thread; their
output goes to `<output>/logs/`. A stage whose result exists is not run again.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shlex
import sys
import time
from collections.abc import Sequence

from absl import flags

from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import progress, shipped, stopping, supervisor

_MAIN = "configs/quickstart.py"
# What is trained: its name in the report, its preset, other settings.
_TRAINED = {
  "priced": ("Priced search", "priced"),
  "priced_at_1": ("Made for 1 search", "priced", "curriculum.fixed_budget=1"),
  "search_r1": ("Search-R1-like", "search_r1"),
  "no_tool": ("No tool reward", "no_tool"),
  "anysearch": ("AnySearch", "anysearch"),
}
# What is played beside these; all but the warm start know the world's
# statistics, see docs/quickstart.md.
_PLAYED = {
  "warm_start": ("Warm start", "--policy=configs/graded_world_policy"),
  "optimum": ("Optimum", "--scripted=optimum"),
  "everything": ("Search everything", "--scripted=everything"),
  "unknown_only": ("Search the unknown", "--scripted=unknown_only"),
}
# Without --full.
_SHOWN = ("priced", "priced_at_1", "warm_start", "optimum")
# docs/quickstart.md says what twice as many steps add.
_SHORT = ("curriculum.total_steps=300", "curriculum.phase1_steps=40")

_POLL = 0.2  # Seconds between polls of the running processes.
_MINUTES = {False: 5, True: 45}  # On two quiet cores; with --full.


@dataclasses.dataclass(frozen=True)
class Job(supervisor.Part):
  """A part that ends by itself.

  Attributes:
    result: the file that exists once the job is done.
    after: names of the jobs that it needs.
    row: the report's row that its result belongs to; "": none.
  """

  result: pathlib.Path = pathlib.Path()
  after: tuple[str, ...] = ()
  row: str = ""

  def shown(self) -> str:
    # The notes are all other commands, which were shown before.
    brief = [a for a in self.command if not a.startswith("--notes=")]
    return shlex.join(["python", *brief[1:]])


def _command(name: str, *words: str) -> tuple[str, ...]:
  """Returns a command of the project, as a part runs it."""
  return *shipped.python(), "-m", f"anysearch_jax.launch.{name}", *words


def plan(root: pathlib.Path, *, full: bool) -> list[Job]:
  """Returns the jobs in the order to start them; each needs earlier ones only.

  What needs no training runs beside the first one. When the second starts, the
  programs of both are in the compilation cache.
  """

  def evaluation(
    run: str, row: str, player: str, after: tuple[str, ...] = (), kind="plain"
  ) -> Job:
    output = root / run / "evaluation" / kind
    command = _command(
      "evaluate",
      f"--config={_MAIN}",
      player,
      f"--budgets={'0..8' if full else '0..3,5,8'}",
      f"--config.evaluation.questions={1000 if full else 600}",
      f"--config.evaluation.scaffold={str(kind == 'scaffold').lower()}",
      f"--output={output}",
      "--threads=1",
    )
    result = output / "summary.json"
    name = f"evaluate-{run}-{kind}"
    return Job(name, command, result=result, after=after, row=row)

  def training(method: str, seed: int) -> list[Job]:
    row, preset, *changed = _TRAINED[method]
    run = f"{method}-{seed}"
    settings = [*changed, *(() if full else _SHORT), f"seed={seed}"]
    command = _command(
      "train",
      f"--config={_MAIN}:{preset}",
      *(f"--config.{setting}" for setting in settings),
      f"--output={root / run}",
      "--threads=1",
    )
    policy = root / run / "policy"
    train = Job(f"train-{run}", command, result=policy / "config.json")
    player, after = f"--policy={policy}", (train.name,)
    jobs = [train, evaluation(run, row, player, after)]
    if method == "anysearch":
      row += " + scaffold"
      jobs.append(evaluation(run, row, player, after, "scaffold"))
    return jobs

  trained = [
    job
    for seed in ((42, 43, 44) if full else (42,))
    for method in _TRAINED
    if full or method in _SHOWN
    for job in training(method, seed)
  ]
  beside = [
    evaluation(name, row, player)
    for name, (row, player) in _PLAYED.items()
    if full or name in _SHOWN
  ]
  jobs = [*trained[:2], *beside, *trained[2:]]
  rows: dict[str, list[str]] = {}
  for job in [*trained, *beside]:
    if job.row:
      rows.setdefault(job.row, []).append(str(job.result.parent))
  output = root / "report.html"
  notes = "\n".join(job.shown() for job in jobs)
  command = _command(
    "report",
    *(f"{row}={'+'.join(folders)}" for row, folders in rows.items()),
    f"--notes={notes}",
    f"--output={output}",
  )
  after = tuple(job.name for job in jobs)
  return [*jobs, Job("report", command, result=output, after=after)]


def define_flags() -> None:
  flags.DEFINE_string("output", "runs/quickstart", "Folder.")
  flags.DEFINE_bool(
    "full",
    False,
    "All methods, twice the steps, three seeds, more questions and budgets.",
  )


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  root, started = pathlib.Path(f.output), time.monotonic()
  cores = os.cpu_count() or 1
  jobs = plan(root, full=f.full)
  count = sum(job.name.startswith("train") for job in jobs)
  print(
    f"Trains {count} policies, evaluates them and compares them.\n"
    f"On two quiet cores that takes {_MINUTES[f.full]} minutes; here are "
    f"{cores}, load average {os.getloadavg()[0]:.1f}.\n"
    f"Report: {root / 'report.html'}; logs: {root / 'logs'}. After Ctrl-C the "
    "same command resumes.",
    flush=True,
  )
  run(jobs, root / "logs", at_once=min(cores, 3))
  print(f"all done in {progress.duration(time.monotonic() - started)}")


def run(jobs: Sequence[Job], logs: pathlib.Path, *, at_once: int) -> None:
  """Runs the jobs when the jobs that they need are done, in the given order.

  At most `at_once` processes run at a time; their output goes to `logs`. The
  last job also runs if its result exists, and its output is printed at the end.

  Raises:
    SystemExit: a command failed or a signal arrived. The other commands are
      stopped and may save first; a second signal kills them.
  """
  logs.mkdir(parents=True, exist_ok=True)
  done = {job.name for job in jobs[:-1] if job.result.is_file()}
  if done:
    print(f"Results are in {logs.parent}; remove it to start over.")
  for name in sorted(done):
    print(f"already there, not run again: {name}", flush=True)
  waiting = [job for job in jobs if job.name not in done]
  running: list[supervisor.Running] = []
  with supervisor.signals() as (asked, urged):
    try:
      while waiting or running:
        ready = [job for job in waiting if done.issuperset(job.after)]
        for job in ready[: at_once - len(running)]:
          waiting.remove(job)
          print(f"\n[{job.name}] {job.shown()}", flush=True)
          running.append(supervisor.Running(job, logs))
        if asked.wait(_POLL):
          raise stopping.StoppedError(stopping.RESUME)
        for each in [each for each in running if _ended(each)]:
          running.remove(each)
          done.add(each.part.name)
          if each.part is jobs[-1]:
            print(each.text(), flush=True)
    finally:
      supervisor.stop(running, urged)


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
