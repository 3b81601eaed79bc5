"""Compares rollouts and training of the quickstart's policy with torch.

    python -m bench.quickstart [--threads=1]

Prints the tokens per second of this engine and of transformers' `generate` per
turn on the same questions, of the train step and of an eager torch step on the
same trajectories, the median ratios of alternating pairs, the rollout's share
of a training run's wall time, and the number of compiled programs.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from absl import flags

from configs import quickstart
from launch import flags as launch_flags
from launch import jax_setup, parts

_THREADS = flags.DEFINE_integer("threads", 1, "CPU threads of either side.")
_PAIRS = flags.DEFINE_integer("pairs", 5, "Pairs of measurements.")


def main(argv) -> None:
  del argv
  jax_setup.configure(threads=_THREADS.value, cache=".jax_cache")
  import jax
  import numpy as np
  import torch

  from anysearch_jax.methods import systems
  from anysearch_jax.policy import hf
  from anysearch_jax.rollout import driver
  from anysearch_jax.rollout.jax_engine import engine as engine_lib
  from anysearch_jax.rollout.jax_engine import kv_store
  from anysearch_jax.training import (
    rewards_and_advantages,
    throughput,
    train_step,
  )
  from bench import torch_peer

  torch.set_num_threads(_THREADS.value or torch.get_num_threads())
  config = quickstart.get_config()
  source = parts.source(config)
  policy = hf.load(config.policy)
  questions = source.questions("dev", config.questions, 0)
  ours = engine_lib.JaxEngine(
    policy,
    config=config.engine,
    sampling=config.sampling,
    seed=0,
  )
  theirs = torch_peer.TorchEngine(config.policy, policy.tokenizer)

  def play(engine, rollout):
    return asyncio.run(
      driver.run_groups(
        [
          driver.Assignment(i, question, i % 5 + 1, False)
          for i, question in enumerate(questions)
        ],
        group=config.group,
        rollout=rollout,
        engine=engine,
        retriever=source.retriever,
        config=config.episode,
        codec=policy.tokenizer,
      )
    )

  def tokens(rollout):
    return sum(
      t.generated_tokens for g in rollout.groups for t in g.trajectories
    )

  def timed(call):
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started

  play(ours, 0), play(theirs, 0)
  rollouts = []
  for pair in range(1, _PAIRS.value + 1):
    a, a_s = timed(lambda p=pair: play(ours, p))
    b, b_s = timed(lambda p=pair: play(theirs, p))
    rollouts.append((tokens(a) / a_s, tokens(b) / b_s, a_s))

  scored = rewards_and_advantages.score(
    a.groups,
    np.asarray([g.budget for g in a.groups]),
    samples=config.group,
    method=systems.trained(config),
    objective=config.objective,
  )
  (batch,) = rewards_and_advantages.batches(
    scored, steps=1, config=config.batch
  )
  examples = rewards_and_advantages.examples(scored)
  size = sum(len(e.token_ids) for e in examples)
  tx = train_step.optimizer(policy.architecture, config.optimizer)
  step = train_step.make(
    train_step.grpo_loss(
      policy.architecture, config.objective, temperature=1.0
    ),
    tx,
  )
  state = jax.device_put(train_step.init(policy.params, tx), jax.devices()[0])
  reference = jax.tree.map(jax.numpy.asarray, policy.params)
  model, frozen = (
    theirs.model.train(),
    torch_peer.TorchEngine(config.policy, policy.tokenizer).model,
  )
  adam = torch.optim.AdamW(
    model.parameters(),
    lr=config.optimizer.learning_rate,
    betas=(0.9, 0.98),
    weight_decay=0.01,
  )
  trains = []
  for pair in range(_PAIRS.value + 1):
    (state, _), a_s = timed(
      lambda s=state: jax.block_until_ready(step(s, reference, batch))
    )
    _, b_s = timed(
      lambda: torch_peer.train_step(model, frozen, adam, examples, rows=16)
    )
    if pair:
      trains.append((size / a_s, size / b_s, a_s))

  def show(name, pairs):
    a, b = (statistics.median(p[i] for p in pairs) for i in (0, 1))
    ratio = statistics.median(p[0] / p[1] for p in pairs)
    print(f"{name:<28}{a:>10.0f}{b:>12.0f}{ratio:>9.1f}x")

  print(f"{'tokens a second':<28}{'ours':>10}{'torch':>12}{'ratio':>10}")
  show("rollout (generated tokens)", rollouts)
  show("train step (all tokens)", trains)
  rollout_s = statistics.median(p[2] for p in rollouts)
  train_s = statistics.median(p[2] for p in trains)
  share = rollout_s / (rollout_s + train_s)
  print(f"rollout share of wall time: {share:.0%}")
  c = ours.counters
  print(f"lane occupancy: {c['lanes_used'] / c['lanes_offered']:.0%}")
  compiled = {
    "decode": throughput.programs(kv_store.decode),
    "prefill": throughput.programs(kv_store.prefill),
    "train step": throughput.programs(step),
  }
  print("compiled programs:", compiled)


if __name__ == "__main__":
  launch_flags.run(main)
