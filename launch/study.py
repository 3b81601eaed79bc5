"""Trains and evaluates every row of a study, and writes one report.

    python -m launch.study --study=ablations --seeds=3
    python -m launch.study --study=methods

The rows are those of configs/ablations.py or configs/methods/study.py;
`--tables=tool,sampling` or `--rows=anysearch,no_abs` select some of them. Two
jobs run at a time, each on one thread. Each command is printed when it starts,
so that you can run it by hand. If the study is interrupted, running the same
command again resumes it: a training from its newest checkpoint, an evaluation
from its last episode. The report contains every finished row and seed in the
folder, including those of earlier commands; `tables.md` beside it has the
tables.

`outcomes.jsonl` gets what each training answered, in a few kilobytes, and
`evidence.md` the tables and claims over trainings. `--outcomes=FILE` names such
files of the same study on other machines: what is in them is not run again.
"""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Container, Iterator, Sequence

from absl import app, flags

from anysearch_jax.host import disk
from configs import ablations, study_rows
from configs.methods import study as methods
from launch import flags as launch_flags
from launch import jobs as jobs_lib
from launch import progress, study_outcomes

_STUDIES = {"ablations": ablations, "methods": methods}
_FIRST_SEED = 42


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_enum("study", "ablations", sorted(_STUDIES), "Which rows.")
  flags.DEFINE_string("config", "configs/quickstart.py", "What rows change.")
  flags.DEFINE_integer("seeds", 3, "Trainings of a row.", lower_bound=1)
  flags.DEFINE_list("tables", [], "Only rows of these tables.")
  flags.DEFINE_list("rows", [], "Only these rows.")
  flags.DEFINE_string("budgets", "0,1,2,3,4,5,6,7,8", "Of evaluations.")
  flags.DEFINE_integer("questions", 600, "Of an evaluation.", lower_bound=1)
  flags.DEFINE_string("output", None, "Folder; default: runs/<study>.")
  flags.DEFINE_list("outcomes", [], "Files of trainings not to run again.")
  flags.DEFINE_integer("jobs", 2, "Processes at a time.", lower_bound=1)
  flags.DEFINE_integer("threads", 1, "Of each; 0: XLA's own choice.", 0)
  flags.DEFINE_bool("dry_run", False, "Print the commands and stop.")


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  try:
    base = launch_flags.load_config(f.config)
    rows = _STUDIES[f.study].rows(base)
    chosen = choose(rows, tables=f.tables, names=f.rows)
    root = pathlib.Path(f.output or f"runs/{f.study}")
    named = {row.name: row for row in rows}
    store = study_outcomes.Store(
      root / "outcomes.jsonl",
      [pathlib.Path(path) for path in f.outcomes],
      {
        row.name: study_outcomes.settings(
          row, named.get(row.policy_of, row), config=f.config
        )
        for row in rows
      },
    )
  except ValueError as error:
    sys.exit(f"launch.study: {error}")
  seeds = range(_FIRST_SEED, _FIRST_SEED + f.seeds)
  plan = Plan(
    root,
    config=f.config,
    untrained=base.policy,
    evaluation=(
      f"--config.evaluation.budgets={f.budgets}",
      f"--config.evaluation.questions={f.questions}",
    ),
    threads=f.threads,
  )
  jobs = plan.jobs(chosen, seeds, known=store.known)
  if f.dry_run:
    print("\n".join(job.shown() for job in jobs))
    return
  started = time.monotonic()
  try:
    jobs_lib.run(jobs, root / "logs", at_once=f.jobs)
  finally:
    for sentence in store.add(plan.finished(rows), f.questions):
      print(f"not in outcomes.jsonl: {sentence}")
    study = _STUDIES[f.study]
    page = store.page(study.TITLE, rows, study.CLAIMS)
    disk.write_whole(root / "evidence.md", page)
  if any(plan.finished(rows)):
    jobs_lib.run([plan.report(rows)], root / "logs", at_once=1)
  print(f"all done in {progress.duration(time.monotonic() - started)}")


def choose(
  rows: Sequence[study_rows.Row],
  *,
  tables: Sequence[str],
  names: Sequence[str],
) -> list[study_rows.Row]:
  """Returns the rows of these tables and names, and the rows that they need.

  A row that evaluates another row's policy needs that row.

  Raises:
    ValueError: a table or a row is unknown.
  """
  known = {"tables": {r.table for r in rows}, "rows": {r.name for r in rows}}
  for flag, asked in (("tables", tables), ("rows", names)):
    for name in asked:
      if name not in known[flag]:
        raise ValueError(
          f"--{flag}: found {name!r}, expected some of "
          f"{', '.join(sorted(known[flag]))}."
        )
  wanted = {
    row.name
    for row in rows
    if (not tables or row.table in tables) and (not names or row.name in names)
  }
  needed = {row.policy_of for row in rows if row.name in wanted}
  return [row for row in rows if row.name in wanted | needed]


