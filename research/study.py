"""Trains and evaluates every row of a study, and writes its tables and claims.

    python -m research.study --study=ablations --tables=tool
    python -m research.study --study=methods
    python -m research.study --study=ablations --pages

The rows are those of research/ablations.py, research/systems.py,
research/small_policies.py, or research/memory/rows.py (with a configuration of
its own);
`--tables=tool,sampling` or `--rows=anysearch,no_abs` select some of them. Two
commands run at a time, each on one thread, and each is printed when it starts,
so that you can run it by hand. If the study is interrupted, running the same
command again resumes it: a training from its newest checkpoint, an evaluation
from its last episode.

`outcomes.jsonl` gets what each training answered, in a few kilobytes,
`evidence.md` the tables and claims of the rows that have all of `--seeds`
trainings, `report.html` every row and seed that was evaluated here. What is in
a file of `--outcomes` is not run again; by default these are the files of
research/evidence/, as far as they are of this study. `--pages` writes
`evidence.md` of what is known and runs nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from absl import app, flags

import anysearch_jax as aj
from research import ablations, claims, outcomes, small_policies, systems
from research.memory import rows as memory_rows

STUDIES = {
  "ablations": ablations,
  "methods": systems,
  "small": small_policies,
  "memory": memory_rows,
}
EVIDENCE = pathlib.Path(__file__).parent / "evidence"
_QUICKSTART = "configs/quickstart.py"
_POLL = 0.5  # Seconds between looks at the running commands.
_STOPPED = 75  # A command of the package that saved and can resume.

Key = tuple[str, int]


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_enum("study", "ablations", sorted(STUDIES), "Which rows.")
  flags.DEFINE_string("config", _QUICKSTART, "What rows change.")
  flags.DEFINE_integer("seeds", claims.TRAININGS, "Trainings of a row.", 1)
  flags.DEFINE_list("tables", [], "Only rows of these tables.")
  flags.DEFINE_list("rows", [], "Only these rows.")
  flags.DEFINE_string("budgets", "0,1,2,3,4,5,6,7,8", "Of evaluations.")
  flags.DEFINE_integer("questions", 600, "Of an evaluation.", lower_bound=1)
  flags.DEFINE_string("output", None, "Folder; default: runs/<study>.")
  flags.DEFINE_list("outcomes", None, "Files of trainings not to run again.")
  flags.DEFINE_integer("jobs", 2, "Processes at a time.", lower_bound=1)
  flags.DEFINE_integer("threads", 1, "Of each; 0: XLA's own choice.", 0)
  flags.DEFINE_bool("dry_run", False, "Print the commands and stop.")
  flags.DEFINE_bool("pages", False, "Write evidence.md and stop.")


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  args = flags.FLAGS
  study = STUDIES[args.study]
  try:
    base = load_config(args.config)
    rows = study.rows(base)
    chosen = choose(rows, tables=args.tables, names=args.rows)
    root = pathlib.Path(args.output or f"runs/{args.study}")
    own = root / "outcomes.jsonl"
    files = [pathlib.Path(name) for name in args.outcomes or ()]
    known_here = shipped(args.study, args.config)
    if args.outcomes is None and known_here.is_file():
      files = [known_here]
    found = known(
      [*files, *([own] if own.is_file() else [])], settings(rows, args.config)
    )
  except (OSError, ValueError) as error:
    sys.exit(f"research.study: {error}")
  plan = Plan(
    root,
    config=args.config,
    untrained=base.policy,
    evaluation=(
      f"--config.evaluation.budgets={args.budgets}",
      f"--config.evaluation.questions={args.questions}",
    ),
    threads=args.threads,
  )
  seeds = range(claims.FIRST_SEED, claims.FIRST_SEED + args.seeds)
  jobs = [] if args.pages else plan.jobs(chosen, seeds, known=found)
  if args.dry_run:
    print("\n".join(job.shown() for job in jobs))
    return
  root.mkdir(parents=True, exist_ok=True)
  try:
    run(jobs, root / "logs", at_once=args.jobs)
  finally:
    for sentence in add_finished(
      found, plan.finished(rows), settings(rows, args.config), args.questions
    ):
      print(f"not in outcomes.jsonl: {sentence}")
    outcomes.write(own, found.values())
    made = claims.page(
      study.TITLE, rows, study.CLAIMS, found.values(), args.seeds
    )
    (root / "evidence.md").write_text(made)
  if jobs and any(plan.finished(rows)):
    run([plan.report(rows)], root / "logs", at_once=1)
  print(f"written: {root / 'evidence.md'}")


def shipped(study: str, config: str) -> pathlib.Path:
  """Returns the file of evidence/ for a study over a configuration."""
  path, _, preset = config.partition(":")
  stem = "" if config == _QUICKSTART else pathlib.Path(path).stem
  return EVIDENCE / f"{'-'.join(filter(None, (study, stem, preset)))}.jsonl"


def load_config(name: str) -> aj.ExperimentConfig:
  """Returns the configuration of `FILE` or `FILE:PRESET`."""
  path, _, preset = name.partition(":")
  return runpy.run_path(path)["get_config"](*([preset] if preset else []))


def settings(rows: Iterable[claims.Row], config: str) -> dict[str, str]:
  """Returns a digest of what defines each row, by its name.

  It has the row's changes and the name of the configuration that they change,
  not its values: outcomes stay those of the row if that file changes.
  """
  named = {row.name: row for row in rows}
  found = {}
  for name, row in named.items():
    trained = named.get(row.policy_of, row)
    parts = [
      [one.config or config, *one.overrides] for one in (trained, row)
    ] + [row.evaluation, row.scaffold, row.policy_of == claims.UNTRAINED]
    found[name] = outcomes.digest([json.dumps(parts)])
  return found


def known(
  files: Iterable[pathlib.Path], digests: Mapping[str, str]
) -> dict[Key, outcomes.Outcomes]:
  """Returns the trainings of files; those of later files count.

  Raises:
    OSError: a file cannot be read.
    ValueError: a file is damaged, or holds a row that had other settings.
  """
  found: dict[Key, outcomes.Outcomes] = {}
  for path in files:
    for one in outcomes.read(path):
      if one.settings != digests.get(one.row, one.settings):
        raise ValueError(
          f"{path}: {one.row} with seed {one.seed} had other settings than "
          "this study's row; delete its line, or run the study with the "
          "configuration of then."
        )
      found[one.key] = one
  return found


def add_finished(
  found: dict[Key, outcomes.Outcomes],
  finished: Iterable[tuple[str, int, pathlib.Path]],
  digests: Mapping[str, str],
  questions: int,
) -> list[str]:
  """Adds finished evaluations to `found`.

  Returns:
    A sentence for each evaluation that cannot be used.
  """
  unusable = []
  for row, seed, path in finished:
    if (row, seed) in found:
      continue
    try:
      with path.open() as lines:
        one = outcomes.of(
          map(json.loads, lines), row=row, seed=seed, settings=digests[row]
        )
      asked = _questions_asked(path.parent)
      if asked != questions:
        raise ValueError(
          f"{row}, seed {seed}: found {asked} questions, "
          f"expected {questions}, as this study asks."
        )
    except ValueError as error:
      unusable.append(str(error))
    else:
      found[one.key] = one
  return unusable


def _questions_asked(folder: pathlib.Path) -> int:
  """Returns the questions of each set that an evaluation was to ask."""
  config = json.loads((folder / "config.json").read_text())
  return int(config["evaluation"]["questions"])


def choose(
  rows: Sequence[claims.Row], *, tables: Sequence[str], names: Sequence[str]
) -> list[claims.Row]:
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


@dataclasses.dataclass
class Job:
  """One command of the package.

  Attributes:
    name: the displayed name, also the name of its log.
    command: arguments of the Python interpreter.
    result: the file that exists once the job is done.
    after: names of the jobs that it needs.
  """

  name: str
  command: list[str]
  result: pathlib.Path
  after: tuple[str, ...] = ()

  def shown(self) -> str:
    """Returns the command as a user would type it."""
    return shlex.join(["python", *self.command])


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
    rows: Sequence[claims.Row],
    seeds: Sequence[int],
    *,
    known: Container[Key] = (),
  ) -> list[Job]:
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
    self, rows: Iterable[claims.Row]
  ) -> Iterator[tuple[str, int, pathlib.Path]]:
    """Yields row, seed and `episodes.jsonl` of each finished evaluation."""
    for row in rows:
      for path in sorted(self._root.glob(f"{row.name}-*/evaluation/*/*.jsonl")):
        name, _, seed = path.parents[2].name.rpartition("-")
        if name == row.name and seed.isdigit():
          if path == self._episodes(row, int(seed)):
            yield row.name, int(seed), path

  def _train(self, row: claims.Row, seed: int) -> Job:
    folder = self._run(row.name, seed)
    return Job(
      f"train {row.name} {seed}",
      [
        "-m",
        "anysearch_jax.launch.train",
        f"--config={row.config or self._config}",
        f"--config.seed={seed}",
        *(f"--config.{override}" for override in row.overrides),
        f"--output={folder}",
        self._threads,
      ],
      folder / "policy" / "config.json",
    )

  def _evaluate(self, row: claims.Row, seed: int) -> Job:
    policy_of = row.policy_of or row.name
    untrained = policy_of == claims.UNTRAINED
    policy = str(self._run(policy_of, seed) / "policy")
    if untrained:
      policy = self._untrained
      if row.config:
        policy = load_config(row.config).policy
    output = self._episodes(row, seed).parent
    return Job(
      f"evaluate {row.name} {seed}",
      [
        "-m",
        "anysearch_jax.launch.evaluate",
        f"--config={row.config or self._config}",
        f"--policy={policy}",
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

  def report(self, rows: Iterable[claims.Row]) -> Job:
    """Returns the job that reports all rows and seeds evaluated so far."""
    shown = []
    for row in rows:
      if folders := [str(path.parent) for *_, path in self.finished([row])]:
        shown.append(f"{row.label}={'+'.join(folders)}")
    output = self._root / "report.html"
    output.unlink(missing_ok=True)
    command = [
      "-m",
      "anysearch_jax.launch.report",
      *shown,
      f"--output={output}",
    ]
    return Job("report", command, output)

  def _run(self, name: str, seed: int) -> pathlib.Path:
    return self._root / f"{name}-{seed}"

  def _episodes(self, row: claims.Row, seed: int) -> pathlib.Path:
    kind = "scaffold" if row.scaffold else "plain"
    folder = self._run(row.name, seed) / "evaluation" / kind
    return folder / "episodes.jsonl"


def run(jobs: Sequence[Job], logs: pathlib.Path, *, at_once: int) -> None:
  """Runs jobs when those that they need are done, in the given order.

  A job whose result exists is not run again.

  Raises:
    SystemExit: a command failed, or SIGINT or SIGTERM arrived; the others were
      asked to save and stop.
  """
  logs.mkdir(parents=True, exist_ok=True)
  done = {job.name for job in jobs if job.result.is_file()}
  for name in sorted(done):
    print(f"already there, not run again: {name}")
  waiting = [job for job in jobs if job.name not in done]
  running: dict[str, subprocess.Popen] = {}

  def stop(*unused) -> None:
    sys.exit(_STOPPED)

  before = signal.signal(signal.SIGTERM, stop)
  try:
    while waiting or running:
      for job in [job for job in waiting if set(job.after) <= done]:
        if len(running) < at_once:
          waiting.remove(job)
          print(f"\n[{job.name}] starts:\n  {job.shown()}", flush=True)
          with _log(logs, job.name).open("wb") as log:
            # Ctrl-C reaches this process alone, which then asks the others.
            running[job.name] = subprocess.Popen(
              [sys.executable, *job.command],
              stdout=log,
              stderr=subprocess.STDOUT,
              start_new_session=True,
            )
      time.sleep(_POLL)
      for name, process in list(running.items()):
        code = process.poll()
        if code is None:
          continue
        del running[name]
        if code:
          end = _log(logs, name).read_text(errors="replace")[-3000:]
          sys.exit(f"[{name}] ended with code {code}:\n{end}")
        done.add(name)
        print(f"[{name}] done", flush=True)
  except KeyboardInterrupt:
    sys.exit(_STOPPED)
  finally:
    for process in running.values():
      process.terminate()
    for process in running.values():
      with contextlib.suppress(KeyboardInterrupt):
        process.wait()
    signal.signal(signal.SIGTERM, before)


def _log(logs: pathlib.Path, name: str) -> pathlib.Path:
  return logs / f"{name.replace(' ', '-')}.log"


if __name__ == "__main__":
  define_flags()
  app.run(main)
