r"""Measures a train step's time, tokens per second and model FLOPs utilisation.

    python -m bench.train_step
        on a CPU: a Qwen2-shaped policy of 19 M parameters beside torch eager,
        in turns in one run
    python -m bench.train_step --config=configs/qwen3_4b.py \
        --shape=configs/shapes/Qwen3-4B.json --config.mesh.fsdp=1 \
        --config.mesh.tensor=1 --config.mesh.sequence_parallel=false \
        --config.mesh.trainer='()' --config.mesh.rollout='()' \
        --config.batch.micro_batch_tokens=16384 \
        --config.objective.kl_coefficient=0 --profile=profile
        on one GPU of 141 GB: Qwen3-4B's shape with random weights, packed rows
        of 8192 tokens

The step is the one that `loop.Trainer` runs: sharded, with donated buffers, and
with the reference pass if the configuration has a KL term. Model FLOPs are
those of `training/throughput`: without recomputation and padding, with causal
segments.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax.host import json_files
from bench import harness
from launch import flags as launch_flags
from launch import jax_setup

if TYPE_CHECKING:
  from anysearch_jax.policy import architecture as architecture_lib
  from anysearch_jax.policy import decoder
  from anysearch_jax.training import batching

# About 19 M parameters, so that a CPU can train them in float32.
_SMALL = {
  "hidden_size": 384,
  "intermediate_size": 1024,
  "num_hidden_layers": 8,
  "num_attention_heads": 6,
  "num_key_value_heads": 2,
  "vocab_size": 8192,
}


def small() -> config_lib.ExperimentConfig:
  """Returns the small policy's configuration, with rows of 256 tokens."""
  return config_lib.ExperimentConfig(
    name="small",
    compute_dtype="float32",
    batch=config_lib.BatchConfig(
      row_lengths=(256,), micro_batch_tokens=1024, max_micro_batches=4
    ),
  )


def examples(*, row: int, vocab: int, tokens: int) -> list[batching.Example]:
  """Makes trajectories of a half, a quarter or an eighth of a row.

  They fill rows exactly: `tokens` tokens in all, a multiple of an eighth of a
  row, need as many positions, and a side that pads has little padding.
  """
  from anysearch_jax.training import batching

  rng, out, left = np.random.default_rng(0), [], tokens
  while left:
    size = row >> int(rng.integers(1, 4))
    while size > left:
      size //= 2
    left -= size
    out.append((size, rng.integers(0, vocab, size + 1)))
  return [
    batching.Example(
      ids.astype(np.int32),
      np.full(size + 1, 1 / (size * len(out)), np.float32) * (ids >= 0),
      np.full(size + 1, -np.log(vocab), np.float32),
      float(rng.normal()),
    )
    for size, ids in out
  ]


class Ours:
  """The Trainer's step over random weights, made on the devices that train.

  Args:
    config: the whole configuration, as the loop's builder takes it.
    a: the policy's architecture, without adapters.
    trajectories: of a step.
    params: weights to start from; by default random ones.
  """

  def __init__(
    self,
    config: config_lib.ExperimentConfig,
    a: architecture_lib.Architecture,
    trajectories: Sequence[batching.Example],
    *,
    params: decoder.Params | None = None,
  ):
    import jax

    from anysearch_jax.policy import lora, sharding, table
    from anysearch_jax.training import (
      batching,
      optimizers,
      placement,
      train_step,
    )
    from bench import policies

    self.a = a = lora.attach(a, config.lora)
    self.placed = placed = placement.Placement.of(
      a, config.mesh, dtype=config.compute_dtype
    )
    tx = optimizers.adamw(a, config.optimizer)
    shardings = train_step.shardings(a, tx, placed.trainer)
    compute = placement.compute(
      a,
      config.batch,
      placed.trainer,
      dtype=config.compute_dtype,
      sequence_parallel=config.mesh.sequence_parallel,
    )
    self.attention = compute.attention
    trained = (
      policies.random_weights(
        table.trainable_rows(a), dtype="float32", where=shardings.params
      )
      if params is None
      else jax.device_put(params, shardings.params)
    )
    self.reference = None
    if a.lora is not None or config.objective.kl_coefficient:
      base = sharding.shardings(a.without_lora(), placed.trainer)
      dtype = config.lora.base_dtype if a.lora else config.compute_dtype
      self.reference = (
        policies.random_weights(table.base_rows(a), dtype=dtype, where=base)
        if params is None
        else placed.frozen(params)
      )
    self.state = train_step.init(trained, tx, shardings)
    self.packed = batching.pack(
      trajectories, config=config.batch, multiple=placed.row_multiple
    )
    self.batch = placed.batch(self.packed)
    self.step: Any = train_step.make(
      train_step.grpo_loss(
        a,
        config.objective,
        temperature=config.sampling.temperature,
        compute=compute,
      ),
      tx,
      shardings,
    )

  def __call__(self) -> float:
    """Takes one step, waits for it, and returns its loss."""
    import jax

    self.state, metrics = self.step(self.state, self.reference, self.batch)
    jax.block_until_ready(self.state)
    return float(metrics["loss/total"])


