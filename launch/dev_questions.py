"""Plays questions of the generated world's dev split, and gates by them."""

from __future__ import annotations

import asyncio

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.methods import systems
from anysearch_jax.rollout import driver, engines

# Of the episodes that compare a policy with the one it started from. Training
# makes up for what is lost without caps or not answered (docs/budgets.md).
_BUDGET, _PLAYED, _LOSS = 5, 600, 0.08
_CAPS, _UNDER_CAPS, _ANSWERED = (40, 60, 90), 200, 0.93


def play(
  config: config_lib.ExperimentConfig,
  source,
  policy,
  *,
  budget: budgets.Assigned,
  scaffold: bool = False,
  count: int,
) -> list[types.Trajectory]:
  """Plays questions, each once.

  Args:
    config: of engine and episodes.
    source: the generated world's questions and retriever.
    policy: plays; equal policies play equal episodes.
    budget, scaffold: of each episode.
    count: number of questions.

  Returns:
    The trajectories in the order of the questions.
  """
  engine = engines.make(policy, config, seed=config.seed)
  questions = source.evaluation_questions(each=count, split="dev")
  try:
    played = asyncio.run(
      driver.run_groups(
        [
          driver.Assignment(i, question, budget, scaffold)
          for i, question in enumerate(questions)
        ],
        driver.EpisodeParts(
          engine, source.retriever, config.episode, policy.tokenizer
        ),
        group=1,
        rollout=0,
        max_concurrency=config.engine.slots,
      )
    )
  finally:
    engine.close()
  return [t for group in played.groups for t in group.trajectories]


def accuracy(
  config: config_lib.ExperimentConfig,
  trajectories: list[types.Trajectory],
) -> float:
  """Returns the share of right answers."""
  judge = systems.of_episode(config.episode).judge
  return sum(judge(t).em for t in trajectories) / len(trajectories)


def lacks_under_caps(
  config: config_lib.ExperimentConfig, source, policy, start
) -> list[str]:
  """Returns in words what a policy lacks that was taught to keep caps.

  Args:
    config, source: as for `play`.
    policy: what was made.
    start: what it was made from; without caps it may be better by .08.
  """
  lacks = []
  before, after = (
    accuracy(config, play(config, source, p, budget=_BUDGET, count=_PLAYED))
    for p in (start, policy)
  )
  print(f"accuracy at budget {_BUDGET} {after:.3f}, of the start {before:.3f}")
  if after < before - _LOSS:
    lacks.append(
      f"accuracy: found {after:.3f}, expected at least {before:.3f} - {_LOSS}"
    )
  for tokens in _CAPS:
    cap = budgets.Budget(_BUDGET, tokens)
    played = play(config, source, policy, budget=cap, count=_UNDER_CAPS)
    ended = [t.outcome is types.Outcome.ANSWERED for t in played]
    answered = sum(ended) / len(ended)
    right = accuracy(config, played)
    print(f"{cap}: answered {answered:.3f}, right {right:.3f}")
    if answered < _ANSWERED:
      lacks.append(
        f"answers under {cap}: found {answered:.3f}, expected at least "
        f"{_ANSWERED}"
      )
  return lacks
