"""Compares half an hour of training under faults with the same without them.

    python -m bench.soak [--rollouts=700] [--output=DIR]

Trains the quickstart's policy in its world twice at the same time, each run on
one thread. In one run, a tenth of the searches fail or hang, the engine is lost
with all running turns every two minutes on average, and the process is killed
(SIGKILL) and restarted now and then until two thirds are done. Prints what was
lost, whether a failed episode entered a reward (by the difference of the logged
means from the means over episodes that did not fail), the memory growth of the
last process, and the accuracy of both policies on the same questions.

Runs in --output are resumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax import types
from bench import faults, harness
from configs import quickstart
from launch import jax_setup

_LIFE = 240.0  # Seconds of a process, on average.
_KILLED_UNTIL = 2 / 3
_LOOK = 2.0
_START = 300.0  # Seconds until a run that resumes has a rollout.
_BUDGETS = (0, 2, 5)


def configuration() -> config_lib.ExperimentConfig:
  """Returns the quickstart's configuration, longer and with a lower rate."""
  c = quickstart.get_config()
  return dataclasses.replace(
    c,
    save_every=5,
    curriculum=dataclasses.replace(
      c.curriculum,
      total_steps=flags.FLAGS.rollouts * c.curriculum.steps_per_rollout,
    ),
    optimizer=dataclasses.replace(c.optimizer, learning_rate=1e-4),
    episode=dataclasses.replace(c.episode, search_deadline=faults.DEADLINE),
    # A lost engine fails most episodes of a rollout.
    watch=dataclasses.replace(c.watch, max_failed=1.0),
    evaluation=dataclasses.replace(
      c.evaluation, budgets=_BUDGETS, questions=flags.FLAGS.questions
    ),
  )


def train(kind: str, root: str) -> None:
  """Trains or resumes a run until its end or until the process is killed.

  Args:
    kind: `faulty` or `calm`.
    root: folder of both runs.
  """
  faulty, folder = kind == "faulty", pathlib.Path(root) / kind
  jax_setup.configure(threads=1, cache=".jax_cache")
  from anysearch_jax.policy import hf
  from anysearch_jax.rollout import searching
  from anysearch_jax.rollout.jax_engine import engine as engine_lib
  from anysearch_jax.training import loop, validation
  from launch import world_source

  config = configuration()
  validation.validate(config)
  source = world_source.make(config.data, config.retrieval.kind)
  drawn = random.Random(time.time_ns())
  retriever: types.Retriever = source.retriever
  engine: faults.MortalEngine | None = None
  policy = hf.load(config.policy)
  if faulty:
    retriever = faults.FaultyRetriever(retriever, drawn)
    engine = faults.MortalEngine(
      lambda params, version: engine_lib.JaxEngine(
        policy._replace(params=params),
        config=config.engine,
        sampling=config.sampling,
        seed=config.seed,
        version=version,
      ),
      policy.params,
      drawn,
    )
  count = flags.FLAGS.rollouts * config.questions_per_rollout
  folder.mkdir(parents=True, exist_ok=True)
  loop.Trainer(
    config,
    policy=policy,
    questions=source.questions("train", count, config.seed),
    retriever=searching.BatchingRetriever(
      retriever, config.search, identity="soak"
    ),
    folder=folder,
    engine=engine,
  ).run()


class Run:
  """A run under observation: its process, and the memory of each process.

  A "life" is one process of the run, from its start to its kill or its end.
  """

  def __init__(self, kind: str, root: pathlib.Path, drawn: random.Random):
    self._kind, self._drawn = kind, drawn
    self.folder = root / kind
    self._log = root / f"{kind}.log"
    self._root = root
    self.kills = 0
    self.lives: list[list[tuple[float, int]]] = []
    self._begin()

  def look(self) -> bool:
    """Samples memory, kills the process if due; returns whether it runs on."""
    code = self._process.poll()
    if code is not None:
      if code:
        sys.exit(f"The {self._kind} run ended with {code}: see {self._log}.")
      return False
    memory = resident(self._process.pid)
    if memory and rollouts(self.folder) > self._first:
      self.lives[-1].append((time.monotonic(), memory))
    if (
      self._kind == "faulty"
      and self.lives[-1]
      and time.monotonic() > self._end
      and rollouts(self.folder) < _KILLED_UNTIL * flags.FLAGS.rollouts
    ):
      self._process.send_signal(signal.SIGKILL)
      self._process.wait(30)
      self.kills += 1
      self._begin()
    return True

  def stop(self) -> None:
    self._process.kill()
    self._process.wait(30)

  def _begin(self) -> None:
    self._first = rollouts(self.folder)
    self.lives.append([])
    self._end = time.monotonic() + self._drawn.expovariate(1 / _LIFE)
    with self._log.open("a") as log:
      self._process = subprocess.Popen(
        [
          *harness.worker_command("train", self._kind, self._root),
          f"--rollouts={flags.FLAGS.rollouts}",
        ],
        stdout=log,
        stderr=log,
      )


def resident(pid: int) -> int:
  """Returns the resident bytes of a process; 0 if it has just ended."""
  with contextlib.suppress(OSError):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
      if line.startswith("VmRSS"):
        return int(line.split()[1]) * 1024
  return 0


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
  if not path.is_file():
    return []
  found = path.read_text().splitlines()
  return [json.loads(line) for line in found if line.endswith("}")]


