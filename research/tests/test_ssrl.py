"""SSRL's training, in which the policy is its own search engine."""

from __future__ import annotations

import dataclasses

import pytest
import small_run

import anysearch_jax as aj
from anysearch_jax.generative_retrieval import simulation
from anysearch_jax.launch import flags, retrievers
from anysearch_jax.types import SearchContext

KNOWN = aj.Question("q", "Who is the mayor?", ("tol",))


@pytest.mark.parametrize("preset", ["", "qwen2_5_7b"])
def test_training_searches_in_the_policy_and_is_never_noisy(preset):
  config = flags.load_config(
    f"research/methods/configs.py:ssrl:{preset}".rstrip(":")
  )
  assert config.retrieval.simulated == "policy"
  assert config.curriculum.fixed_budget == config.curriculum.max_budget
  made = retrievers.make(config, small_run.parts()["retriever"])
  assert isinstance(made, simulation.SimulatedRetriever)
  context = SearchContext(aj.Address(9, 0, 0), 0, KNOWN, "")
  assert not any(
    made.noisy(dataclasses.replace(context, address=aj.Address(rollout, q, 0)))
    for rollout in range(8)
    for q in range(20)
  )
