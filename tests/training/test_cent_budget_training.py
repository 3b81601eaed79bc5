"""A training whose budgets are cents alone, with two searches."""

from __future__ import annotations

import dataclasses
import json

import pytest
import small_run

from anysearch_jax.rollout import toolbox
from anysearch_jax.training import validation
from anysearch_jax.world import cheap_retrieval
from anysearch_jax.world import world as world_lib

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
  episode=dataclasses.replace(small_run.CONFIG.episode, prompts="world_priced"),
  evaluation=dataclasses.replace(
    small_run.CONFIG.evaluation, tool_prices=("cheap=10", "search=30")
  ),
)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
  folder = tmp_path_factory.mktemp("cents")
  parts = small_run.parts()
  parts["retriever"] = toolbox.Toolbox(
    {
      "search": parts["retriever"],
      "cheap": cheap_retrieval.CheapRetriever(world_lib.World()),
    }
  )
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
        assert caps["prices"]["tools"] == [["search", 30.0], ["cheap", 10.0]]
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
    (("cheep=10",), "evaluation.tool_prices: found 'cheep'"),
    (("cheap:10",), "evaluation.tool_prices: Found 'cheap:10'"),
    (("cheap=1", "cheap=2"), "each tool once"),
  ],
)
def test_prices_that_do_not_fit_are_refused(prices, words):
  evaluation = dataclasses.replace(CONFIG.evaluation, tool_prices=prices)
  with pytest.raises(ValueError, match=words):
    validation.validate(dataclasses.replace(CONFIG, evaluation=evaluation))
