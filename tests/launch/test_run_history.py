"""The record of a run in its folder, and checks when it resumes."""

from __future__ import annotations

import json

import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings as config_settings
from anysearch_jax.launch import flags, run_history

CONFIG = config_lib.ExperimentConfig()
SOURCES = {
  "policy": {"folder": "models/start", "sha256": "p"},
  "questions": {"source": "world", "count": 8, "sha256": "q"},
  "retriever": {"kind": "http", "url": "http://127.0.0.1:8000"},
  "prompts": {"environment": "paper", "file": "paper.toml", "sha256": "t"},
  "evidence": {"count": 8, "sha256": "e"},
  "packages": {"jax": "1"},
}
ELSEWHERE = SOURCES | {
  "policy": {"folder": "/moved", "sha256": "p"},
  "prompts": SOURCES["prompts"] | {"file": "/moved/copy.toml"},
}
ANOTHER = SOURCES | {"retriever": {"kind": "http", "url": "http://10.0.0.1"}}


def changed(*assignments):
  return flags.override(CONFIG, list(assignments))


def noted(folder):
  return [
    json.loads((folder / name).read_text())
    for name in ("config.json", "provenance.json")
  ]


def start(folder, config=CONFIG, sources=SOURCES, *, allow=False, **kwargs):
  """Starts a run that resumes from a checkpoint of `CONFIG`."""
  run_history.begin(folder, config, sources, allow=allow)
  stored, _ = noted(folder)
  resumed = {"rollout": 0, "changes": config_settings.changes(stored, config)}
  return run_history.record_start(folder, config, sources, **(resumed | kwargs))


def test_the_first_start_is_noted_without_changes(tmp_path):
  assert start(tmp_path) == []
  config, provenance = noted(tmp_path)
  assert config_settings.changes(config, CONFIG) == []
  assert provenance == SOURCES
  # The packages are those of the first start.
  start(tmp_path, sources=SOURCES | {"packages": {"jax": "2"}})
  assert noted(tmp_path)[1] == SOURCES


def test_placement_settings_change_freely_and_are_noted(tmp_path):
  start(tmp_path)
  moved = changed("mesh.data=2", "engine.slots=4", "pipeline.async_level=1")
  assert len(start(tmp_path, moved, ELSEWHERE, rollout=20)) == 3
  config, provenance = noted(tmp_path)
  assert config_settings.changes(config, moved) == []
  settings = {"engine.slots": [80, 4], "pipeline.async_level": [0, 1]}
  change = {"rollout": 20, "settings": settings | {"mesh.data": [1, 2]}}
  assert provenance == ELSEWHERE | {"changes": [change]}


def test_learning_settings_change_only_if_allowed(tmp_path):
  start(tmp_path)
  before = noted(tmp_path)
  faster = changed("optimizer.learning_rate=1e-5", "mesh.data=2")
  sentence = "found optimizer.learning_rate 1e-06 -> 1e-05: .*--allow_changes"
  with pytest.raises(ValueError, match=sentence):
    start(tmp_path, faster)
  assert noted(tmp_path) == before
  start(tmp_path, faster, allow=True, rollout=20)
  start(tmp_path, faster, rollout=40)  # That is now the run's own.
  _, provenance = noted(tmp_path)
  (change,) = provenance["changes"]
  assert change["rollout"] == 20
  assert change["settings"]["optimizer.learning_rate"] == [1e-6, 1e-5]


@pytest.mark.parametrize("allow", [False, True])
def test_identity_never_changes(allow, tmp_path):
  start(tmp_path)
  before = noted(tmp_path)
  for setting, sentence in (
    ("seed=7", "seed 42 -> 7"),
    ("method.name=zerosearch", 'method.name "anysearch" -> "zerosearch"'),
  ):
    with pytest.raises(ValueError, match=f"config.json: found {sentence}: "):
      start(tmp_path, changed(setting), allow=allow)
  for name in ("policy", "questions", "prompts", "evidence"):
    other = SOURCES | {name: SOURCES[name] | {"sha256": "x"}}
    sentence = f"provenance.json: found {name}.sha256 .* never change"
    with pytest.raises(ValueError, match=sentence):
      start(tmp_path, sources=other, allow=allow)
  assert noted(tmp_path) == before


def test_another_retriever_is_a_change_of_learning(tmp_path):
  start(tmp_path)
  with pytest.raises(ValueError, match="retriever.url .* --allow_changes"):
    start(tmp_path, sources=ANOTHER)
  start(tmp_path, sources=ANOTHER, allow=True, rollout=3)
  _, provenance = noted(tmp_path)
  assert provenance["retriever"] == ANOTHER["retriever"]
  old, new = (s["retriever"]["url"] for s in (SOURCES, ANOTHER))
  assert provenance["changes"] == [
    {"rollout": 3, "settings": {"retriever.url": [old, new]}}
  ]


def test_a_change_is_noted_once_if_the_run_dies_before_it_saves(tmp_path):
  start(tmp_path)
  slower = changed("optimizer.learning_rate=1e-7")
  differs = config_settings.changes(noted(tmp_path)[0], slower)
  for _ in range(2):
    start(tmp_path, slower, allow=True, rollout=20, changes=differs)
  assert len(noted(tmp_path)[1]["changes"]) == 1
