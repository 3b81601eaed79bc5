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

import os
import pathlib
import shlex
import time

from absl import app, flags

from launch import flags as launch_flags
from launch import jobs as jobs_lib
from launch import progress

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


def plan(root: pathlib.Path, *, full: bool) -> list[jobs_lib.Job]:
  """Returns the jobs in the order to start them: trainings first, report last.

  The warm start's evaluation runs beside the first training. The other
  trainings start when the first one has trained on a rollout: all programs are
  then in the compilation cache.

  Args:
    root: folder of the quickstart.
    full: whether to run every budget, all questions and three seeds.
  """
  seeds = (42, 43, 44) if full else (42,)
  trainings: list[jobs_lib.Job] = []
  evaluations: list[jobs_lib.Job] = []
  compiled = root / f"{_ORDER[0]}-{seeds[0]}" / "metrics.jsonl"
  for seed in seeds:
    for method in _ORDER:
      folder = root / f"{method}-{seed}"
      train = jobs_lib.Job(
        f"train {method} {seed}",
        [
          "-m",
          "launch.train",
          f"--config={_MAIN}:{method}",
          f"--config.seed={seed}",
          f"--output={folder}",
          "--threads=1",
        ],
        folder / "policy" / "config.json",
        once=compiled if trainings else None,
      )
      trainings.append(train)
      evaluations.append(
        _evaluation(
          f"evaluate {method} {seed}",
          f"--policy={folder / 'policy'}",
          folder / "evaluation" / "plain",
          full=full,
          few=False,
          seeds=(seed,),
          after=(train.name,),
        )
      )
      if method == "anysearch":
        evaluations.append(
          _evaluation(
            f"evaluate {method} {seed} with scaffold",
            f"--policy={folder / 'policy'}",
            folder / "evaluation" / "scaffold",
            full=full,
            few=True,
            seeds=(seed,),
            scaffold=True,
            after=(train.name,),
          )
        )
  warm_start = _evaluation(
    "evaluate warm start",
    "--policy=configs/graded_world_policy",
    root / "warm_start" / "evaluation" / "plain",
    full=full,
    few=True,
    seeds=seeds,
  )
  exact = [
    _evaluation(
      f"play {name}",
      f"--scripted={name}",
      root / name / "evaluation" / "plain",
      full=full,
      few=False,
      seeds=(seeds[0],),
    )
    for name in _EXACT
  ]
  jobs = [trainings[0], warm_start, *exact, *trainings[1:], *evaluations]
  return [*jobs, _report(root, seeds, jobs)]


def _evaluation(
  name: str,
  player: str,
  output: pathlib.Path,
  *,
  full: bool,
  few: bool,
  seeds: tuple[int, ...],
  scaffold: bool = False,
  after: tuple[str, ...] = (),
) -> jobs_lib.Job:
  budgets = "0,1,2,3,4,5,6,7,8" if full else "0,1,2,3,5,8"
  questions = 1000 if full else 300 if few else 600
  return jobs_lib.Job(
    name,
    [
      "-m",
      "launch.evaluate",
      f"--config={_MAIN}",
      player,
      f"--config.evaluation.budgets={budgets}",
      f"--config.evaluation.questions={questions}",
      f"--config.evaluation.seeds={','.join(map(str, seeds))}",
      f"--config.evaluation.scaffold={str(scaffold).lower()}",
      f"--output={output}",
      "--threads=1",
    ],
    output / "episodes.jsonl",
    after,
  )


def _report(
  root: pathlib.Path, seeds: tuple[int, ...], jobs: list[jobs_lib.Job]
) -> jobs_lib.Job:
  def rows(method: str, kind: str) -> str:
    return "+".join(
      str(root / f"{method}-{seed}" / "evaluation" / kind) for seed in seeds
    )

  shown = [f"{label}={rows(m, 'plain')}" for m, label in _METHODS.items()]
  shown.append(f"Warm start={root / 'warm_start' / 'evaluation' / 'plain'}")
  shown.append(f"AnySearch + scaffold={rows('anysearch', 'scaffold')}")
  shown += [
    f"{label}={root / name / 'evaluation' / 'plain'}"
    for name, label in _EXACT.items()
  ]
  controls = [label for m, label in _METHODS.items() if m != "anysearch"]
  runs = [
    f"{label}={root / f'{m}-{seeds[0]}'}" for m, label in _METHODS.items()
  ]
  output = root / "report.html"
  notes = "\n".join(shlex.join(["python", *job.command]) for job in jobs)
  return jobs_lib.Job(
    "report",
    [
      "-m",
      "launch.report",
      f"--rows={','.join(shown)}",
      f"--controls={','.join(controls)}",
      f"--training={','.join(runs)}",
      f"--notes={notes}",
      f"--output={output}",
    ],
    output,
    tuple(job.name for job in jobs),
    again=True,
    shows=True,
    # The notes contain all other commands, which were already shown.
    quiet=("--notes=",),
  )


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("output", "runs/quickstart", "Folder.")
  flags.DEFINE_bool(
    "full", False, "Every budget, full n, three training seeds."
  )
  flags.DEFINE_integer("jobs", 3, "Processes at a time.", lower_bound=1)


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  root = pathlib.Path(flags.FLAGS.output)
  started = time.monotonic()
  print(f"{os.cpu_count()} cores, load average {_load()} before the start")
  jobs_lib.run(
    plan(root, full=flags.FLAGS.full), root / "logs", at_once=flags.FLAGS.jobs
  )
  took = progress.duration(time.monotonic() - started)
  print(f"all done in {took}, load average {_load()}")


def _load() -> str:
  """Returns the load average of the last minute."""
  return f"{os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, resumes=True)
