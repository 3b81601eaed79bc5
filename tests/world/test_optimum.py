"""Tests the optimum and exact agents: by hand, by enumeration, against play."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from played_evaluation import configured, play, rows_of

from anysearch_jax import config as config_lib
from anysearch_jax.evaluation import harness
from anysearch_jax.retrieval import lexical
from anysearch_jax.world import expert_policy, optimum
from anysearch_jax.world import world as world_lib

WORLD = world_lib.World()
MISS = world_lib.ALTERNATIVE
QUESTIONS = WORLD.questions("held-out", 1000, 3)
AGENTS = {
  "optimum": optimum.Optimum(WORLD),
  "priced": optimum.Optimum(WORLD, price=0.05),
  "unknown": optimum.Thorough(WORLD, search_known=False),
  "everything": optimum.Thorough(WORLD, search_known=True),
}


def accuracies(questions, budget, agent="everything"):
  """Returns 0 or 1 of each question."""
  table = optimum.accuracy(AGENTS[agent], [q.id for q in questions], [budget])
  assert table.shape == (len(questions), 1)
  return table[:, 0]


def of(hops, **fact):
  """Returns questions of this length whose first fact is like `fact`."""
  found = [
    q
    for q in QUESTIONS
    if q.metadata["hops"] == hops
    and all(q.metadata["facts"][0][k] == v for k, v in fact.items())
  ]
  assert found
  return found


def test_accuracy_of_one_fact_by_hand():
  known = of(1, known=True, misses=False)
  right = [not q.metadata["facts"][0]["stale"] for q in known]
  assert accuracies(known, 0).tolist() == right
  assert accuracies(known, 1).all()
  assert accuracies(known, 1, "unknown").tolist() == right
  unknown = of(1, known=False, misses=False, contradicted=False)
  assert accuracies(unknown, 0).mean() < 0.3
  assert accuracies(unknown, 1).all()
  # The other wording and the verdict cost a search each.
  both = of(1, known=False, misses=True, contradicted=True)
  found = [accuracies(both, budget).mean() for budget in range(4)]
  assert found[:2] == [found[0]] * 2
  assert found[1] < found[2] < found[3] == 1


def move(chain, searches=3, found=(), price=0.0, **like):
  """Returns the best move for a chain from an entity of which this is true."""
  best = AGENTS["priced"] if price else AGENTS["optimum"]
  r = world_lib.INDEX[chain[0]]
  known = like.get("known", True)
  subjects = WORLD.members[world_lib.RELATIONS[r].subject]
  entity = next(e for e in subjects if WORLD.known[e, r] == known)
  fact = entity, r
  found = {fact: found} if found != () or like.get("missed") else {}
  return best.moves(WORLD.entities[entity], chain, searches, found)[0]


def test_moves_by_hand():
  assert not move(("country",)).fact  # Memory is always right.
  assert move(("mayor",)).wording == "mayor"  # It is right half of the time.
  assert not move(("mayor",), 0).fact
  assert move(("mayor",), known=False).wording == "mayor"
  assert move(("mayor",), known=False, missed=True).wording == "governs"
  two = tuple(WORLD.members["person"][:2])
  assert move(("mayor",), 1, two, known=False).wording == "verdict"
  done = move(("mayor",), 8, two[:1])
  assert (done.value, done.fact) == (1, None)
  # A search of a memory of `river` adds .65 * .2 to being right.
  sure = move(("river",), 1)
  assert sure.value == pytest.approx(0.8 + (1 - MISS) * 0.2)
  assert move(("river",), 1, price=0.05).value == pytest.approx(
    sure.value - 0.05
  )
  with pytest.raises(ValueError, match="price -1"):
    optimum.Optimum(WORLD, price=-1)


def test_it_comes_back_to_a_memory_with_the_searches_that_are_left():
  """`river` is right in .8; the facts of `mouth` are known or are not."""
  rivers, r = WORLD.members["river"], world_lib.INDEX["river"]
  unknown = [
    c
    for c in WORLD.members["city"]
    if WORLD.known[c, r]
    and not WORLD.known[WORLD.memory[c, r], world_lib.INDEX["mouth"]]
  ]
  river = WORLD.memory[unknown[0], r]
  start, chain = WORLD.entities[unknown[0]], ("river", "mouth")
  best = AGENTS["optimum"]
  mouth = river, world_lib.INDEX["mouth"]
  assert river in rivers
  assert best.moves(start, chain, 2, {})[0].fact == mouth
  found = {mouth: (WORLD.members["city"][0],)}
  back = best.moves(start, chain, 1, found)[0]
  assert back.fact == (unknown[0], r)
  assert back.value > 0.8


@pytest.mark.parametrize(
  "name", ["nq-17", "dev/3/nobody/mayor", "dev/x/gasur/mayor", "dev/99/gasur/x"]
)
def test_another_question_is_refused(name):
  with pytest.raises(ValueError, match="expected one of the generated world"):
    optimum.accuracy(AGENTS["optimum"], [name], [1])


@pytest.mark.parametrize(
  ("name", "agent"),
  [
    ("optimum", "optimum"),
    ("optimum:0.05", "priced"),
    ("unknown_only", "unknown"),
    ("everything", "everything"),
  ],
)
def test_play_has_the_computed_accuracy(tmp_path, name, agent):
  """Held-out questions, as `launch.evaluate --scripted=NAME` plays them."""
  budgets = (0, 1, 3, 8)
  questions = [q for q in QUESTIONS if q.metadata["hops"] <= 4][:40]
  config = dataclasses.replace(
    configured(budgets=budgets, seeds=(1,), scaffold=False),
    episode=config_lib.EpisodeConfig(
      prompts="world", max_generated=300, max_context=544
    ),
  )
  player = harness.Player(*expert_policy.from_name(name, WORLD))
  retriever = lexical.LexicalRetriever(WORLD.corpus, reads=WORLD.searched)
  rows = rows_of(play(config, player, questions, retriever, tmp_path)[1])
  assert {row["outcome"] for row in rows} == {"answered"}
  assert not any(row["violation"] for row in rows)
  assert all(row["format"] for row in rows)
  p = optimum.accuracy(AGENTS[agent], [q.id for q in questions], budgets)
  found = {(row["question_id"], row["budget"]): row["em"] for row in rows}
  np.testing.assert_array_equal(
    p, [[found[q.id, b] for b in budgets] for q in questions]
  )


def test_an_invalid_name_or_price_is_refused():
  for name, words in (
    ("optimum:x", "optimum:0.05"),
    ("optimum:-1", "found the price -1.0"),
    ("everything:1", "expected one of optimum"),
  ):
    with pytest.raises(ValueError, match=f"(?i){words}"):
      expert_policy.from_name(name, WORLD)
