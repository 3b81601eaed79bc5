"""Qwen3-30B-A3B, 128 experts a layer: every weight, on eight GPUs of 141 GB.

Hardware: one node of eight H200, which train and sample in turns. Each has 16
of a layer's experts (`mesh.expert`). Eight GPUs of 80 GB are too few: masters,
moments, gradients and two copies in bfloat16 take 78 GiB on each.
`configs/one_gpu.py:qwen3_30b_a3b-141` adapts its attention on one H200.
Memory and hours: docs/will_it_fit.md. Questions, passages: `configs/paper.py`.
Expected: unknown; nothing has been trained with this configuration yet.

    hf download Qwen/Qwen3-30B-A3B --local-dir models/Qwen3-30B-A3B
    python -m launch.train --config=configs/qwen3_30b_a3b.py
"""

from __future__ import annotations

from anysearch_jax import config as config_lib
from anysearch_jax.configs import paper

# Of each of the copies of the policy that sample.
_KV_TOKENS = 1 << 20


def get_config() -> config_lib.ExperimentConfig:
  config = paper.experiment(
    "qwen3_30b_a3b",
    "models/Qwen3-30B-A3B",
    "",
    kv_tokens=paper.KvTokens(_KV_TOKENS, 0, 0),
  )
  return config_lib.changed(
    config,
    mesh=config_lib.MeshConfig(expert=8),
    # The same devices sample and train, so there is nothing to overlap.
    pipeline=config_lib.PipelineConfig(),
    batch={"micro_batch_tokens": 98304, "remat": "full"},
  )
