"""Compares rollouts and training of the quickstart's policy with torch.

    python -m bench.quickstart [--threads=1]

Prints the tokens per second of this engine and of transformers' `generate` per
turn on the same questions, of the train step and of an eager torch step on the
same trajectories, the median ratios of alternating pairs, the rollout's share
of a training run's wall time, and the number of compiled programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags

from bench import harness
from configs import quickstart
from launch import jax_setup

if TYPE_CHECKING:
  from anysearch_jax import config as config_lib
  from anysearch_jax import types
  from anysearch_jax.policy import hf
  from anysearch_jax.rollout import driver
  from anysearch_jax.training import batching

# Rows of a micro-batch of the eager torch step.
_TORCH_ROWS = 16


def main() -> dict[str, object]:
  threads, rounds = flags.FLAGS.threads, flags.FLAGS.pairs
  jax_setup.configure(threads=threads, cache=".jax_cache")
  import torch

  from anysearch_jax.policy import hf
  from anysearch_jax.rollout.jax_engine import kv_store
  from anysearch_jax.training import throughput
  from bench import playing, torch_peer

  torch.set_num_threads(threads or torch.get_num_threads())
  config = quickstart.get_config()
  policy = hf.load(config.policy)
  ours = playing.local_engine(policy, config.engine, config.sampling)
  theirs = torch_peer.TorchEngine(config.policy, policy.tokenizer)
  rollouts, groups = _rollouts(
    config, policy, {"ours": ours, "torch": theirs}, rounds
  )
  examples, batch = _train_batch(config, groups)
  size = sum(len(e.token_ids) for e in examples)
  step = _OurStep(policy, batch, config.optimizer, config.objective)
  frozen = torch_peer.TorchEngine(config.policy, policy.tokenizer).model
  their_step = _their_step(
    frozen, theirs.model, examples, config.optimizer.learning_rate
  )
  step()
  their_step()
  steps = _speeds({"ours": step, "torch": their_step}, size, rounds)
  table = harness.Table("tokens a second", "ours", "torch", "ratio")
  for name, found in (
    ("rollout (generated tokens)", rollouts),
    ("train step (all tokens)", steps),
  ):
    table.row(
      name,
      *(found.medians(side)["tokens/s"] for side in ("ours", "torch")),
      f"{found.ratio('tokens/s', 'ours', 'torch').median:.1f}x",
    )
  rollout_s, step_s = (f.medians("ours")["seconds"] for f in (rollouts, steps))
  c = ours.counters
  out: dict[str, object] = {
    "rollout share of wall time": rollout_s / (rollout_s + step_s),
    "lane occupancy": c["lanes_used"] / c["lanes_offered"],
    "compiled decode programs": throughput.programs(kv_store.decode),
    "compiled prefill programs": throughput.programs(kv_store.prefill),
    "compiled train steps": throughput.programs(step.program),
  }
  harness.print_numbers(out)
  return {"rollouts": rollouts.each, "steps": steps.each} | out


def _speeds(
  sides: dict[str, Callable[[], object]], tokens: int, rounds: int
) -> harness.Rounds:
  """Times sides that process the same number of tokens."""

  def measure(call: Callable[[], object]) -> dict[str, float]:
    seconds = harness.seconds(call)
    return {"seconds": seconds, "tokens/s": tokens / seconds}

  return harness.in_turns(
    sides, lambda name: measure(sides[name]), rounds=rounds
  )


def _rollouts(
  config: config_lib.ExperimentConfig,
  policy: hf.Policy,
  engines: dict[str, types.Engine],
  rounds: int,
) -> tuple[harness.Rounds, Sequence[types.Group]]:
  """Times rollouts in turns; also returns the groups that ours played last."""
  from anysearch_jax.rollout import driver
  from bench import playing
  from launch import world_source

  source = world_source.make(config.data, config.retrieval.kind)
  questions = source.questions("dev", config.questions, 0)
  numbers = dict.fromkeys(engines, 0)
  last: dict[str, driver.Rollout] = {}

  def play(name: str) -> dict[str, float]:
    last[name], timing = harness.timed(
      lambda: playing.play(
        questions,
        driver.EpisodeParts(
          engines[name], source.retriever, config.episode, policy.tokenizer
        ),
        group=config.group,
        rollout=numbers[name],
      )
    )
    numbers[name] += 1
    speed = playing.generated(last[name]) / timing.seconds
    return {"seconds": timing.seconds, "tokens/s": speed}

  harness.in_turns(engines, play, rounds=1)  # Compiles.
  return harness.in_turns(engines, play, rounds=rounds), last["ours"].groups


def _train_batch(
  config: config_lib.ExperimentConfig, groups: Sequence[types.Group]
) -> tuple[list[batching.Example], batching.HostBatch]:
  from anysearch_jax.methods import systems
  from anysearch_jax.training import rewards_and_advantages

  scored = rewards_and_advantages.score(
    groups,
    np.asarray([g.budget for g in groups]),
    samples=config.group,
    method=systems.trained(config),
    objective=config.objective,
  )
  (batch,) = rewards_and_advantages.batches(
    scored, count=1, config=config.batch
  )
  return rewards_and_advantages.examples(scored), batch


class _OurStep:
  """The train step of the quickstart on one device."""

  def __init__(
    self,
    policy: hf.Policy,
    batch: batching.HostBatch,
    optimizer: config_lib.OptimizerConfig,
    objective: config_lib.ObjectiveConfig,
  ):
    import jax

    from anysearch_jax.training import optimizers, train_step

    a = policy.architecture
    tx = optimizers.adamw(a, optimizer)
    loss = train_step.grpo_loss(a, objective, temperature=1.0)
    self.program: Any = train_step.make(loss, tx)
    self._state = jax.device_put(
      train_step.init(policy.params, tx), jax.devices()[0]
    )
    self._reference = jax.tree.map(jax.numpy.asarray, policy.params)
    self._batch = batch

  def __call__(self) -> None:
    import jax

    self._state, metrics = self.program(
      self._state, self._reference, self._batch
    )
    jax.block_until_ready((self._state, metrics))


def _their_step(
  frozen: Any,
  model: Any,
  examples: Sequence[batching.Example],
  learning_rate: float,
) -> Callable[[], object]:
  import torch

  from bench import torch_peer

  model = model.train()
  adam = torch.optim.AdamW(
    model.parameters(),
    lr=learning_rate,
    betas=(0.9, 0.98),
    weight_decay=0.01,
  )
  return lambda: torch_peer.train_step(
    model, frozen, adam, examples, rows=_TORCH_ROWS
  )


if __name__ == "__main__":
  flags.DEFINE_integer("threads", 1, "CPU threads of either side.")
  flags.DEFINE_integer("pairs", 5, "Pairs of measurements.")
  harness.run(main)
