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
import os
import pathlib
import sys
import tempfile
import time

from absl import flags

from bench import harness
from configs import quickstart
from launch import jax_setup

_WARM = 2
_WAITS = ("time/trainer_idle", "time/sampler_idle")


def run(level: str, rollouts: str) -> dict[str, float]:
  """Trains once; returns the seconds and waiting times per rollout."""
  jax_setup.configure(threads=1, cache=".jax_cache")
  from anysearch_jax.policy import hf
  from anysearch_jax.training import loop
  from launch import world_source

  count = int(rollouts)
  config = quickstart.get_config()
  c = config.curriculum
  config = dataclasses.replace(
    config,
    save_every=count,
    curriculum=dataclasses.replace(c, total_steps=count * c.steps_per_rollout),
    pipeline=dataclasses.replace(config.pipeline, async_level=int(level)),
    mesh=dataclasses.replace(config.mesh, trainer=(0,), rollout=(1,)),
  )
  source = world_source.make(config.data, config.retrieval.kind)
  events: list[tuple[float, loop.Event]] = []
  with tempfile.TemporaryDirectory() as folder:
    loop.Trainer(
      config,
      policy=hf.load(config.policy),
      questions=source.questions(
        "train", count * config.questions, config.seed
      ),
      retriever=source.retriever,
      folder=pathlib.Path(folder),
    ).run(lambda event: events.append((time.monotonic(), event)))
  (start, _), *rest = events[_WARM - 1 :]
  return {
    "seconds": (rest[-1][0] - start) / len(rest),
    **{n: sum(e.values[n] for _, e in rest) / len(rest) for n in _WAITS},
  }


def main() -> list[object]:
  if (os.cpu_count() or 1) < 2:
    sys.exit("bench.pipeline: found one core, expected one for each side.")
  flag = "--xla_force_host_platform_device_count=2"
  env = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}"}
  rollouts = flags.FLAGS.rollouts
  rounds = harness.in_turns(
    ("0", "1"),
    lambda level: harness.in_worker("run", level, rollouts, env=env),
    rounds=flags.FLAGS.pairs,
  )
  table = harness.Table(
    "async_level", "s a rollout", "trainer waits", "sampler waits"
  )
  for level in ("0", "1"):
    found = rounds.medians(level)
    table.row(level, found["seconds"], *(found[name] for name in _WAITS))
  print(f"level 1 is {rounds.ratio('seconds', '0', '1')} as fast")
  return list(rounds.each)


if __name__ == "__main__":
  flags.DEFINE_integer("pairs", 3, "Rounds of measurements.")
  flags.DEFINE_integer("rollouts", 12, "Of a run; the first two warm.")
  harness.run(main, workers={"run": run})
