"""Compares training while sampling with training and sampling in turns.

    python -m bench.pipeline [--pairs=3] [--rollouts=12]

Runs a shortened quickstart with one device for training and one for sampling;
without accelerators these are two CPU devices of one thread each. Prints the
seconds per rollout with `pipeline.async_level` 0 and 1, how long each side
waited for the other, and the ratios of each round. Every run has its own
process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from absl import flags

from configs import quickstart
from launch import flags as launch_flags
from launch import jax_setup, parts

_PAIRS = flags.DEFINE_integer("pairs", 3, "Rounds of measurements.")
_ROLLOUTS = flags.DEFINE_integer(
  "rollouts", 12, "Of a run; the first two warm."
)
_LEVEL = flags.DEFINE_integer("level", None, "Runs once and prints JSON.")
_JSON = flags.DEFINE_string("json", None, "File for the numbers.")
_WARM = 2
_WAITS = ("time/trainer_idle", "time/sampler_idle")


def run(level: int) -> dict[str, float]:
  """Runs once; returns the seconds and waiting times per rollout."""
  jax_setup.configure(threads=1, cache=".jax_cache")
  from anysearch_jax.policy import hf
  from anysearch_jax.training import loop

  config = quickstart.get_config()
  c = config.curriculum
  config = dataclasses.replace(
    config,
    save_every=_ROLLOUTS.value,
    curriculum=dataclasses.replace(
      c, total_steps=_ROLLOUTS.value * c.steps_per_rollout
    ),
    pipeline=dataclasses.replace(config.pipeline, async_level=level),
    mesh=dataclasses.replace(config.mesh, trainer=(0,), rollout=(1,)),
  )
  source = parts.source(config)
  events: list[tuple[float, loop.Event]] = []
  with tempfile.TemporaryDirectory() as folder:
    loop.Trainer(
      config,
      policy=hf.load(config.policy),
      questions=source.questions(
        "train", _ROLLOUTS.value * config.questions, config.seed
      ),
      retriever=source.retriever,
      folder=pathlib.Path(folder),
    ).run(lambda event: events.append((time.monotonic(), event)))
  (start, _), *rest = events[_WARM - 1 :]
  return {
    "seconds": (rest[-1][0] - start) / len(rest),
    **{n: sum(e.values[n] for _, e in rest) / len(rest) for n in _WAITS},
  }


def main(argv) -> None:
  del argv
  if _LEVEL.value is not None:
    print(json.dumps(run(_LEVEL.value)))
    return
  if (os.cpu_count() or 1) < 2:
    sys.exit("bench.pipeline: found one core, expected one for each side.")
  env = os.environ | {
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=2"
  }

  def measure(level: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.pipeline", f"--level={level}"]
    command.append(f"--rollouts={_ROLLOUTS.value}")
    done = subprocess.run(
      command, env=env, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])

  rounds = [[measure(level) for level in (0, 1)] for _ in range(_PAIRS.value)]
  for level in (0, 1):
    found = {
      name: statistics.median(r[level][name] for r in rounds)
      for name in rounds[0][level]
    }
    print(
      f"async_level {level}: {found['seconds']:.2f} s a rollout, trainer waits "
      f"{found[_WAITS[0]]:.2f}, sampler waits {found[_WAITS[1]]:.2f}"
    )
  ratios = sorted(r[0]["seconds"] / r[1]["seconds"] for r in rounds)
  print(
    f"level 1 is {statistics.median(ratios):.2f}x "
    f"[{ratios[0]:.2f}, {ratios[-1]:.2f}] as fast"
  )
  if _JSON.value:
    pathlib.Path(_JSON.value).write_text(json.dumps(rounds, indent=2) + "\n")


if __name__ == "__main__":
  launch_flags.run(main)
