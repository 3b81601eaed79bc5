"""Tests that trainings which cannot run are refused with a sentence."""

from __future__ import annotations

import re

import pytest
import scripted_runs as runs
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax.methods import systems

PPO = {"objective.advantage": "gae"}
# `curriculum` as the paper's: 100 steps of five levels, then 400.
PAPER = {
  "curriculum.max_budget": 5,
  "curriculum.phase1_steps": 100,
  "curriculum.total_steps": 500,
  "curriculum.steps_per_rollout": 5,
  "questions": 20,
}
TOKENS = {"curriculum.token_levels": (9, 16)}
AHEAD = {"pipeline.async_level": 1}


def changed(values, config=small_run.CONFIG):
  """Returns the small run's configuration with other values by path."""
  for path, value in values.items():
    part, _, name = path.rpartition(".")
    of_part = {part: {name: value}} if part else {name: value}
    config = config_lib.changed(config, **of_part)
  return config


@pytest.mark.parametrize(
  ("values", "sentence"),
  [
    (
      {"lora.rank": 2, "lora.targets": ("q", "embed")},
      "found q, embed; expected some of q, k, v",
    ),
    ({"lora.rank": 4, "lora.targets": ()}, "lora.targets: found none"),
    ({"lora.targets": ("q", "v", "q")}, "found q, v, q; expected some of"),
    ({"sampling.top_p": 0.9}, "top_p 0.9, top_k 0; training needs"),
    ({"batch.row_lengths": (64,)}, "exceeds the longest training row"),
    # The curriculum.
    (
      PAPER | {"curriculum.phase1_steps": 525},
      "525 phase1_steps in 500 total_steps",
    ),
    (
      PAPER | {"curriculum.total_steps": 501},
      "501 total_steps; expected a multiple of",
    ),
    (
      PAPER | {"curriculum.phase1_steps": 101},
      "101 phase1_steps; expected a multiple of",
    ),
    (PAPER | {"curriculum.phase1_steps": 40}, "8 steps per level"),
    (
      PAPER | {"curriculum.epochs": 3},
      "5 steps_per_rollout; expected a multiple of epochs, 3",
    ),
    ({"curriculum.token_levels": (9, 9)}, "expected ascending numbers"),
    (TOKENS | {"curriculum.fixed_budget": 2}, "with a fixed_budget of 2"),
    # Environments with requests that follow no response.
    *(
      ({"episode.prompts": name}, f"found {name!r}, which asks models in")
      for name in ("documents_tags", "documents_tools", "documents_short")
    ),
    # Prices.
    ({"reward.rel_cost": "dollars"}, "reward.rel_cost: found dollars"),
    *(
      ({"evaluation.tool_prices": prices}, sentence)
      for prices, sentence in (
        (("serch=10",), "evaluation.tool_prices: found 'serch'"),
        (("search:10",), "evaluation.tool_prices: Found 'search:10'"),
        (("search=1", "search=2"), "each tool once"),
      )
    ),
    # Sampling ahead, and in turns.
    (
      AHEAD | {"objective.old_logp": "trainer"},
      "found 1 with objective.old_logp 'trainer' and importance_cap 0",
    ),
    (
      AHEAD | {"mesh.fsdp": 2},
      "found 1 with device 0 both in mesh.trainer and in mesh.rollout",
    ),
    (
      AHEAD | {"mesh.fsdp": 2, "mesh.rollout": (3, 1)},
      "found 1 with device 1 both in mesh.trainer and in mesh.rollout",
    ),
    (
      AHEAD | {"pipeline.offload": "state"},
      "pipeline.offload: found 'state' with pipeline.async_level 1",
    ),
    (
      AHEAD | {"engine.kind": "sglang", "servers.colocated": True},
      "servers.colocated: found True with pipeline.async_level 1, expected 0",
    ),
    *(
      (
        {"engine.kind": "vllm", f"servers.{name}": value} | more,
        f"servers.{name}: found {value!r} with engine.kind 'vllm'",
      )
      for name, value, more in (
        ("gateway", "http://a:1", {}),
        ("router", "http://a:1", {}),
        ("deltas", True, {"servers.weights": "/shared"}),
      )
    ),
    (
      AHEAD | {"engine.exact": True},
      "engine.exact: found engine.kind 'jax', pipeline.async_level 1",
    ),
    (
      AHEAD | {"pipeline.partial": True},
      "pipeline.partial: found True with pipeline.async_level 1 and "
      "engine.kind 'jax', expected at least 1 and 'sglang'",
    ),
    # A critic.
    (PPO | {"objective.baseline": "turn"}, "whose baseline is the critic"),
    (
      PPO | {"critic.alone_steps": 8},
      "critic.alone_steps: found 8, expected below curriculum.total_steps, 8",
    ),
    (
      {"critic.reward_kl": 0.1},
      "critic.reward_kl: found 0.1 with objective.advantage 'group'",
    ),
  ],
)
def test_configurations_that_cannot_run_are_refused(values, sentence):
  with pytest.raises(ValueError, match=re.escape(sentence)):
    systems.validate(changed(values))


@pytest.mark.parametrize(
  "values",
  [
    PAPER,
    PAPER | {"curriculum.phase1_steps": 500},
    PAPER | {"curriculum.phase1_steps": 0},
    PAPER | {"curriculum.uniform_mix": 1.0},
    PAPER | {"curriculum.fixed_budget": 0},
    TOKENS,
    PPO | {"group": 1, "questions": 8},
    AHEAD | {"objective.old_logp": "engine"},
    AHEAD | {"objective.old_logp": "trainer", "objective.importance_cap": 2.0},
    AHEAD | {"mesh.fsdp": 2, "mesh.rollout": (2, 3)},
    AHEAD | {"mesh.trainer": (1,), "mesh.rollout": (1,)},
  ],
)
def test_configurations_that_can_run_are_accepted(values):
  systems.validate(changed(values))


def test_several_processes_sample_ahead_by_servers_only():
  ahead = runs.at_level(1)
  with pytest.raises(ValueError, match="found 1 in 2 processes with engine.k"):
    systems.validate(ahead, processes=2)
  systems.validate(runs.at_level(0), processes=2)
  served = {"kind": "sglang"}, {"urls": ("http://127.0.0.1:1",)}
  systems.validate(
    config_lib.changed(ahead, engine=served[0], servers=served[1]), processes=2
  )
