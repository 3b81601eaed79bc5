"""Qwen2.5-7B-Instruct: the paper's run.

Hardware, presets, questions and passages: `configs/paper.py`.
Memory, planned for h100:4: 52.8 GiB on a training GPU and 49.2 GiB on a
sampling GPU, of 72.8 GiB available to programs.
`:lora141`, planned for h200:1: 99.6 of 128.6 GiB.
Hours, predicted, not measured: 5.3 for training (500 steps of 1.3 M tokens,
38 s each: docs/will_it_fit.md), plus sampling. The paper's run took 41.
Expected: unknown; nothing has been trained with this configuration yet.

    hf download Qwen/Qwen2.5-7B-Instruct \\
        --local-dir models/Qwen2.5-7B-Instruct
    python -m launch.train --config=configs/qwen2_5_7b.py
"""

from __future__ import annotations

from anysearch_jax import config as config_lib
from anysearch_jax.configs import paper


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return paper.experiment(
    "qwen2_5_7b",
    "models/Qwen2.5-7B-Instruct",
    preset,
    kv_tokens=paper.KvTokens(3 << 20, 5 << 17, 5 << 18),
  )
