"""Questions about documents of your own, to a model that was not trained here.

    anysearch ask --documents=my_notes --budget=2 "When does the lease end?"

`--documents` uses this configuration unless `--config` names another.

Presets, `--config=configs/documents.py:<preset>`:
    (none)     a model behind an address
    cpu, gpu   a Hugging Face folder, on a CPU with 8 GB of memory (up to 0.6
               billion parameters) or a GPU with 24 GB (up to 4 billion)
"""

from __future__ import annotations

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings
from anysearch_jax.rollout import endpoints

PRESETS = ("", "cpu", "gpu")


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  settings.require("preset", preset, PRESETS)
  config = endpoints.default_config()
  if not preset:
    return config
  on_cpu = preset == "cpu"
  context = 8192 if on_cpu else config.episode.max_context
  return config_lib.changed(
    config,
    compute_dtype="float32" if on_cpu else "bfloat16",
    episode={
      "max_generated": context // 4,
      "max_context": context,
      # A CPU writes some 5 to 20 tokens a second.
      "turn_deadline": 600.0 if on_cpu else 120.0,
    },
    engine={
      "slots": 4 if on_cpu else 16,
      "max_context": context,
      "kv_tokens": (2 if on_cpu else 4) * context,
      "page": 64,
      "lanes": (1, 4) if on_cpu else (4, 16),
      "prefill_lanes": 1 if on_cpu else 4,
      # A short question waits for one whole chunk.
      "prefill_chunk": 64 if on_cpu else 256,
    },
  )
