"""Llama-3.1-8B-Instruct: the paper's run.

Hardware, presets, questions and passages: `configs/paper.py`.
Memory, planned for h100:4: 54.5 GiB on a training GPU and 55.6 GiB on a
sampling GPU, of 72.8 GiB available to programs.
`:lora141`, planned for h200:1: 111.0 of 128.6 GiB.
Hours, predicted, not measured: 5.6 for training (500 steps of 1.3 M tokens,
41 s each: docs/will_it_fit.md), plus sampling. The paper's run took 41.
Expected: unknown; nothing has been trained with this configuration yet.

    hf download meta-llama/Llama-3.1-8B-Instruct \\
        --local-dir models/Llama-3.1-8B-Instruct
    python -m launch.train --config=configs/llama3_1_8b.py
"""

from __future__ import annotations

from anysearch_jax import config as config_lib
from anysearch_jax.configs import paper


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  return paper.experiment(
    "llama3_1_8b",
    "models/Llama-3.1-8B-Instruct",
    preset,
    kv_tokens=paper.KvTokens(3 << 19, 75 << 12, 5 << 17),
  )
