r"""Trains AnySearch: the whole method in one file, from top to bottom.

    python -m examples.train_anysearch --rollouts=12 --output=runs/example

It trains the quickstart's policy of 0.3 million parameters in the generated
world, one rollout after the other, on one device, in float32. A test compares
its numbers with those of `launch.train` bit for bit. That command adds what a
long run needs: checkpoints, meshes, adapters, and sampling while it trains.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import anysearch_jax as aj
from anysearch_jax import batching, curriculum, grpo, rewards, train_step
from anysearch_jax.configs import quickstart

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Scored(NamedTuple):
  """A rollout as arrays `[Q, G]`: Q questions, G trajectories of each."""

  em: np.ndarray
  searches: np.ndarray
  total: np.ndarray
  advantages: np.ndarray


def play(
  rollout: int,
  questions: Sequence[aj.Question],
  assigned: curriculum.Assignment,
  *,
  engine: Any,
  retriever: Any,
  codec: Any,
  config: aj.ExperimentConfig,
) -> list[aj.Group]:
  """Plays `config.group` episodes of each question under its budget.

  An episode is a prompt that names the budget, then turns: the policy thinks
  and searches or answers, and the environment shows what the search found. It
  shows the remaining budget before each turn if the scaffold is on.

  Args:
    rollout: number of the rollout, which addresses random draws.
    questions: Q questions.
    assigned: their budgets `[Q]`, and whether the scaffold is on.
    engine: samples the policy.
    retriever: answers the searches.
    codec: the policy's tokenizer.
    config: the whole configuration.
  """
  env = aj.environment_of(config.episode)
  played = aj.run(
    aj.run_groups(
      [
        aj.Assignment(i, question, int(budget), bool(assigned.scaffold))
        for i, (question, budget) in enumerate(zip(questions, assigned.budgets))
      ],
      aj.EpisodeParts(engine, retriever, config.episode, codec, env),
      group=config.group,
      rollout=rollout,  # Every random draw is addressed by it.
      max_concurrency=config.engine.slots,
    )
  )
  if played.failed:
    raise RuntimeError(f"{played.failed} episodes failed: {played.reason}")
  return played.groups


def score(groups: Sequence[aj.Group], config: aj.ExperimentConfig) -> Scored:
  """Judges each trajectory, and compares it with the others of its group."""
  env = aj.environment_of(config.episode)
  verdicts = [[env.judge(t) for t in group.trajectories] for group in groups]
  em = np.array([[v.em for v in row] for row in verdicts])
  searches = np.array([[t.searches for t in g.trajectories] for g in groups])
  # An unreachable engine or retriever would make a trajectory invalid.
  valid = np.ones(em.shape, bool)
  # Accuracy, format, length, and tool productivity: the fewer searches a right
  # answer took, the better, and the more so the easier the question is.
  reward = rewards.composite(
    em,
    np.array([[v.format for v in row] for row in verdicts]),
    np.array([[t.generated_tokens for t in g.trajectories] for g in groups]),
    searches,
    np.array([group.budget for group in groups]),
    valid,
    config=config.reward,
  )
  # GRPO needs no critic: a group's mean is its baseline.
  advantages = grpo.advantages(
    reward.total,
    valid,
    epsilon=config.objective.advantage_epsilon,
    normalize=config.objective.normalize,
    deviation=config.objective.deviation,
  )
  return Scored(em, searches, *jax.device_get((reward.total, advantages)))


def batches(
  groups: Sequence[aj.Group], scored: Scored, config: aj.ExperimentConfig
) -> list[batching.HostBatch]:
  """Packs the rollout into one batch for each of its optimizer steps.

  Args:
    groups: the episodes of the rollout.
    scored: their advantages `[Q, G]`.
    config: the whole configuration.
  """
  packed = []
  trajectories = [t for group in groups for t in group.trajectories]
  size = len(trajectories) // config.curriculum.steps_per_rollout
  for start in range(0, len(trajectories), size):
    members = trajectories[start : start + size]
    # Only what the policy wrote is trained on, not what it was shown. The loss
    # is the mean over trajectories of the mean over each one's tokens.
    weights = grpo.token_weights(
      [t.authors == aj.Author.MODEL for t in members],
      reduction=config.objective.reduction,
    )
    advantages = scored.advantages.reshape(-1)[start : start + size]
    sequences = [
      batching.Example(t.token_ids, weight, t.logps, float(advantage))
      for t, weight, advantage in zip(members, weights, advantages)
    ]
    packed.append(batching.pack(sequences, config=config.batch))
  return packed


def train(
  config: aj.ExperimentConfig,
  *,
  rollouts: int,
  policy: aj.Policy,
  questions: Sequence[aj.Question],
  retriever: Any,
) -> tuple[aj.Policy, list[dict[str, Any]]]:
  """Trains; returns the trained policy, and the metrics of each rollout.

  Args:
    config: `pipeline.async_level` 0 and `objective.old_logp` "engine".
    rollouts: how many; the budgets of both phases follow from `config`.
    policy: the start, which is also the reference of the KL term.
    questions: each is asked in one rollout, in this order.
    retriever: answers the searches, see `own_retriever.py`.
  """
  c = config.curriculum
  a = policy.architecture
  tx = aj.optimizers.adamw(a, config.optimizer, total_steps=c.total_steps)
  loss = train_step.grpo_loss(
    a, config.objective, temperature=config.sampling.temperature
  )
  step = train_step.make(loss, tx)
  state = train_step.init(policy.params, tx)
  budgets = curriculum.init(c, config.seed)
  engine = aj.make_engine(policy, config, seed=config.seed)
  history = []
  for rollout in range(rollouts):
    # Phase I: budgets fall from the largest to 1, and the scaffold is on.
    # Phase II: budgets are drawn where accuracy lags most, without a scaffold.
    assigned = jax.device_get(
      curriculum.assign(budgets, num_groups=config.questions, config=c)
    )
    groups = play(
      rollout,
      questions[rollout * config.questions :][: config.questions],
      assigned,
      engine=engine,
      retriever=retriever,
      codec=policy.tokenizer,
      config=config,
    )
    scored = score(groups, config)
    budgets = curriculum.record(
      budgets,
      np.repeat(assigned.budgets, config.group),
      scored.em.reshape(-1),
      np.ones(scored.em.size, bool),
      config=c,
    )
    losses = []
    for batch in batches(groups, scored, config):
      state, values = step(state, policy.params, batch)
      losses.append(float(values["loss/total"]))
    # The next rollout is sampled by the policy that these steps made.
    engine.set_params(state.params, rollout + 1)
    history.append(
      {
        "rollout": rollout,
        "budget": float(np.mean(assigned.budgets)),
        "scaffold": bool(assigned.scaffold),
        "em": float(np.mean(scored.em)),
        "searches": float(np.mean(scored.searches)),
        "reward": float(np.mean(scored.total)),
        "losses": losses,
      }
    )
    print(history[-1], flush=True)
  return policy._replace(params=state.params), history


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--rollouts", type=int, default=120)
  parser.add_argument("--questions", type=int, default=200, help="to evaluate")
  parser.add_argument("--output", type=pathlib.Path, default="runs/example")
  args = parser.parse_args(argv)
  if not 1 <= args.rollouts <= 120:
    parser.error(f"--rollouts: found {args.rollouts}, expected 1 to 120.")
  if args.output.exists():
    parser.error(f"--output: found {args.output}, expected a new folder.")
  config = quickstart.get_config()
  aj.validate(config)
  world = aj.World()
  retriever = aj.LexicalRetriever(world.corpus, reads=world.searched)
  trained, _ = train(
    config,
    rollouts=args.rollouts,
    policy=aj.load_policy(ROOT / config.policy),
    questions=world.questions("train", 120 * config.questions, config.seed),
    retriever=retriever,
  )

  # Questions of other snapshots of the world, and budgets 0 and 8, which were
  # never trained. The folder also gets each episode as a line of JSON.
  args.output.mkdir(parents=True)
  aj.save_policy(args.output / "policy", trained)
  engine = aj.make_engine(trained, config, seed=0)
  env = aj.environment_of(config.episode)
  summary = aj.evaluate(
    config.evaluation,
    aj.Playing(config.episode, env, config.engine.slots),
    player=aj.Player(engine, trained.tokenizer),
    questions=world.questions("held-out", args.questions, seed=2024),
    retriever=retriever,
    folder=args.output,
  )
  for cell in summary["cells"]:
    print(
      "budget {budget}: {em} of {n} right, {searches} searches".format(**cell)
    )


if __name__ == "__main__":
  main()
