"""The configuration of the memory experiment; presets `cpu` and `gpu`.

Paths are flags, see `research/memory/__init__.py`.
"""

from __future__ import annotations

from typing import Any

import anysearch_jax as aj
from anysearch_jax import config as config_lib
from anysearch_jax.configs import small

# Depths of chains are those of the largest budget that is trained.
MAX_BUDGET = 4
BUDGETS = (1, 2, 3, 4, 5, 6)
# Six searches of two passages, with their turns.
_CONTEXT = 1664
_GENERATED = 320
_QUESTIONS, _GROUP = 32, 8
# One step each.
_ROLLOUTS = {"cpu": 300, "gpu": 75}
_SIZES = {"cpu": "smollm2-cpu", "gpu": "qwen2_5_0_5b-80"}


def curriculum(rollouts: int) -> dict[str, Any]:
  """Returns the settings of a curriculum whose first fifth is Phase I."""
  level_steps = rollouts // (5 * MAX_BUDGET)
  return {
    "max_budget": MAX_BUDGET,
    "phase1_steps": level_steps * MAX_BUDGET,
    "phase1_scaffold": False,
    "total_steps": rollouts,
    "steps_per_rollout": 1,
  }


def get_config(preset: str = "cpu") -> aj.ExperimentConfig:
  aj.settings.require("preset", preset, _SIZES)
  base = small.get_config(_SIZES[preset])
  return config_lib.changed(
    base,
    name=f"memory-{preset}",
    policy=small.POLICIES["smollm2"],
    questions=_QUESTIONS,
    group=_GROUP,
    # All weights are trained: memories do not fit into small adapters.
    lora={"rank": 0},
    sft={"learning_rate": 1e-4, "steps": 250},
    search={"passage_characters": 320},
    episode={"max_context": _CONTEXT, "max_generated": _GENERATED},
    # A penalty of length would be a price of searches in every row.
    reward={"length_limit": _GENERATED},
    engine={"max_context": _CONTEXT},
    batch={
      "row_lengths": (512, _CONTEXT),
      "micro_batch_tokens": _CONTEXT * (8 if preset == "gpu" else 1),
      "max_micro_batches": 256,
    },
    curriculum=curriculum(_ROLLOUTS[preset]),
    evaluation={"datasets": ("memory",), "budgets": BUDGETS, "questions": 0},
  )
