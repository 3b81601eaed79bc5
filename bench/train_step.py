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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax.host import json_files
from bench import harness
from launch import flags as launch_flags
from launch import jax_setup

if TYPE_CHECKING:
  from anysearch_jax.policy import architecture as architecture_lib

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


def beside_torch(
  config: config_lib.ExperimentConfig, *, steps: int
) -> dict[str, Any]:
  """Measures our step and torch's in turns, on equal weights and examples."""
  import torch
  import transformers

  from anysearch_jax.policy import hf
  from bench import policies, random_models, torch_peer

  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    random_models.make("qwen2", folder, **_SMALL)
    policy = hf.load(folder)
    work = policies.train_examples(
      row=config.batch.row_lengths[-1],
      vocab=_SMALL["vocab_size"],
      tokens=2 * config.batch.micro_batch_tokens,
    )
    ours = policies.TrainStep(
      config, policy.architecture, work, params=policy.params
    )
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
  out = policies.describe_step(ours, seconds, first["ours"][1].seconds)
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

  from bench import policies

  work = policies.train_examples(
    row=config.batch.row_lengths[-1],
    vocab=a.vocab_size,
    tokens=f.micro_batches * config.batch.micro_batch_tokens,
  )
  ours = policies.TrainStep(config, a, work)
  first = harness.seconds(ours)
  with jax.profiler.trace(f.profile) if f.profile else contextlib.nullcontext():
    seconds = [harness.seconds(ours) for _ in range(f.steps)]
  return policies.describe_step(ours, seconds, first, peak_tflops=f.peak_tflops)


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
