"""Tests the experts by name, and the gates of what a policy learned of them."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.policy import hf, tokenizer
from anysearch_jax.world import (
  demonstrations,
  expert,
  experts,
  versions,
  warm_start,
  world_tokenizer,
)
from anysearch_jax.world import world as world_lib
from retrieval import lexical

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORLD = world_lib.World(versions.config("graded", 0))
SETTING = demonstrations.Setting(
  WORLD,
  lexical.LexicalRetriever(WORLD.corpus).lookup,
  tokenizer.Tokenizer(world_tokenizer.build_tokenizer(WORLD)),
  config_lib.EpisodeConfig(prompts="world"),
)
SOFT = experts.get("soft")
KNOWN = demonstrations.PROBE_KINDS.index("recall_known")


def situation(decision, relations, remaining):
  return expert.Situation(
    decision, decision == "known", relations, remaining, ()
  )


@pytest.mark.parametrize(
  ("decision", "relations", "remaining", "plain", "scaffolded"),
  [
    # change .5, .2 and 0; slack 0, -1/3, 1 and beyond.
    ("known", ("mayor",), 1, 0.6 + 0.6 * 0.3, 0.5 + 1.2 * 0.3),
    ("known", ("river", "mouth"), 1, 0.6 - 0.05, 0.5 - 0.4 / 3),
    ("known", ("country",), 4, 0.6 - 0.12 + 0.15, 0.5 - 0.24 + 0.4),
    ("known", ("mayor",), 9, 0.6 + 0.18 + 0.15, 0.97),
    ("known", ("country",) * 6, 1, 0.6 - 0.12 - 0.15, 0.03),
    ("unknown", ("mayor",), 1, 0.75, 0.95),
    ("miss", ("mayor",), 1, 0.7, 0.85),
    ("conflict", ("mayor",), 1, 0.5, 0.7),
  ],
)
def test_the_soft_expert_weighs_reliability_and_slack(
  decision, relations, remaining, plain, scaffolded
):
  here = situation(decision, relations, remaining)
  assert SOFT.plain.strategy(WORLD)(here) == pytest.approx(plain)
  assert SOFT.scaffolded.strategy(WORLD)(here) == pytest.approx(scaffolded)


def test_the_blind_expert_searches_everything_alike():
  strategy = experts.get("blind").plain.strategy(WORLD)
  chances = {
    strategy(situation(decision, (relation,) * left, remaining))
    for decision in ("known", "unknown")
    for relation in ("mayor", "country")
    for left in (1, 4)
    for remaining in (1, 8)
  }
  assert chances == {0.6}


def test_an_unknown_expert_is_refused():
  with pytest.raises(ValueError, match="warm_start.expert: found 'rash'"):
    experts.get("rash")


@pytest.fixture(scope="module")
def probes():
  """Probes of the soft expert's plain episodes."""
  return demonstrations.probe_sets(
    dataclasses.replace(SETTING, expert=SOFT.plain), "dev", count=200, seed=0
  )


def test_probes_of_known_facts_have_the_situation(probes):
  known = probes.kinds == KNOWN
  change, slack = probes.features.T
  np.testing.assert_allclose(
    probes.searches[known],
    0.6 + 0.6 * (change[known] - 0.2) + 0.15 * slack[known],
    atol=1e-6,
  )
  assert not probes.searches[~known].any() and not probes.features[~known].any()
  words = SETTING.codec.hf.convert_ids_to_tokens
  for row, at in zip(probes.rows[known], probes.positions[known]):
    (relation,) = words([int(probes.token_ids[row, at - 2])])
    i = np.flatnonzero((probes.rows == row) & (probes.positions == at))[0]
    assert change[i] == pytest.approx(1 - WORLD.reliability(relation))
  # The demonstrations follow these probabilities.
  searched = [
    words([int(probes.token_ids[row, at])]) == ["</think>"]
    for row, at in zip(probes.rows[known], probes.positions[known])
  ]
  expected = probes.searches[known]
  error = np.sqrt(np.mean(expected * (1 - expected)) / len(expected))
  assert abs(np.mean(searched) - expected.mean()) < 4 * error


def test_slopes_are_those_of_a_line(probes):
  p = np.ones(len(probes.labels))
  known = probes.kinds == KNOWN
  change, slack = probes.features[known].T
  p[known] = 1 - (0.4 + 0.3 * change - 0.1 * slack)
  mine, its = warm_start.slopes(p, probes)
  np.testing.assert_allclose(mine, (0.3, -0.1), atol=1e-5)
  np.testing.assert_allclose(its, (0.6, 0.15), atol=1e-5)


def test_gates_name_what_a_policy_lacks(probes):
  """A perfect pupil lacks nothing; a thrifty one lacks the slopes."""
  kinds = demonstrations.PROBE_KINDS
  p = np.ones(len(probes.labels))
  p[probes.kinds == kinds.index("recall_unknown")] = 0
  known = probes.kinds == KNOWN
  p[known] = 1 - probes.searches[known]
  assert warm_start.gate(p, probes, SOFT) == []
  p[known] = 0.95
  lacks = warm_start.gate(p, probes, SOFT)
  assert [lack.split(":")[0] for lack in lacks] == [
    "slope by change",
    "slope by slack",
  ]
  p[probes.kinds == kinds.index("copy")] = 0.9899
  (first, *_) = warm_start.gate(p, probes, SOFT)
  assert first == "copy: found 0.9899, expected at least 0.99"
  # The thrifty expert's gate is lower, and asks for no slopes.
  assert warm_start.gate(p, probes, experts.get("thrifty")) == []


def test_the_shipped_policy_passes_the_gates_of_its_expert(probes):
  policy = hf.load(ROOT / "configs" / "graded_world_policy")
  assert policy.tokenizer.encode("mayor ?") == SETTING.codec.encode("mayor ?")
  p = warm_start.probe(policy.params, policy.architecture, probes)
  assert warm_start.gate(p, probes, SOFT) == []
  mine, its = warm_start.slopes(p, probes)
  np.testing.assert_allclose(mine, its, atol=0.15)