def describe(
  ours: Ours,
  seconds: Sequence[float],
  first: float,
  *,
  peak_tflops: float = 0.0,
) -> dict[str, Any]:
  """Returns the numbers of a run and the physical limits to compare with.

  Args:
    ours: the step.
    seconds: of the timed steps.
    first: seconds of the first step, which compiles.
    peak_tflops: of one device, where its kind is not known.
  """
  import jax

  from anysearch_jax.policy import parameters as weights
  from anysearch_jax.policy import table
  from anysearch_jax.training import throughput

  work = throughput.count([ours.packed])
  flops = throughput.model_flops(
    ours.a, work, forwards=int(ours.reference is not None)
  )
  devices = list(ours.placed.trainer.devices.flat)
  median = statistics.median(seconds)
  out: dict[str, Any] = {
    "device": devices[0].device_kind,
    "devices": len(devices),
    "parameters": weights.count(table.rows(ours.a)),
    "trained": weights.count(table.trainable_rows(ours.a)),
    "attention": ours.attention,
    "tokens": work.tokens,
    "first call, s": first,
    "step, s": median,
    "fastest, s": min(seconds),
    "slowest, s": max(seconds),
    "model TFLOP a step": flops / 1e12,
    "model TFLOP/s": flops / median / 1e12,
    "programs compiled": throughput.programs(ours.step),
  }
  out |= throughput.metrics(work, flops, seconds=median, devices=devices)
  if peak_tflops:
    out["train/mfu"] = flops / median / 1e12 / peak_tflops / len(devices)
  if "train/mfu" in out:
    out["limit by FLOPs, s"] = median * out["train/mfu"]
  # Per step, masters and moments are read and written, gradients are read.
  state = sum(x.nbytes for x in jax.tree.leaves(ours.state))
  out["optimizer's least traffic, GB"] = (2 * state + state / 3) / 1e9
  return out | throughput.memory(devices)


def beside_torch(
  config: config_lib.ExperimentConfig, *, steps: int
) -> dict[str, Any]:
  """Measures our step and torch's in turns, on equal weights and examples."""
  import torch
  import transformers

  from anysearch_jax.policy import hf
  from bench import random_models, torch_peer

  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    random_models.make("qwen2", folder, **_SMALL)
    policy = hf.load(folder)
    work = examples(
      row=config.batch.row_lengths[-1],
      vocab=_SMALL["vocab_size"],
      tokens=2 * config.batch.micro_batch_tokens,
    )
    ours = Ours(config, policy.architecture, work, params=policy.params)
    model, frozen = (
      transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
      )
      for _ in range(2)
    )
  theirs = torch_peer.step(
    model, frozen.eval(), work, learning_rate=1e-6, rows=4
  )
  sides: dict[str, Callable[[], float]]
  sides = {"ours": ours, "torch eager": theirs}
  first = {name: harness.timed(side) for name, side in sides.items()}
  found = harness.timed_in_turns(sides, rounds=steps)
  seconds = found.values("ours", "seconds")
  out = describe(ours, seconds, first["ours"][1].seconds)
  for name, (loss, took) in first.items():
    out[f"{name}: first loss"] = loss
    out[f"{name}: first call, s"] = took.seconds
    out[f"{name}: step, s"] = found.medians(name)["seconds"]
  ratios = sorted(found.ratios("seconds", "torch eager", "ours"))
  out["torch eager / ours"] = statistics.median(ratios)
  out["torch eager / ours, each"] = " ".join(f"{r:.2f}" for r in ratios)
  return out


def alone(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  f: flags.FlagValues,
) -> dict[str, Any]:
  """Measures our step on random weights of an architecture."""
  import jax

  work = examples(
    row=config.batch.row_lengths[-1],
    vocab=a.vocab_size,
    tokens=f.micro_batches * config.batch.micro_batch_tokens,
  )
  ours = Ours(config, a, work)
  first = harness.seconds(ours)
  with jax.profiler.trace(f.profile) if f.profile else contextlib.nullcontext():
    seconds = [harness.seconds(ours) for _ in range(f.steps)]
  return describe(ours, seconds, first, peak_tflops=f.peak_tflops)


def main() -> dict[str, Any]:
  f = flags.FLAGS
  os.environ.setdefault("HF_HUB_OFFLINE", "1")
  config = (
    launch_flags.override(small(), f.set_config)
    if f.config is None
    else launch_flags.read_config()
  )
  jax_setup.configure(threads=f.threads, cache=f.cache)
  if f.shape:
    from anysearch_jax.policy import architecture

    shape = json_files.read(pathlib.Path(f.shape))
    out = alone(config, architecture.from_hf(shape), f)
  else:
    out = beside_torch(config, steps=f.steps)
  harness.print_numbers(out)
  return out


if __name__ == "__main__":
  launch_flags.define_config(required=False)
  launch_flags.define_process()
  flags.DEFINE_integer("steps", 5, "Timed steps (of each side).")
  flags.DEFINE_string(
    "shape",
    None,
    "config.json of the policy; default: a small one beside torch.",
  )
  flags.DEFINE_integer("micro_batches", 4, "Of each step.")
  flags.DEFINE_float(
    "peak_tflops", 0.0, "Of one device, where its kind is not known."
  )
  flags.DEFINE_string("profile", None, "Folder of a profiler trace.")
  harness.run(main)
