r"""Measures a train step's time, tokens per second and model FLOPs utilisation.

    python -m bench.train_step
        on a CPU: a Qwen2-shaped policy of 19 M parameters
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

import os
import pathlib
from collections.abc import Sequence

from absl import flags

from anysearch_jax import config as config_lib
from anysearch_jax.host import json_files
from bench import harness
from launch import flags as launch_flags
from launch import jax_setup

_SHAPE = {
  "architectures": ["Qwen2ForCausalLM"],
  "hidden_size": 384,
  "intermediate_size": 1024,
  "num_hidden_layers": 8,
  "num_attention_heads": 6,
  "num_key_value_heads": 2,
  "vocab_size": 8192,
  "rope_theta": 1e6,
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": False,
  "max_position_embeddings": 4096,
}
# For a small policy: rows of 256 tokens.
_SMALL = config_lib.ExperimentConfig(
  name="small",
  compute_dtype="float32",
  batch=config_lib.BatchConfig(
    row_lengths=(256,), micro_batch_tokens=1024, max_micro_batches=4
  ),
)


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  os.environ.setdefault("HF_HUB_OFFLINE", "1")
  config = (
    launch_flags.override(_SMALL, f.set_config)
    if f.config is None
    else launch_flags.read_config()
  )
  jax_setup.configure(threads=f.threads, cache=f.cache)
  from anysearch_jax.policy import architecture
  from bench import policies

  shape = json_files.read(pathlib.Path(f.shape)) if f.shape else _SHAPE
  a = architecture.from_hf(shape)
  ours = policies.TrainStep(config, a, f.micro_batches, f.scored)
  harness.print_numbers(policies.measure_step(ours, f.steps, profile=f.profile))


if __name__ == "__main__":
  launch_flags.define_config(required=False)
  launch_flags.define_process()
  flags.DEFINE_integer("steps", 5, "Timed steps.")
  flags.DEFINE_string(
    "shape", None, "config.json of the policy; default: a small one."
  )
  flags.DEFINE_integer("micro_batches", 4, "Of each step.")
  flags.DEFINE_float("scored", 0.22, "Share of tokens that have a loss.")
  flags.DEFINE_string("profile", None, "Folder of a profiler trace.")
  launch_flags.run(main)