class Plan:
  """The folders of a study's rows and the commands that fill them.

  Args:
    root: folder of the study.
    config: file of the configuration that rows override.
    untrained: the policy of that configuration, before training.
    evaluation: flags of every evaluation.
    threads: CPU threads of each process.
  """

  def __init__(
    self,
    root: pathlib.Path,
    *,
    config: str,
    untrained: str,
    evaluation: Sequence[str],
    threads: int,
  ):
    self._root, self._config = root, config
    self._untrained, self._evaluation = untrained, evaluation
    self._threads = f"--threads={threads}"

  def jobs(
    self,
    rows: Sequence[study_rows.Row],
    seeds: Sequence[int],
    *,
    known: Container[tuple[str, int]] = (),
  ) -> list[jobs_lib.Job]:
    """Returns the training and the evaluation of each row and seed.

    Rows with another row's policy have no training. All rows of the first seed
    come before those of the second.

    Args:
      rows: with the rows that they need.
      seeds: of the trainings.
      known: (row, seed) of what need not be evaluated again.
    """
    jobs = []
    for seed in seeds:
      missing = [row for row in rows if (row.name, seed) not in known]
      needed = {row.policy_of or row.name for row in missing}
      for row in rows:
        if not row.policy_of and row.name in needed:
          jobs.append(self._train(row, seed))
        if row in missing:
          jobs.append(self._evaluate(row, seed))
    return jobs

  def finished(
    self, rows: Sequence[study_rows.Row]
  ) -> Iterator[tuple[str, int, pathlib.Path]]:
    """Yields row, seed and `episodes.jsonl` of each finished evaluation."""
    for row in rows:
      for path in sorted(self._root.glob(f"{row.name}-*/evaluation/*/*.jsonl")):
        name, _, seed = path.parents[2].name.rpartition("-")
        if name != row.name or not seed.isdigit():
          continue
        if path == self._episodes(row, int(seed)):
          yield row.name, int(seed), path

  def _train(self, row: study_rows.Row, seed: int) -> jobs_lib.Job:
    folder = self._run(row.name, seed)
    return jobs_lib.Job(
      f"train {row.name} {seed}",
      [
        "-m",
        "launch.train",
        f"--config={row.config or self._config}",
        f"--config.seed={seed}",
        *(f"--config.{override}" for override in row.overrides),
        f"--output={folder}",
        self._threads,
      ],
      folder / "policy" / "config.json",
    )

  def _evaluate(self, row: study_rows.Row, seed: int) -> jobs_lib.Job:
    policy_of = row.policy_of or row.name
    untrained = policy_of == study_rows.UNTRAINED
    policy = self._run(policy_of, seed) / "policy"
    output = self._episodes(row, seed).parent
    return jobs_lib.Job(
      f"evaluate {row.name} {seed}",
      [
        "-m",
        "launch.evaluate",
        f"--config={row.config or self._config}",
        f"--policy={self._untrained if untrained else policy}",
        f"--config.evaluation.seeds={seed}",
        f"--config.evaluation.scaffold={str(row.scaffold).lower()}",
        *(f"--config.{override}" for override in row.evaluation),
        *self._evaluation,
        f"--output={output}",
        self._threads,
      ],
      output / "episodes.jsonl",
      () if untrained else (f"train {policy_of} {seed}",),
    )

  def report(self, rows: Sequence[study_rows.Row]) -> jobs_lib.Job:
    """Returns the job that reports all rows and seeds evaluated so far."""
    shown, training, tables, commands = [], [], [], []
    for row in rows:
      finished = [path.parent for _, _, path in self.finished([row])]
      if not finished:
        continue
      shown.append(f"{row.label}={'+'.join(map(str, finished))}")
      tables.append(f"{row.label}={row.table}")
      runs = [folder.parent.parent for folder in finished]
      if (runs[0] / "metrics.jsonl").is_file():
        training.append(f"{row.label}={runs[0]}")
      seeds = [int(run.name.rpartition("-")[2]) for run in runs]
      commands += [job.shown() for job in self.jobs([row], seeds)]
    output = self._root / "report.html"
    notes = "\n".join(commands)
    return jobs_lib.Job(
      "report",
      [
        "-m",
        "launch.report",
        f"--rows={','.join(shown)}",
        f"--tables={','.join(tables)}",
        f"--training={','.join(training)}",
        f"--notes={notes}",
        f"--output={output}",
      ],
      output,
      again=True,
      shows=True,
      quiet=("--notes=",),
    )

  def _run(self, name: str, seed: int) -> pathlib.Path:
    return self._root / f"{name}-{seed}"

  def _episodes(self, row: study_rows.Row, seed: int) -> pathlib.Path:
    kind = "scaffold" if row.scaffold else "plain"
    folder = self._run(row.name, seed) / "evaluation" / kind
    return folder / "episodes.jsonl"


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, resumes=True)
