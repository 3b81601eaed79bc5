"""The quickstart with budgets of searches and tokens, see docs/budgets.md.

Hardware: as configs/quickstart.py, and three times its rollouts: about ten
minutes of one core.

    python -m launch.train --config=research/dual_budgets.py \
        --config.policy=capped_policy --output=runs/dual

Every group gets a pair of searches and tokens, and a right answer earns the
mean of the shares of both that it saved. Phase I anneals pairs without the
scaffold, which cannot state a cap on tokens in this world, and Phase II draws
them evenly. All else is the quickstart's preset `priced`.

The shipped warm start has never seen a cap on tokens nor been asked for its
answer. This makes `capped_policy`, which has, in about seven minutes, and plays
it beside the policy that it was made from:

    python -m research.dual_budgets --output=capped_policy

Its expert ignores the caps that it is told, and answers when it is asked to.
Expected: as accurate without caps as before, less .08 at most, which training
makes up for; and at least 93 % answers under each pair of caps.
"""

from __future__ import annotations

import pathlib

from absl import app, flags

import anysearch_jax as aj
from anysearch_jax import config as config_lib
from configs import quickstart
from research import warm_start

_START = "configs/graded_world_policy"
# Caps that demonstrations state, and pairs that the policies play.
_CAPS = tuple(range(20, 201, 10))
_PLAYED = (aj.Budget(5), *(aj.Budget(5, tokens) for tokens in (40, 60, 90)))
TOKENS = (40, 60, 90, 140)


def get_config() -> aj.ExperimentConfig:
  config = quickstart.get_config("priced")
  return config_lib.changed(
    config,
    name="dual-budgets",
    reward={"abs_tokens": 1.0},
    curriculum={
      "token_levels": TOKENS,
      "phase1_scaffold": False,
      "phase1_steps": 3 * config.curriculum.phase1_steps,
      "total_steps": 3 * config.curriculum.total_steps,
      "uniform_mix": 1.0,
    },
    # An answer to what a search has found takes 8 tokens.
    episode={"answer_room": 8},
    warm_start={
      "steps": 1000,
      "learning_rate": 5e-4,
      "demonstrations": 12000,
    },
  )


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  config, folder = get_config(), pathlib.Path(flags.FLAGS.output)
  start = aj.load_policy(flags.FLAGS.start)
  saved = folder.with_name(folder.name + ".partial")
  made = warm_start.fitted(config, start, saved, caps=_CAPS)
  aj.save_policy(folder, made)
  saved.unlink()
  for budget in _PLAYED:
    for name, policy in (("start", start), ("made", made)):
      answered, right = warm_start.play(config, policy, budget, 600)
      print(f"{budget}, {name}: answered {answered:.3f}, right {right:.3f}")


if __name__ == "__main__":
  flags.DEFINE_string("output", None, "Folder of the policy.", required=True)
  flags.DEFINE_string("start", _START, "Policy to start from.")
  app.run(main)
