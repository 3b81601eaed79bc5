"""The configuration: strict, typed, and what may change when a run resumes."""

from __future__ import annotations

import dataclasses
import json

import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings as config_settings
from anysearch_jax.launch import flags

CONFIG = config_lib.ExperimentConfig()
Kind = config_settings.Kind
CHANGED = config_lib.ExperimentConfig(
  name="x",
  questions=8,
  reward=config_lib.RewardConfig(gamma_mode="off", use_abs=False),
  batch=config_lib.BatchConfig(row_lengths=(8, 16), remat="full"),
  evaluation=config_lib.EvaluationConfig(budgets=(), seeds=(1, 2)),
)


@pytest.mark.parametrize("config", [config_lib.ExperimentConfig(), CHANGED])
def test_round_trip_is_the_identity_through_json_too(config):
  for values in (config_settings.to_dict(config), stored(config)):
    found = config_settings.from_dict(config_lib.ExperimentConfig, values)
    assert found == config


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
    ({"seed": True}, r"config.seed: found True \(bool\), expected int"),
    ({"name": 7}, r"config.name: found 7 \(int\), expected str"),
    ({"batch": {"row_lengths": 8}}, "row_lengths: found 8, expected a list"),
  ],
)
def test_a_wrong_key_or_type_is_refused_with_its_path(values, sentence):
  with pytest.raises(ValueError, match=sentence):
    config_settings.from_dict(config_lib.ExperimentConfig, values)


def test_a_run_of_a_setting_that_is_gone_is_refused_by_its_name():
  old = config_settings.to_dict(CONFIG)
  old["retrieval"]["postgres"] = "postgresql://db/wiki"
  with pytest.raises(ValueError, match="config.retrieval: unknown key 'postg"):
    config_settings.from_dict(config_lib.ExperimentConfig, old)
  changed = config_settings.changes(old, CONFIG)
  assert [change.path for change in changed] == ["retrieval.postgres"]
  said = config_settings.refusal(changed, allow=False)
  assert 'found retrieval.postgres "postgresql://db/wiki" -> null' in said
  assert not config_settings.refusal(changed, allow=True)


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


# Changes between two starts of a run.


def test_every_setting_has_a_kind_and_a_sentence_and_numbers_have_a_range():
  found = {each.path: each for each in config_settings.listed(CONFIG)}
  for path, value in config_settings.leaves(config_settings.to_dict(CONFIG)):
    setting = found[path]
    assert setting.meta.kind in Kind and setting.sentence.endswith(".")
    items = value if isinstance(value, tuple) else (value,)
    if any(type(item) in (int, float) for item in items):
      assert setting.meta.range.words, path


def stored(config=CONFIG):
  return json.loads(json.dumps(config_settings.to_dict(config)))


def found(*assignments):
  changed = config_settings.changes(
    stored(), flags.override(CONFIG, list(assignments))
  )
  return [(c.path, c.kind, c.old, c.new) for c in changed]


def test_changes_are_named_with_their_kind_and_both_values():
  # A stored tuple is a list, which is not a change.
  assert found("batch.row_lengths=128,256,576") == []
  assert found("seed=7", "mesh.data=2", "reward.alpha=0.25") == [
    ("seed", Kind.IDENTITY, 42, 7),
    ("reward.alpha", Kind.LEARNING, 0.5, 0.25),
    ("mesh.data", Kind.PLACEMENT, 1, 2),
  ]


def test_a_setting_that_was_not_stored_had_its_default():
  old = stored()
  del old["watch"]["max_kl"], old["servers"]
  assert config_settings.changes(old, CONFIG) == []
  config = flags.override(CONFIG, ["watch.max_kl=2"])
  (changed,) = config_settings.changes(old, config)
  assert (changed.path, changed.old, changed.new) == ("watch.max_kl", 1, 2)


def test_a_group_that_was_saved_under_its_old_name_is_read():
  old = stored()
  old["sglang"] = old.pop("servers") | {"wait": 7.0}
  (changed,) = config_settings.changes(old, CONFIG)
  assert (changed.path, changed.old, changed.new) == (
    "servers.wait",
    7.0,
    300.0,
  )
  read = config_settings.from_dict(type(CONFIG), old)
  assert read == config_lib.changed(CONFIG, servers={"wait": 7.0})


def test_a_removed_setting_is_a_change_of_learning():
  old = stored() | {"penalty": 3}
  (changed,) = config_settings.changes(old, CONFIG)
  assert changed == ("penalty", Kind.LEARNING, 3, None)


@pytest.mark.parametrize(
  ("assignments", "free", "allowed"),
  [
    (["mesh.fsdp=2", "engine.kind=sglang", "pipeline.async_level=1"], 1, 1),
    (["optimizer.warmup_steps=0"], 1, 1),
    (["optimizer.learning_rate=1e-5"], 0, 1),
    (["optimizer.max_grad_norm=2"], 0, 1),
    (["optimizer.decay=0.5"], 0, 0),
    # 0 removes a part of the optimizer's state.
    (["optimizer.max_grad_norm=0"], 0, 0),
    (["seed=1"], 0, 0),
    (["method.name=search_r1", "mesh.fsdp=2"], 0, 0),
  ],
)
def test_which_changes_a_run_may_resume_with(assignments, free, allowed):
  changed = config_settings.changes(
    stored(), flags.override(CONFIG, assignments)
  )
  for allow, may in ((False, free), (True, allowed)):
    sentence = config_settings.refusal(changed, allow=allow)
    assert (sentence == "") == bool(may)
    for change in changed if sentence else ():
      named = change.path in sentence
      assert named == (change.kind != Kind.PLACEMENT)
