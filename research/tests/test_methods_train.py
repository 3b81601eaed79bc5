"""Trains small policies with the plug-ins' rewards, in the generated world."""

from __future__ import annotations

import pytest
import small_run
import small_systems

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
  "slimsearcher": {"searches_gate", "tokens_gate"},
  "igpo": {"well_formed"},
}


@pytest.fixture(scope="module")
def parts():
  return small_run.parts()


@pytest.mark.parametrize(
  "name",
  [
    *("otc", "ikea", "research", "autorefine", "mt_grpo", "r1_searcher"),
    *("ssrl", "hiprag", "saas", "autosearch", "slimsearcher", "igpo"),
    # It measures log-probs of the engine.
    pytest.param("beta_grpo", marks=pytest.mark.slow),
  ],
)
def test_a_small_policy_trains_with_the_reward(name, parts, tmp_path):
  records, steps, groups = small_systems.trained(
    methods.method_name(name), parts, tmp_path, scores=name == "igpo"
  )
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
  if name == "igpo":
    for t in played:
      assert len(t["turn_advantages"]) == t["searches"] + 1
    gains = [o["value"] for t in played for o in t["observations"]]
    assert any(gains) and all(abs(gain) < 1 for gain in gains)
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
