r"""Trains with a reward of your own: a right answer, minus a price per search.

    python -m examples.own_reward --rollouts=10 --output=runs/own_reward

This is a training from Python, by the loop of `launch.train`: the folder gets
metrics, checkpoints and the policy, and the same command resumes. The command
`launch.train` takes the same function and needs no program:

    python -m launch.train --config=configs/quickstart.py \
        --reward=examples/own_reward.py:reward --output=runs/own_reward

docs/own.md says what the function gets and what is checked.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import numpy as np

import anysearch_jax as aj
from anysearch_jax.configs import quickstart

ROOT = pathlib.Path(__file__).resolve().parents[1]
PRICE = 0.05


def reward(
  outcomes: aj.Outcomes, config: aj.ExperimentConfig
) -> dict[str, np.ndarray]:
  """Returns arrays `[Q, G]`: Q questions, G trajectories of each.

  `total` is the reward. Each part is logged as `reward/<name>`.
  """
  del config
  cost = PRICE * outcomes.searches
  return {"total": outcomes.em - cost, "cost": cost}


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--rollouts", type=int, default=10)
  parser.add_argument("--output", type=pathlib.Path, default="runs/own_reward")
  args = parser.parse_args(argv)
  config = quickstart.get_config()
  steps = args.rollouts * config.curriculum.steps_per_rollout
  config = aj.config.changed(
    config,
    reward={"function": f"{__file__}:reward"},
    curriculum={"phase1_steps": 0, "total_steps": steps},
  )
  aj.validate(config)
  args.output.mkdir(parents=True, exist_ok=True)
  world = aj.World()
  count = args.rollouts * config.questions
  trainer = aj.Trainer(
    config,
    method=aj.trained_method(config),
    policy=aj.load_policy(ROOT / config.policy),
    questions=world.questions("train", count, config.seed),
    retriever=aj.LexicalRetriever(world.corpus, reads=world.searched),
    folder=args.output,
  )
  names = ("reward/total", "reward/cost", "reward/em", "rollout/searches")
  trainer.run(lambda event: print({name: event.values[name] for name in names}))


if __name__ == "__main__":
  main()
