"""Demonstrations with two searches: honest, well formed, and not thrifty."""

from __future__ import annotations

import re

import numpy as np
import pytest

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.environment import charges, prompts
from anysearch_jax.policy import tokenizer
from anysearch_jax.world import (
  cheap_retrieval,
  priced_demonstrations,
  priced_expert,
  priced_warm_start,
  versions,
  world_tokenizer,
)
from anysearch_jax.world import world as world_lib
from retrieval import lexical

WORLD = world_lib.World(versions.config("graded", 0))
CODEC = tokenizer.Tokenizer(world_tokenizer.build_tokenizer(WORLD))
SETTING = priced_demonstrations.Setting(
  WORLD,
  lexical.LexicalRetriever(WORLD.corpus).lookup,
  cheap_retrieval.CheapRetriever(WORLD).lookup,
  CODEC,
  config_lib.EpisodeConfig(prompts="world_priced"),
  budgets.Prices(tools=(("search", 30.0), ("cheap", 10.0))),
)
JUDGE = prompts.PROMPTS["world_priced"].judge
Fact = priced_expert.Fact


@pytest.fixture(scope="module")
def played():
  made = []
  for seed, question in enumerate(WORLD.questions("train", 160, 0)):
    money = seed % priced_demonstrations.MOST_CENTS + 1
    trajectory, weights = priced_demonstrations.demonstrate(
      question, SETTING, money=money, rng=np.random.default_rng(seed)
    )
    made.append((money, trajectory, weights))
  return made


@pytest.mark.parametrize(
  "fact, actions",
  [
    (Fact("river", True), "recall cheap dear"),
    (Fact("river", False, "nothing"), "recall dear"),
    (Fact("river", False, "value"), "settle dear"),
    (Fact("river", True, "differs"), "settle recall dear"),
    (Fact("river", True, "agrees", "missed"), "settle recall dear"),
    (Fact("river", False, "", "missed"), "recall cheap dear"),
    (Fact("river", False, "", "conflict"), "settle cheap dear"),
    (Fact("river", False, "nothing", "conflict"), "settle dear"),
  ],
)
def test_actions_by_hand(fact, actions):
  assert fact.actions == tuple(actions.split())


def test_episodes_are_well_formed_and_within_their_cents(played):
  refused = 0
  for money, trajectory, _ in played:
    assert trajectory.outcome is types.Outcome.ANSWERED
    assert JUDGE(trajectory).format == (not trajectory.violation)
    assert charges.dollars(trajectory) <= money / 100
    refused += trajectory.violation
  assert 0 < refused < len(played) / 2


def test_thoughts_state_the_cents_that_are_left(played):
  for money, trajectory, _ in played:
    left, tools = money, iter(trajectory.observations)
    for span in trajectory.spans:
      if span.author is types.Author.MODEL:
        assert re.match(r"<think> remaining= (\d+) ;", span.text)[1] == str(
          left
        )
      elif "<information>" in span.text:
        cheap = "<information>tight" in span.text
        assert (next(tools).tool == "cheap") is cheap
        left -= 1 if cheap else 3


def test_both_searches_are_asked_of_every_relation(played):
  asked = {
    (each.tool, each.argument.split()[1])
    for _, trajectory, _ in played
    for each in trajectory.observations
  }
  for relation in cheap_retrieval.ODDS:
    assert {("cheap", relation), ("search", relation)} <= asked
  tools = [tool for tool, _ in asked]
  assert {*tools} == {"cheap", "search"}


def test_weights_are_those_of_the_policy_s_tokens(played):
  for _, trajectory, weights in played:
    model = trajectory.authors == types.Author.MODEL
    assert ((weights > 0) == model).all()
    assert {*weights[model].tolist()} == {1.0, 3.0}


def test_money_within_a_prompt_is_read_by_the_tokenizer():
  (question,) = WORLD.questions("dev", 1, 0)
  trajectory, _ = priced_demonstrations.demonstrate(
    question, SETTING, money=20, rng=np.random.default_rng(0)
  )
  given = trajectory.token_ids[trajectory.authors == types.Author.PROMPT]
  assert CODEC.decode(given.tolist()) == (
    f"ample 20 ; budget ample question {question.text}"
  )


@pytest.mark.parametrize(
  "prices", [(), (("search", 30.0),), (("search", 35.0), ("cheap", 10.0))]
)
def test_prices_that_are_no_cents_are_refused(prices):
  with pytest.raises(ValueError, match="whole cents"):
    priced_demonstrations.cents(budgets.Prices(tools=prices))


def test_probes_have_the_labels_of_their_kinds():
  probes = priced_demonstrations.probe_sets(SETTING, "dev", count=20, seed=0)
  kinds = priced_demonstrations.KINDS
  assert {*map(int, probes.kinds)} >= {
    kinds.index(kind) for kind in ("found", "copy", "money", "tool", "relation")
  }
  (tight,), (found,) = CODEC.encode("tight"), CODEC.encode("found")
  for row, at, label, kind in zip(
    probes.rows, probes.positions, probes.labels, probes.kinds, strict=True
  ):
    token = probes.token_ids[row, at]
    if kinds[kind] == "tool":
      assert label == tight
    elif not kinds[kind].startswith("recall"):
      assert label == token
    if kinds[kind] == "found":
      assert label == found


def test_gate_names_what_a_policy_lacks():
  good = dict.fromkeys(priced_demonstrations.KINDS, 0.99)
  good |= {"recall_known": 0.5, "recall_unknown": 0.1, "tool": 0.5}
  assert priced_warm_start.gate(good) == []
  bad = good | {"money": 0.5, "recall_known": 0.2, "tool": 0.9}
  assert [lack.split(":")[0] for lack in priced_warm_start.gate(bad)] == [
    "money",
    "recall_known - recall_unknown",
    "tool",
  ]
