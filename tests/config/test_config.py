"""The configuration: strict, typed, and the same after a round trip."""

from __future__ import annotations

import dataclasses
import json

import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings as config_settings

CHANGED = config_lib.ExperimentConfig(
  name="x",
  questions=8,
  reward=config_lib.RewardConfig(gamma_mode="off", use_abs=False),
  batch=config_lib.BatchConfig(row_lengths=(8, 16), remat="full"),
  evaluation=config_lib.EvaluationConfig(budgets=(), seeds=(1, 2)),
)


@pytest.mark.parametrize("config", [config_lib.ExperimentConfig(), CHANGED])
def test_round_trip_is_the_identity_through_json_too(config):
  values = config_settings.to_dict(config)
  cls = config_lib.ExperimentConfig
  assert config_settings.from_dict(cls, values) == config
  assert (
    config_settings.from_dict(cls, json.loads(json.dumps(values))) == config
  )


def test_missing_keys_take_the_defaults():
  config = config_settings.from_dict(
    config_lib.ExperimentConfig, {"reward": {"alpha": 1}}
  )
  assert config == config_lib.ExperimentConfig(
    reward=config_lib.RewardConfig(alpha=1.0)
  )
  assert type(config.reward.alpha) is float


@pytest.mark.parametrize(
  ("values", "sentence"),
  [
    ({"sead": 1}, "config: unknown key 'sead'; expected one of .*seed"),
    ({"reward": {"alfa": 1}}, "config.reward: unknown key 'alfa'"),
    ({"reward": 3}, "config.reward: found 3, expected a group of values"),
    ({"seed": 1.0}, r"config.seed: found 1.0 \(float\), expected int"),
    ({"seed": True}, r"config.seed: found True \(bool\), expected int"),
    ({"name": 7}, r"config.name: found 7 \(int\), expected str"),
    ({"batch": {"remat": 1}}, r"batch.remat: found 1 \(int\), expected str"),
    ({"batch": {"row_lengths": 8}}, "row_lengths: found 8, expected a list"),
    (
      {"batch": {"row_lengths": [8, "9"]}},
      r"config.batch.row_lengths\[1\]: found '9' \(str\), expected int",
    ),
  ],
)
def test_a_wrong_key_or_type_is_refused_with_its_path(values, sentence):
  with pytest.raises(ValueError, match=sentence):
    config_settings.from_dict(config_lib.ExperimentConfig, values)


def test_a_saved_configuration_with_an_old_name_is_read():
  old = config_settings.to_dict(CHANGED)
  del old["objective"]["normalize"]
  old["objective"]["normalize_std"] = False
  with pytest.raises(ValueError, match="unknown key 'normalize_std'"):
    config_settings.from_dict(config_lib.ExperimentConfig, old)
  config = config_settings.from_dict(
    config_lib.ExperimentConfig, config_settings.renamed(old)
  )
  assert config.objective == config_lib.ObjectiveConfig(normalize="none")
  assert config.batch == CHANGED.batch
  assert "normalize_std" in old["objective"]  # The argument is unchanged.


def test_defaults_are_the_papers_hyperparameters():
  config = config_lib.ExperimentConfig()
  reward = dataclasses.asdict(config.reward)
  assert reward | {"alpha": 0.5, "beta": 0.15, "delta": 0.05} == reward
  assert reward | {"length_limit": 2048, "length_tolerance": 1024} == reward
  assert (config.questions, config.group) == (512, 5)
  assert config.questions * config.group == 512 * (
    config.curriculum.steps_per_rollout
  )
  assert (config.objective.clip_low, config.objective.clip_high) == (0.2, 0.28)
  assert config.optimizer.learning_rate == 1e-6
