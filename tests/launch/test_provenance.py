"""The provenance that a run records."""

from __future__ import annotations

import dataclasses
import json

import prompt_files
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.environment import units
from anysearch_jax.launch import parts
from anysearch_jax.methods import systems

CONFIG = config_lib.ExperimentConfig(policy="configs/graded_world_policy")


@pytest.fixture(scope="module")
def source():
  return parts.source(CONFIG)


def test_questions_and_passages_are_known_by_their_hashes(source):
  questions = source.questions("train", 20, 1)
  noted = parts.provenance(CONFIG, source.retriever, questions)
  assert noted == parts.provenance(CONFIG, source.retriever, questions)
  assert noted["questions"]["count"] == 20
  assert noted["retriever"]["kind"] == "bm25"
  assert noted["packages"]["jax"]
  assert noted["policy"] == parts.policy(CONFIG.policy)
  assert noted["world"] == {"seed": 0, "reliability": 0.0, "version": 2}
  json.dumps(noted)
  changed = [dataclasses.replace(questions[0], golden_answers=("x",))]
  for others in (questions[:19], questions[::-1], [*changed, *questions[1:]]):
    other = parts.provenance(CONFIG, source.retriever, others)
    assert other["questions"]["sha256"] != noted["questions"]["sha256"]
  # Rewards of single searches compare with a question's evidence.
  method = config_lib.MethodConfig("stepsearch")
  config = dataclasses.replace(CONFIG, method=method)
  changed = [dataclasses.replace(questions[0], metadata={"search_keys": ["a"]})]
  one, two = (
    parts.provenance(config, source.retriever, asked)
    for asked in (questions[:1], changed)
  )
  assert one["questions"] == two["questions"] and noted["evidence"] is None
  assert one["evidence"] != two["evidence"]
  data = config_lib.DataConfig(world_seed=1)
  config = dataclasses.replace(CONFIG, data=data)
  retriever = parts.source(config).retriever
  other = parts.provenance(config, retriever, questions)
  assert other["world"] == {"seed": 1, "reliability": 0.0, "version": 2}
  assert other["retriever"]["sha256"] != noted["retriever"]["sha256"]


def test_texts_are_known_by_their_hash(source, tmp_path):
  def noted(file):
    episode = config_lib.EpisodeConfig(prompts="search_r1", prompt_file=file)
    config = dataclasses.replace(CONFIG, episode=episode)
    return parts.provenance(config, source.retriever, [])["prompts"]

  shipped = systems.WORDINGS["search_r1"].texts()
  assert noted("") == {
    "environment": "search_r1",
    "file": "search_r1.toml",
    "sha256": shipped.sha256,
  }
  for name, texts in (
    ("copy", shipped.values),
    ("mine", {**shipped.values, "no_action": "again"}),
  ):
    path = tmp_path / f"{name}.toml"
    path.write_text(prompt_files.toml(texts, "of my own"))
    assert noted(str(path))["file"] == str(path)
    same = noted(str(path))["sha256"] == shipped.sha256
    assert same is (name == "copy")


def test_budget_texts_are_known_by_their_hash(source, tmp_path):
  def noted(file):
    episode = config_lib.EpisodeConfig(prompts="world", budget_file=str(file))
    config = dataclasses.replace(CONFIG, episode=episode)
    found = parts.provenance(config, source.retriever, [])["prompts"]
    return found.get("budget")

  assert noted("") is None
  assert noted("silent") == {"file": "silent", "sha256": "silent"}
  shipped = units.texts("budget_world.toml")
  for name, values in (
    ("copy", shipped.values),
    ("mine", {**shipped.values, "tokens": "total= {N} ; "}),
  ):
    path = tmp_path / f"{name}.toml"
    path.write_text(prompt_files.toml(values))
    assert noted(path)["file"] == str(path)
    assert (noted(path)["sha256"] == shipped.sha256) is (name == "copy")
