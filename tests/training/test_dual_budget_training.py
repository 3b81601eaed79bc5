"""A training whose budgets are pairs of searches and tokens."""

from __future__ import annotations

import dataclasses
import json

import pytest
import small_run

from anysearch_jax.training import validation

CONFIG = dataclasses.replace(
  small_run.CONFIG,
  save_every=1,
  curriculum=dataclasses.replace(
    small_run.CONFIG.curriculum, token_levels=(9, 16)
  ),
  reward=dataclasses.replace(
    small_run.CONFIG.reward, abs_tokens=1.0, rel_cost="dollars"
  ),
  evaluation=dataclasses.replace(
    small_run.CONFIG.evaluation, search_price=5.0, output_price=1.0
  ),
)


def groups(folder):
  """Returns the recorded groups of all rollouts in order."""
  return [
    json.loads(line)
    for path in sorted((folder / "trajectories").iterdir())
    for line in path.read_text().splitlines()
  ]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
  folder = tmp_path_factory.mktemp("dual")
  parts = small_run.parts()
  small_run.train(folder / "whole", parts, CONFIG)
  small_run.train(folder / "killed", parts, CONFIG, rollouts=3)
  small_run.train(folder / "killed", parts, CONFIG)
  return folder


def test_every_episode_is_within_both_caps(played):
  drawn = set()
  for group in groups(played / "whole"):
    for trajectory in group["trajectories"]:
      cap = trajectory["caps"]["tokens"]
      drawn.add((group["budget"], cap))
      assert trajectory["generated_tokens"] <= cap
      assert trajectory["searches"] <= group["budget"]
  assert drawn >= {(2, 16), (1, 9)} and len(drawn) > 2


def test_levels_are_counted_and_resume_exactly(played):
  def metrics(name):
    lines = (played / name / "metrics.jsonl").read_text().splitlines()
    return [
      {
        key: value
        for key, value in json.loads(line).items()
        if key.startswith(("curriculum/", "reward/", "rollout/"))
      }
      for line in lines
    ]

  whole = metrics("whole")
  assert whole == metrics("killed")
  for record in whole:
    counted = [record[f"curriculum/tokens{t}"] for t in (9, 16)]
    assert sum(counted) == CONFIG.questions
    total = sum(record[f"curriculum/p{b}"] for b in (1, 2))
    assert total == pytest.approx(1)
  assert groups(played / "whole") == groups(played / "killed")


def test_cost_without_a_price_is_refused():
  free = dataclasses.replace(CONFIG, evaluation=small_run.CONFIG.evaluation)
  with pytest.raises(ValueError, match="reward.rel_cost: found dollars"):
    validation.validate(free)
