"""Trains small policies with the plug-ins' rewards, in the generated world."""

from __future__ import annotations

import json

import pytest
import scripted_runs as runs
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax.launch import retrievers
from anysearch_jax.methods import systems
from anysearch_jax.rollout import searching
from research import methods

# Its own values in the records of a training.
PARTS = {
  "otc": {"tool"},
  "ikea": {"well_formed", "kb"},
  "research": {"f1", "well_formed"},
  "autorefine": {"f1", "refined"},
  "hiprag": {"contained", "optimal"},
  "mt_grpo": {"contained", "steps"},
  "r1_searcher": {"f1", "well_formed", "stage"},
  "ssrl": set(),
  "beta_grpo": {"confidence"},
  "saas": {"known", "needed", "penalty"},
  "autosearch": {"anytime", "sufficient", "steps"},
}


class Engine(runs.Engine):
  """Plays scripted episodes for a real learner."""

  def set_params(self, params, version):
    self.version = version


@pytest.fixture(scope="module")
def parts():
  return small_run.parts()


def trained(name, parts, folder):
  """Trains two rollouts of scripted episodes, with real steps."""
  config = config_lib.changed(
    small_run.CONFIG, group=4, episode={"max_context": 110}
  )
  config = systems.select(config, methods.method_name(name))
  engine = Engine(parts, questions=config.questions)
  retriever = searching.BatchingRetriever(
    retrievers.make(config, parts["retriever"]), config.search
  )
  made = parts | {"engine": engine, "retriever": retriever}
  small_run.train(folder, made, config, rollouts=2)
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  steps = (folder / "steps.jsonl").read_text().splitlines()
  groups = [
    json.loads(line)
    for file in sorted((folder / "trajectories").iterdir())
    for line in file.read_text().splitlines()
  ]
  return list(map(json.loads, lines)), list(map(json.loads, steps)), groups


@pytest.mark.parametrize(
  "name",
  [
    *("otc", "ikea", "research", "autorefine", "mt_grpo", "r1_searcher"),
    *("ssrl", "hiprag", "saas", "autosearch"),
    # It measures log-probs of the engine.
    pytest.param("beta_grpo", marks=pytest.mark.slow),
  ],
)
def test_a_small_policy_trains_with_the_reward(name, parts, tmp_path):
  records, steps, groups = trained(name, parts, tmp_path)
  assert len(records) == 2 and len(steps) == 4
  for record in records:
    assert {f"reward/{part}" for part in PARTS[name]} <= set(record)
    assert record.get("policy/advantage_share", name == "autosearch") > 0
  assert all(step["finite"] for step in steps)
  assert any(step["grad_norm"] > 0 for step in steps)
  played = [t for group in groups for t in group["trajectories"]]
  assert {t["searches"] for t in played} > {0}
  if name == "mt_grpo":
    for t in played:
      assert len(t["steps"]) == len(t["turn_advantages"]) == t["searches"]
  if name == "autosearch":
    for t in played:
      assert len(t["steps"]) == t["searches"]
    # A context without room for it leaves no early answer.
    assert any("answer" in o for t in played for o in t["observations"])
  if name == "ssrl":
    found = [o for t in played for o in t["observations"]]
    ids = {p["id"] for o in found for p in o["passages"]}
    assert ids and all(id_.startswith("self/") for id_ in ids)
  if name == "saas":
    assert len(groups) == 2
    for group in groups:
      made = [t["searches"] for t in group["trajectories"]]
      assert len(made) == 8 and not any(made[4:]) and group["budget"] == 2
  if name == "r1_searcher":
    # The second of four rollouts begins after a quarter of the training.
    assert [record["reward/stage"] for record in records] == [1, 2]
