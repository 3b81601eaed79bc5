"""Runs the whole quickstart: trainings, evaluations, one report.

    anysearch quickstart            # `make quickstart`
    anysearch quickstart --full     # `make quickstart-full`

Trains a policy for every budget and, beside it, one for a budget of five
searches. The report compares them with their warm start and the optimum.
`--full` also trains one for a budget of one and the other methods, twice as
long, with three seeds, and plays more questions, budgets and agents.

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
# The trained rows: label in the report, preset, other settings.
_TRAINED_ROWS = {
  "priced": ("Priced search", "priced"),
  "priced_at_5": ("Made for 5 searches", "priced", "curriculum.fixed_budget=5"),
  "priced_at_1": ("Made for 1 search", "priced", "curriculum.fixed_budget=1"),
  "search_r1": ("Search-R1-like", "search_r1"),
  "no_tool": ("No tool reward", "no_tool"),
  "anysearch": ("AnySearch", "anysearch"),
}
# The rows of other agents; all but the warm start know the world's
# statistics, see docs/quickstart.md.
_PLAYED_ROWS = {
  "warm_start": ("Warm start", "--policy=configs/graded_world_policy"),
  "optimum": ("Optimum", "--scripted=optimum"),
  "everything": ("Search everything", "--scripted=everything"),
  "unknown_only": ("Search the unknown", "--scripted=unknown_only"),
}
# Without --full.
_SHORT_ROWS = ("priced", "priced_at_5", "warm_start", "optimum")
_SEEDS = (42, 43, 44)  # Without --full, the first.
# docs/quickstart.md says what twice as many steps add.
_SHORT_SETTINGS = ("curriculum.total_steps=300", "curriculum.phase1_steps=40")

_POLL_SECONDS = 0.2  # Between polls of the running processes.
_MINUTES = {False: 5, True: 55}  # On two quiet cores; with --full.


@dataclasses.dataclass(frozen=True)
class Job(supervisor.Part):
  """A part that ends by itself.

  Attributes:
    result: the file that exists once the job is done.
    needs: names of the jobs whose results it reads.
    row: the report's row that its result belongs to; "": none.
  """

  result: pathlib.Path = pathlib.Path()
  needs: tuple[str, ...] = ()
  row: str = ""

  def shell_text(self) -> str:
    # The notes are all other commands, which were shown before.
    brief = [a for a in self.command if not a.startswith("--notes=")]
    return shlex.join(["python", *brief[1:]])


def _command(name: str, *words: str) -> tuple[str, ...]:
  """Returns a command of the project, as a part runs it."""
  return *shipped.python(), "-m", f"anysearch_jax.launch.{name}", *words


def plan(root: pathlib.Path, *, full: bool) -> list[Job]:
  """Returns the jobs in the order to start them; each needs earlier ones only.

  Evaluations that need no training run beside the first training. When the
  second one starts, the programs of both are in the compilation cache.
  """

  def evaluation(
    run: str, row: str, player: str, needs: tuple[str, ...] = (), kind="plain"
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
    return Job(name, command, result=result, needs=needs, row=row)

  def training(method: str, seed: int) -> list[Job]:
    row, preset, *overrides = _TRAINED_ROWS[method]
    run = f"{method}-{seed}"
    settings = [*overrides, *(() if full else _SHORT_SETTINGS), f"seed={seed}"]
    command = _command(
      "train",
      f"--config={_MAIN}:{preset}",
      *(f"--config.{setting}" for setting in settings),
      f"--output={root / run}",
      "--threads=1",
    )
    policy = root / run / "policy"
    train = Job(f"train-{run}", command, result=policy / "config.json")
    player = f"--policy={policy}"
    needs = (train.name,)
    jobs = [train, evaluation(run, row, player, needs)]
    if method == "anysearch":
      row += " + scaffold"
      jobs.append(evaluation(run, row, player, needs, "scaffold"))
    return jobs

  training_jobs: list[Job] = []
  for seed in _SEEDS if full else _SEEDS[:1]:
    for method in _TRAINED_ROWS:
      if full or method in _SHORT_ROWS:
        training_jobs += training(method, seed)
  baseline_jobs = [
    evaluation(name, row, player)
    for name, (row, player) in _PLAYED_ROWS.items()
    if full or name in _SHORT_ROWS
  ]
  jobs = [*training_jobs[:2], *baseline_jobs, *training_jobs[2:]]
  rows: dict[str, list[str]] = {}
  for job in [*training_jobs, *baseline_jobs]:
    if job.row:
      rows.setdefault(job.row, []).append(str(job.result.parent))
  output = root / "report.html"
  notes = "\n".join(job.shell_text() for job in jobs)
  command = _command(
    "report",
    *(f"{row}={'+'.join(folders)}" for row, folders in rows.items()),
    f"--notes={notes}",
    f"--output={output}",
  )
  needs = tuple(job.name for job in jobs)
  return [*jobs, Job("report", command, result=output, needs=needs)]


def define_flags() -> None:
  flags.DEFINE_string(
    "output",
    "runs/quickstart",
    "Folder of the runs and of the report; stages whose results are in it are "
    "not run again.",
  )
  flags.DEFINE_bool(
    "full",
    False,
    "Train all methods, twice as long, with three seeds, and play more "
    "questions and budgets: 55 minutes in place of 5.",
  )


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  root = pathlib.Path(f.output)
  start_time = time.monotonic()
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
  print(f"all done in {progress.duration(time.monotonic() - start_time)}")


def run(jobs: Sequence[Job], logs: pathlib.Path, *, at_once: int) -> None:
  """Runs the jobs in the given order, each after the jobs that it needs.

  The last job also runs if its result exists, and its output is printed at the
  end.

  Args:
    jobs: the jobs.
    logs: folder for the output of their processes.
    at_once: limit on the processes that run at a time.

  Raises:
    SystemExit: a command failed or a signal arrived. The other commands are
      stopped and may save first; a second signal kills them.
  """
  logs.mkdir(parents=True, exist_ok=True)
  finished = {job.name for job in jobs[:-1] if job.result.is_file()}
  if finished:
    print(f"Results are in {logs.parent}; remove it to start over.")
  for name in sorted(finished):
    print(f"already there, not run again: {name}", flush=True)
  pending = [job for job in jobs if job.name not in finished]
  running: list[supervisor.Running] = []
  with supervisor.stop_events() as (stop_event, kill_event):
    try:
      while pending or running:
        ready = [job for job in pending if finished.issuperset(job.needs)]
        for job in ready[: at_once - len(running)]:
          pending.remove(job)
          print(f"\n[{job.name}] {job.shell_text()}", flush=True)
          running.append(supervisor.Running(job, logs))
        if stop_event.wait(_POLL_SECONDS):
          raise stopping.StoppedError(stopping.RESUME)
        for job_process in [x for x in running if _is_done(x)]:
          running.remove(job_process)
          finished.add(job_process.part.name)
          if job_process.part is jobs[-1]:
            print(job_process.text(), flush=True)
    finally:
      supervisor.stop(running, kill_event)


def _is_done(running: supervisor.Running) -> bool:
  """Prints progress; returns whether a command is done."""
  if (code := running.code) is None:
    running.show()
    return False
  if code == stopping.RESUME:
    running.say("was stopped, and so are the others")
    raise stopping.StoppedError(code)
  if code:
    sys.exit(str(running.failure(f"failed with code {code}")))
  running.say(f"done in {running.took}")
  return True


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, resumes=True)
