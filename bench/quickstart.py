"""Compares rollouts and training of the quickstart's policy with torch.

    python -m bench.quickstart [--threads=1]

Prints the tokens per second of this engine and of transformers' `generate` per
turn on the same questions, of the train step and of an eager torch step on the
same trajectories, the median ratios of alternating pairs, the rollout's share
of a training run's wall time, and the number of compiled programs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from absl import flags

from anysearch_jax import types
from bench import harness
from configs import quickstart
from launch import jax_setup

# Rows of a micro-batch of the eager torch step.
_TORCH_ROWS = 16


def main() -> dict[str, object]:
  threads, rounds = flags.FLAGS.threads, flags.FLAGS.pairs
  jax_setup.configure(threads=threads, cache=".jax_cache")
  import torch

  from anysearch_jax.methods import systems
  from anysearch_jax.policy import hf
  from anysearch_jax.rollout import driver
  from anysearch_jax.rollout.jax_engine import kv_store
  from anysearch_jax.training import rewards_and_advantages, throughput
  from bench import policies, torch_peer
  from launch import world_source

  torch.set_num_threads(threads or torch.get_num_threads())
  config = quickstart.get_config()
  policy = hf.load(config.policy)
  source = world_source.make(config.data, config.retrieval.kind)
  questions = source.questions("dev", config.questions, 0)
  ours = policies.local_engine(policy, config.engine, config.sampling)
  theirs = torch_peer.TorchEngine(config.policy, policy.tokenizer)
  engines: dict[str, types.Engine] = {"ours": ours, "torch": theirs}
  numbers = dict.fromkeys(engines, 0)
  last: dict[str, driver.Rollout] = {}

  def play(name: str) -> dict[str, float]:
    last[name], timing = harness.timed(
      lambda: policies.play(
        questions,
        driver.EpisodeParts(
          engines[name], source.retriever, config.episode, policy.tokenizer
        ),
        group=config.group,
        rollout=numbers[name],
      )
    )
    numbers[name] += 1
    speed = policies.generated(last[name]) / timing.seconds
    return {"seconds": timing.seconds, "tokens/s": speed}

  harness.in_turns(engines, play, rounds=1)  # Compiles.
  rollouts = harness.in_turns(engines, play, rounds=rounds)
  groups = last["ours"].groups
  scored = rewards_and_advantages.score(
    groups,
    np.asarray([g.budget for g in groups]),
    samples=config.group,
    method=systems.trained(config),
    objective=config.objective,
  )
  examples = rewards_and_advantages.examples(scored)
  size = sum(len(e.token_ids) for e in examples)
  step = policies.TrainStep(
    config, policy.architecture, examples, params=policy.params
  )
  sides: dict[str, Callable[[], object]] = {
    "ours": step,
    "torch": torch_peer.step(
      theirs.model,
      torch_peer.TorchEngine(config.policy, policy.tokenizer).model,
      examples,
      learning_rate=config.optimizer.learning_rate,
      rows=_TORCH_ROWS,
    ),
  }

  def train(name: str) -> dict[str, float]:
    seconds = harness.seconds(sides[name])
    return {"seconds": seconds, "tokens/s": size / seconds}

  harness.in_turns(sides, train, rounds=1)
  steps = harness.in_turns(sides, train, rounds=rounds)
  table = harness.Table("tokens a second", "ours", "torch", "ratio")
  for name, found in (
    ("rollout (generated tokens)", rollouts),
    ("train step (all tokens)", steps),
  ):
    table.row(
      name,
      *(found.medians(side)["tokens/s"] for side in sides),
      f"{found.ratio('tokens/s', 'ours', 'torch').median:.1f}x",
    )
  rollout_s, step_s = (f.medians("ours")["seconds"] for f in (rollouts, steps))
  c = ours.counters
  out: dict[str, object] = {
    "rollout share of wall time": rollout_s / (rollout_s + step_s),
    "lane occupancy": c["lanes_used"] / c["lanes_offered"],
    "compiled decode programs": throughput.programs(kv_store.decode),
    "compiled prefill programs": throughput.programs(kv_store.prefill),
    "compiled train steps": throughput.programs(step.step),
  }
  harness.print_numbers(out)
  return {"rollouts": rollouts.each, "steps": steps.each} | out


if __name__ == "__main__":
  flags.DEFINE_integer("threads", 1, "CPU threads of either side.")
  flags.DEFINE_integer("pairs", 5, "Pairs of measurements.")
  harness.run(main)
