"""The exact accuracy of agents: by hand, and against the expert's play."""

from __future__ import annotations

import numpy as np
import pytest

from anysearch_jax.world import (
  exact_accuracy,
  expert,
  expert_policy,
  optimum,
)
from anysearch_jax.world import world as world_lib
from retrieval import lexical

WORLD = world_lib.World()
LOOKUP = lexical.LexicalRetriever(WORLD.corpus).lookup
QUESTIONS = WORLD.questions("held-out", 400, 3)
AGENTS = {
  "optimum": optimum.Optimum(WORLD),
  "priced": optimum.Optimum(WORLD, price=0.05),
  "unknown": optimum.search_unknown,
  "everything": optimum.search_everything,
}


def accuracy(question, budget, agent="everything"):
  table = exact_accuracy.table(WORLD, AGENTS[agent], [question.id], [budget])
  assert table.shape == (1, 1)
  return table[0, 0]


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


def play(question, budget, strategy, seed):
  """Plays an episode as the expert writes it; returns whether it is right."""
  turns = expert.Expert(
    question,
    world=WORLD,
    budget=budget,
    scaffold=False,
    config=expert_policy._EXACT,
    rng=np.random.default_rng(seed),
    strategy=strategy,
  ).turns()
  words = next(turns).words
  while "<search>" in words:
    at = words.index("<search>")
    query = " ".join(words[at + 1 : words.index("</search>")])
    words = turns.send(LOOKUP(query, 3, question.corpus)).words
  return words[words.index("<answer>") + 1] == question.golden_answers[0]


def test_one_fact_by_hand():
  for question in of(1, known=True, misses=False):
    (fact,) = question.metadata["facts"]
    assert accuracy(question, 0) == (not fact["stale"])
    assert accuracy(question, 1) == 1
    assert accuracy(question, 1, "unknown") == (not fact["stale"])
  for question in of(1, known=False, misses=False, contradicted=False):
    (fact,) = question.metadata["facts"]
    guess = 1 / len(WORLD.objects(fact["relation"]))
    assert accuracy(question, 0) == pytest.approx(guess)
    assert accuracy(question, 1) == 1
  # The other wording and the verdict cost a search each.
  for question in of(1, known=False, misses=True, contradicted=True):
    (fact,) = question.metadata["facts"]
    guess = 1 / len(WORLD.objects(fact["relation"]))
    assert [accuracy(question, b) for b in range(4)] == pytest.approx(
      [guess, guess, 0.5, 1]
    )


def test_a_wrong_value_may_still_lead_to_the_right_answer():
  """All objects of the first relation, each with its own memory."""
  (question, *_) = of(2, known=False)
  entity, first, second = question.text.split()[:3]
  right = question.golden_answers[0]
  chances = []
  for value in WORLD.objects(first):
    memory = WORLD.recall(value, second)
    known = memory is not None
    chances.append(
      float(memory == right) if known else 1 / len(WORLD.objects(second))
    )
  assert entity in WORLD.index
  assert accuracy(question, 0) == pytest.approx(np.mean(chances))


@pytest.mark.parametrize("name", AGENTS)
def test_play_has_the_exact_accuracy(name):
  questions, budgets, tries = QUESTIONS[:40], (0, 1, 3, 8), 40
  ids = [q.id for q in questions]
  exact = exact_accuracy.table(WORLD, AGENTS[name], ids, budgets)
  assert ((exact >= 0) & (exact <= 1)).all()
  for p, budget in zip(exact.T, budgets, strict=True):
    right = np.array(
      [
        np.mean([play(q, budget, AGENTS[name], t) for t in range(tries)])
        for q in questions
      ]
    )
    sure = (p == 0) | (p == 1)
    np.testing.assert_array_equal(right[sure], p[sure])
    error = np.sqrt((p * (1 - p)).sum() / tries) / len(p)
    assert abs(right.mean() - p.mean()) < 4 * error + 1e-12


def test_no_other_agent_is_better_on_the_whole():
  ids = [q.id for q in QUESTIONS[:120]]
  found = {
    name: exact_accuracy.table(WORLD, AGENTS[name], ids, (1, 3, 8)).mean(axis=0)
    for name in ("optimum", "unknown", "everything")
  }
  for name in ("unknown", "everything"):
    # Its decisions are best on average over questions, not on these.
    assert (found["optimum"] > found[name] - 0.01).all()
  assert (found["optimum"] > 0.1 + found["everything"])[1]


@pytest.mark.parametrize(
  "name", ["nq-17", "dev/3/nobody/mayor", "dev/x/gasur/mayor", "dev/99/gasur/x"]
)
def test_another_question_is_refused(name):
  with pytest.raises(ValueError, match="expected one of the generated world"):
    exact_accuracy.table(WORLD, AGENTS["optimum"], [name], [1])
