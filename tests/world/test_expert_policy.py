"""Tests the evaluation of the world's expert."""

from __future__ import annotations

import dataclasses

import pytest
import small_run
from played_evaluation import configured, play, rows_of

from anysearch_jax import config as config_lib
from anysearch_jax.evaluation import harness
from anysearch_jax.world import expert_policy
from anysearch_jax.world import world as world_lib


@pytest.fixture(scope="module")
def parts():
  return small_run.parts()


def test_the_expert_plays_its_world(parts, tmp_path):
  engine, codec = expert_policy.make(world_lib.World())
  config = dataclasses.replace(
    configured(budgets=(0, 8), seeds=(1,)),
    episode=config_lib.EpisodeConfig(
      prompts="world", max_generated=300, max_context=544
    ),
  )
  for scaffold in (False, True):
    config = dataclasses.replace(
      config,
      evaluation=dataclasses.replace(config.evaluation, scaffold=scaffold),
    )
    _, text = play(
      config,
      harness.Player(engine, codec),
      parts["questions"],
      parts["retriever"],
      tmp_path / str(scaffold),
    )
    rows = rows_of(text)
    assert {row["outcome"] for row in rows} == {"answered"}
    right = {
      budget: sum(row["em"] for row in rows if row["budget"] == budget)
      for budget in (0, 8)
    }
    assert right[0] < right[8]
    # It violates the format only by searching beyond its budget.
    assert all(row["format"] != row["violation"] for row in rows)
