"""Compares trainings whose episodes a program plays with those played inside.

    python -m bench.programs --program=examples/outside_agent.py:play

Both train the quickstart's policy by the same method for some rollouts, as
processes of their own, in turns. Printed are the CPU seconds of each, of all
their threads and children, and the program's throughput by CPU time: episodes a
CPU second, as a share of those that are played inside. The start of a process,
which a long training does not notice, is measured by trainings of one rollout
and taken off.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile

_STEPS_PER_ROLLOUT = 5
_OUTSIDE = (
  "--config.episode.prompts=world",
  "--config.agents.states_budget=false",
)


def cpu_seconds(rollouts: int, arguments: list[str]) -> float:
  """Trains for some rollouts and returns the CPU seconds of the process.

  Args:
    rollouts: number of rollouts, >= 1.
    arguments: further flags of `launch.train`.

  Raises:
    subprocess.CalledProcessError: the training failed.
  """
  earlier_seconds = _children_seconds()
  with tempfile.TemporaryDirectory() as folder:
    command = [
      sys.executable,
      "-m",
      "launch.train",
      "--config=configs/quickstart.py",
      f"--config.curriculum.total_steps={rollouts * _STEPS_PER_ROLLOUT}",
      "--config.curriculum.phase1_steps=0",
      "--threads=1",
      f"--output={folder}/run",
      *arguments,
    ]
    subprocess.run(command, check=True, capture_output=True)
    lines = pathlib.Path(folder, "run", "metrics.jsonl").read_text()
  metrics = json.loads(lines.splitlines()[-1])
  if metrics["rollout/failed"]:
    raise ValueError(f"Found {metrics['rollout/failed']} failed episodes.")
  return _children_seconds() - earlier_seconds


def _children_seconds() -> float:
  """Returns the CPU seconds of all processes that this one started."""
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  return usage.ru_utime + usage.ru_stime


def rollout_seconds(rollouts: int, arguments: list[str]) -> float:
  """Returns the CPU seconds of a rollout after the first.

  Args:
    rollouts: number of rollouts of the longer training, > 1.
    arguments: further flags of `launch.train`.
  """
  start = cpu_seconds(1, arguments)
  return (cpu_seconds(rollouts, arguments) - start) / (rollouts - 1)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--program", default="examples/outside_agent.py:play")
  parser.add_argument("--rollouts", type=int, default=17)
  parser.add_argument("--pairs", type=int, default=3)
  options = parser.parse_args()
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  kinds = {
    "inside": [],
    "program": [f"--agents={options.program}", *_OUTSIDE],
  }
  for arguments in kinds.values():  # Fills the cache of compiled programs.
    cpu_seconds(options.rollouts, arguments)
  ratios = []
  print("CPU seconds of a rollout: inside, program; throughput by CPU time")
  for _ in range(options.pairs):
    seconds = {
      name: rollout_seconds(options.rollouts, arguments)
      for name, arguments in kinds.items()
    }
    ratios.append(seconds["inside"] / seconds["program"])
    print(
      f"{seconds['inside']:.2f} {seconds['program']:.2f} {ratios[-1]:.2f}",
      flush=True,
    )
  print(f"median throughput: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
  main()