def rollouts(folder: pathlib.Path) -> int:
  """Returns the number of logged rollouts."""
  path = folder / "metrics.jsonl"
  return len(path.read_bytes().splitlines()) if path.is_file() else 0


def growth(samples: Sequence[tuple[float, int]]) -> float:
  """Returns memory at a life's end over memory after its first quarter."""
  tenth = max(1, len(samples) // 10)
  quarter = len(samples) // 4
  early = statistics.median(m for _, m in samples[quarter : quarter + tenth])
  late = statistics.median(m for _, m in samples[-tenth:])
  return late / early


def as_rewards(folder: pathlib.Path) -> tuple[int, int, float]:
  """Checks whether failed episodes entered the logged rewards.

  Returns:
    The number of recorded rollouts with a failed episode, their number of
    failed episodes, and the largest difference between the logged mean of EM
    and the mean over the episodes that did not fail.
  """
  from launch import score

  logged = {line["rollout"]: line for line in lines(folder / "metrics.jsonl")}
  found, failed, farthest = 0, 0, 0.0
  for path in sorted((folder / "trajectories").glob("rollout-*.jsonl")):
    groups = list(map(score.parse_group, path.read_bytes().splitlines()))
    bad = sum(t.failed for g in groups for t in g.trajectories)
    if not bad:
      continue
    scored = [score.score_group(g, configuration()) for g in groups]
    right = [t["em"] for ts in scored for t in ts if t["em"] is not None]
    number = int(path.stem.removeprefix("rollout-"))
    gap = abs(logged[number]["reward/em"] - statistics.fmean(right))
    found, failed, farthest = found + 1, failed + bad, max(farthest, gap)
  return found, failed, farthest


def accuracy(run: Run) -> pathlib.Path:
  """Evaluates the policy of a run and returns the folder of the evaluation."""
  folder = run.folder / "evaluation"
  budgets = ",".join(map(str, _BUDGETS))
  subprocess.run(
    [
      *(sys.executable, "-m", "launch.evaluate", "--threads=1"),
      *("--config=configs/quickstart.py", f"--budgets={budgets}"),
      f"--config.evaluation.questions={flags.FLAGS.questions}",
      f"--hf={run.folder / 'policy'}",
      f"--output={folder}",
    ],
    check=True,
    stdout=subprocess.DEVNULL,
  )
  return folder


@contextlib.contextmanager
def place() -> Iterator[pathlib.Path]:
  if flags.FLAGS.output:
    path = pathlib.Path(flags.FLAGS.output)
    path.mkdir(parents=True, exist_ok=True)
    yield path
  else:
    with tempfile.TemporaryDirectory() as folder:
      yield pathlib.Path(folder)


def main() -> dict[str, object]:
  from anysearch_jax.evaluation import comparison, pairing
  from anysearch_jax.report import loading

  with place() as root:
    start = time.monotonic()
    faulty, calm = watch(root)
    minutes = (time.monotonic() - start) / 60
    numbers = {"minutes": minutes} | losses(root, faulty, calm)
    pairs = pairing.pair(
      *(
        loading.load_row(run.folder.name, accuracy(run))
        for run in (faulty, calm)
      )
    )
    numbers["accuracy"] = [
      dataclasses.asdict(each) for each in comparison.compare(pairs)
    ]
  print(json.dumps(numbers, indent=2))
  return numbers


def watch(root: pathlib.Path) -> tuple[Run, Run]:
  """Runs the faulty and the calm training until both have ended."""
  drawn = random.Random(0)
  faulty, calm = (Run(kind, root, drawn) for kind in ("faulty", "calm"))
  try:
    going = [faulty, calm]
    while going:
      time.sleep(_LOOK)
      going = [run for run in going if run.look()]
  finally:
    faulty.stop()
    calm.stop()
  return faulty, calm


def losses(root: pathlib.Path, faulty: Run, calm: Run) -> dict[str, Any]:
  """Returns what the faults did to the run, by its own logs."""
  logged = lines(faulty.folder / "metrics.jsonl")
  found, failed, farthest = as_rewards(faulty.folder)
  return {
    "steps": logged[-1]["step"],
    "rollouts_logged_once": [x["rollout"] for x in logged]
    == list(range(flags.FLAGS.rollouts)),
    "kills": faulty.kills,
    "engines_lost": (root / "faulty.log").read_text().count("engine lost"),
    "trajectories": logged[-1]["run/trajectories"],
    "failed": logged[-1]["run/failed"],
    "resampled_groups": logged[-1]["run/resampled_groups"],
    "dropped_groups": logged[-1]["run/dropped_groups"],
    "recorded_rollouts_with_failures": found,
    "failed_in_them": failed,
    "farthest_mean_of_em": farthest,
    "memory_growth": growth(faulty.lives[-1]),
    "memory_growth_calm": growth(calm.lives[-1]),
  }


if __name__ == "__main__":
  flags.DEFINE_integer("rollouts", 700, "Of each run.", 1)
  flags.DEFINE_integer("questions", 400, "Of the evaluation.", 1)
  flags.DEFINE_string("output", None, "Folder; default: a fresh one.")
  harness.run(main, workers={"train": train})
