"""Lost accuracy: by hand, and where exact agents and the expert lose it."""

from __future__ import annotations

import collections

import pytest
from exact_agents import WORLD, played, record

import anysearch_jax as aj
from research import lost_accuracy as lib

BEST = aj.optimum.Optimum(WORLD)
QUESTIONS = [
  q for q in WORLD.questions("held-out", 500, 3) if q.metadata["hops"] <= 3
]


def losses(row):
  return lib.lost(row, BEST)


def by_kind(found):
  out = collections.Counter()
  for (kind, _), loss in found.items():
    out[kind] += loss
  return out


def one_fact(**like):
  """Returns a question of one fact like this, and the fact."""
  return next(
    (q, fact)
    for q in QUESTIONS
    if len(q.metadata["facts"]) == 1
    for fact in q.metadata["facts"]
    if all(fact[key] == value for key, value in like.items())
  )


@pytest.mark.parametrize("budget", [1, 3, 8])
def test_the_best_agent_loses_by_luck_alone(budget):
  total = 0.0
  for question in QUESTIONS:
    kinds = by_kind(losses(played(question, budget, BEST)))
    assert set(kinds) == {lib.LUCK}
    total += kinds[lib.LUCK]
  # The mean over questions; a question's deviation is below .5.
  assert abs(total / len(QUESTIONS)) < 4 * 0.5 / len(QUESTIONS) ** 0.5


def test_agents_that_search_too_much_or_too_little_lose_by_that():
  for known, kind, other in (
    (True, lib.TOO_MANY, lib.TOO_FEW),
    (False, lib.TOO_FEW, lib.TOO_MANY),
  ):
    agent, found = (
      aj.optimum.Thorough(WORLD, search_known=known),
      collections.Counter(),
    )
    for question in QUESTIONS[:150]:
      found += by_kind(losses(played(question, 3, agent)))
    assert found[kind] + found[lib.WORSE] > 1 > found[other]


def test_an_unsearched_memory_loses_what_a_search_would_have_gained():
  question, fact = one_fact(known=True, stale=False, reliability=0.5)
  turn = f"<answer> {fact['value']} </answer>"
  start = BEST.value(fact["entity"], (fact["relation"],), 2)
  assert losses(record(question, 2, [turn], 1)) == pytest.approx(
    {
      (lib.TOO_FEW, "known 0.5"): start - 0.5,
      # Memory is right.
      (lib.LUCK, ""): 0.5 - 1,
    }
  )


def test_a_search_for_what_is_found_costs_what_it_could_have_gained():
  question, fact = one_fact(known=False, misses=False, contradicted=False)
  search = f"<search> {fact['entity']} {fact['relation']} </search>"
  end = f"<answer> {fact['value']} </answer>"
  found = losses(record(question, 3, [search, search, end], 1))
  # Nothing is left to be found, so the wasted search costs nothing.
  assert set(by_kind(found)) == {lib.LUCK}
  nothing = losses(record(question, 1, ["<search> river </search>", end], 1))
  best = BEST.value(fact["entity"], (fact["relation"],), 1)
  stop = BEST.value(fact["entity"], (fact["relation"],), 0)
  assert nothing[lib.WORSE, "off the chain"] == pytest.approx(best - stop)


def test_another_answer_than_the_most_likely_one_loses_what_it_is_less_likely():
  question, fact = one_fact(known=False, misses=False, contradicted=False)
  search = f"<search> {fact['entity']} {fact['relation']} </search>"
  for answer in ("<answer> nobody </answer>", "", "<answer> river </answer>"):
    found = losses(record(question, 1, [search, answer], 0))
    assert found[lib.ANSWERS, ""] == 1
