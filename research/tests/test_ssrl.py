"""SSRL's training, in which the policy is its own search engine."""

from __future__ import annotations

import pytest
import small_systems

from research import study


@pytest.mark.parametrize("preset", ["ssrl", "ssrl:qwen2_5_7b"])
def test_training_searches_in_the_policy_and_is_never_noisy(preset):
  config = study.load_config(f"research/methods/configs.py:{preset}")
  assert config.retrieval.simulated == "policy"
  assert config.curriculum.fixed_budget == config.curriculum.max_budget
  assert small_systems.noisy_searches(config) == 0
