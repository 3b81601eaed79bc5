"""Qwen3-4B: the paper's run.

Hardware, presets, questions and passages: `configs/paper.py`.
Memory, planned for h100:4: at most 39.2 GiB on a training GPU and 52.6 GiB on a
sampling GPU, of 72.8 GiB available to programs.
`:lora141`, planned for h200:1: 105.9 of 128.6 GiB.
Hours, predicted, not measured: 3.5 for training (500 steps of 1.3 M tokens,
25 s each: docs/will_it_fit.md), plus sampling. The paper's run took 41.
Expected: unknown; nothing has been trained with this configuration yet.

    hf download Qwen/Qwen3-4B \\
        --local-dir models/Qwen3-4B
    python -m launch.train --config=configs/qwen3_4b.py
"""

from __future__ import annotations

from anysearch_jax import config as config_lib
from anysearch_jax.configs import paper


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return paper.experiment(
    "qwen3_4b",
    "models/Qwen3-4B",
    preset,
    kv_tokens=paper.KvTokens(5 << 18, 5 << 16, 5 << 17),
    dots80=True,
  )
