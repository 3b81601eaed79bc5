"""Tests which settings may change when a run resumes."""

from __future__ import annotations

import dataclasses
import json

import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings
from launch import flags

CONFIG = config_lib.ExperimentConfig()
Kind = settings.Kind


def test_every_setting_has_a_kind_and_a_sentence_and_numbers_have_a_range():
  found = {each.path: each for each in settings.listed(CONFIG)}
  for path, value in settings.leaves(settings.to_dict(CONFIG)):
    setting = found[path]
    assert setting.meta.kind in Kind and setting.sentence.endswith(".")
    items = value if isinstance(value, tuple) else (value,)
    if any(type(item) in (int, float) for item in items):
      assert setting.meta.range.words, path


def stored(config=CONFIG):
  return json.loads(json.dumps(settings.to_dict(config)))


def found(*assignments):
  changed = settings.changes(
    stored(), flags.override(CONFIG, list(assignments))
  )
  return [(c.path, c.kind, c.old, c.new) for c in changed]


def test_an_equal_configuration_has_no_changes():
  assert found() == []
  # A stored tuple is a list, which is not a change.
  assert found("batch.row_lengths=128,256,576") == []


def test_changes_are_named_with_their_kind_and_both_values():
  assert found("seed=7", "mesh.data=2", "reward.alpha=0.25") == [
    ("seed", Kind.IDENTITY, 42, 7),
    ("reward.alpha", Kind.LEARNING, 0.5, 0.25),
    ("mesh.data", Kind.PLACEMENT, 1, 2),
  ]


def test_a_setting_that_was_not_stored_had_its_default():
  old = stored()
  del old["watch"]["max_kl"], old["sglang"]
  assert settings.changes(old, CONFIG) == []
  config = flags.override(CONFIG, ["watch.max_kl=2"])
  (changed,) = settings.changes(old, config)
  assert (changed.path, changed.old, changed.new) == ("watch.max_kl", 1, 2)


def test_a_renamed_setting_of_an_old_run_is_no_change():
  for divides, normalize in ((True, "group"), (False, "none")):
    old = stored()
    del old["objective"]["normalize"]
    old["objective"]["normalize_std"] = divides
    config = flags.override(CONFIG, [f"objective.normalize={normalize}"])
    assert settings.changes(old, config) == []


def test_a_removed_setting_is_a_change_of_learning():
  old = stored() | {"penalty": 3}
  (changed,) = settings.changes(old, CONFIG)
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
    (["method.name=otc", "mesh.fsdp=2"], 0, 0),
  ],
)
def test_which_changes_a_run_may_resume_with(assignments, free, allowed):
  changed = settings.changes(stored(), flags.override(CONFIG, assignments))
  for allow, may in ((False, free), (True, allowed)):
    sentence = settings.refusal(changed, allow=allow)
    assert (sentence == "") == bool(may)
    for change in changed if sentence else ():
      named = change.path in sentence
      assert named == (change.kind != Kind.PLACEMENT)


def test_a_refusal_names_every_setting_that_never_changes():
  config = dataclasses.replace(CONFIG, seed=1, questions=2, group=3)
  sentence = settings.refusal(settings.changes(stored(), config), allow=True)
  assert "seed 42 -> 1, questions 512 -> 2, group 5 -> 3" in sentence
