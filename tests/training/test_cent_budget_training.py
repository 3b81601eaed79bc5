"""A training whose budgets are cents alone."""

from __future__ import annotations

import dataclasses
import json

import pytest
import small_run

from anysearch_jax.training import validation

CENTS = (1, 6)
CONFIG = dataclasses.replace(
  small_run.CONFIG,
  save_every=1,
  curriculum=dataclasses.replace(
    small_run.CONFIG.curriculum, cent_levels=CENTS, phase1_steps=0
  ),
  reward=dataclasses.replace(
    small_run.CONFIG.reward, abs_searches=0.0, abs_dollars=1.0
  ),
  evaluation=dataclasses.replace(
    small_run.CONFIG.evaluation, tool_prices=("search=30",)
  ),
)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
  folder = tmp_path_factory.mktemp("cents")
  parts = small_run.parts()
  small_run.train(folder / "whole", parts, CONFIG)
  small_run.train(folder / "killed", parts, CONFIG, rollouts=3)
  small_run.train(folder / "killed", parts, CONFIG)
  return folder


def metrics(folder):
  return [
    {
      key: value
      for key, value in json.loads(line).items()
      if key.startswith(("curriculum/", "reward/", "rollout/"))
    }
    for line in (folder / "metrics.jsonl").read_text().splitlines()
  ]


def test_every_group_has_a_cap_in_cents_and_no_other(played):
  drawn = set()
  for path in (played / "whole" / "trajectories").iterdir():
    for line in path.read_text().splitlines():
      for each in json.loads(line)["trajectories"]:
        caps = each["caps"]
        drawn.add(caps["dollars"])
        assert "tokens" not in caps
        assert caps["prices"]["tools"] == [["search", 30.0]]
  assert drawn == {0.01, 0.06}


def test_levels_are_counted_and_resume_exactly(played):
  whole = metrics(played / "whole")
  assert whole == metrics(played / "killed")
  for record in whole:
    counted = [record[f"curriculum/count{level}"] for level in (1, 2)]
    assert sum(counted) == CONFIG.questions
    assert sum(record[f"curriculum/p{x}"] for x in (1, 2)) == pytest.approx(1)


@pytest.mark.parametrize(
  "prices, words",
  [
    ((), "curriculum.cent_levels: found caps"),
    (("serch=10",), "evaluation.tool_prices: found 'serch'"),
    (("search:10",), "evaluation.tool_prices: Found 'search:10'"),
    (("search=1", "search=2"), "each tool once"),
  ],
)
def test_prices_that_do_not_fit_are_refused(prices, words):
  evaluation = dataclasses.replace(CONFIG.evaluation, tool_prices=prices)
  with pytest.raises(ValueError, match=words):
    validation.validate(dataclasses.replace(CONFIG, evaluation=evaluation))
