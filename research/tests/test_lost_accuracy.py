"""Lost accuracy: by hand, and where exact agents and the expert lose it."""

from __future__ import annotations

import collections

import pytest
from exact_agents import WORLD, played, record

import anysearch_jax as aj
from research import lost_accuracy as lib

BEST = aj.optimum.Optimum(WORLD)
QUESTIONS = WORLD.questions("held-out", 200, 3)


def losses(row):
  return lib.lost(row, world=WORLD, best=BEST)


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
  for seed, question in enumerate(QUESTIONS):
    kinds = by_kind(losses(played(question, budget, BEST, seed)))
    assert set(kinds) == {lib.LUCK}
    total += kinds[lib.LUCK]
  # The mean over questions; a question's deviation is below .5.
  assert abs(total / len(QUESTIONS)) < 4 * 0.5 / len(QUESTIONS) ** 0.5


def test_agents_that_search_too_much_or_too_little_lose_by_that_alone():
  for strategy, kind in (
    (aj.optimum.search_everything, lib.TOO_MANY),
    (lambda _: 0.0, lib.TOO_FEW),
  ):
    found = collections.Counter()
    for seed, question in enumerate(QUESTIONS):
      found += by_kind(losses(played(question, 3, strategy, seed)))
    assert found[kind] > 1
    assert set(found) <= {kind, lib.LUCK}


def test_an_unsearched_memory_loses_what_a_search_would_have_gained():
  question, fact = one_fact(known=True, stale=False, reliability=0.5)
  turn = (
    f"<think> need {fact['entity']} {fact['relation']} ; recall "
    f"{fact['value']} ; </think> <answer> {fact['value']} </answer>"
  )
  search, stop = BEST.options("known", True, (fact["relation"],), 2)
  assert stop == pytest.approx(0.5)
  start = BEST.value((fact["relation"],), 2)
  assert losses(record(question, 2, [turn], 1)) == pytest.approx(
    {
      (lib.TOO_FEW, "known 0.5"): search - 0.5,
      # Memory holds the fact, and it is right.
      (lib.LUCK, ""): (start - search) + (0.5 - 1),
    }
  )


def test_a_search_for_what_is_found_costs_what_it_could_have_gained():
  question, fact = one_fact(known=False, misses=False, contradicted=False)
  entity, value = fact["entity"], fact["value"]
  query = f"{entity} {fact['relation']}"
  search = f"<think> need {query} ; </think> <search> {query} </search>"
  again = (
    f"<think> found {value} ; need {query} ; </think> "
    f"<search> {query} </search>"
  )
  end = f"<think> found {value} ; </think> <answer> {value} </answer>"
  found = losses(record(question, 3, [search, again, end], 1))
  # Nothing is left to be found, so the wasted search costs nothing.
  assert by_kind(found)[lib.TOO_MANY] == 0
  assert set(by_kind(found)) == {lib.TOO_MANY, lib.LUCK}


@pytest.mark.parametrize(
  "turn, slip",
  [
    ("need nobody {relation} ;", "needs another entity"),
    ("need {entity} nothing ;", "needs another relation"),
    ("<answer> {value} </answer>", "answers without a value"),
    (
      "need {entity} {relation} ; recall nobody ; <answer> nobody </answer>",
      "misremembers",
    ),
    (
      "need {entity} {relation} ; found nobody ; <answer> nobody </answer>",
      "misreads a passage",
    ),
    (
      "need {entity} {relation} ; found {value} ; <answer> nobody </answer>",
      "answers another value",
    ),
    (
      "need {entity} {relation} ; found {value} ; need {value} {relation} ;",
      "goes on after the last fact",
    ),
  ],
)
def test_slips_are_told_from_decisions(turn, slip):
  question, fact = one_fact(known=True)
  found = losses(record(question, 0, [turn.format(**fact)], 0))
  assert [place for kind, place in found if kind == lib.SLIPS] == [slip]


def test_an_answer_before_the_end_is_a_slip():
  question = next(q for q in QUESTIONS if len(q.metadata["facts"]) > 1)
  first, second = question.metadata["facts"][:2]
  turn = (
    f"need {first['entity']} {first['relation']} ; found {first['value']} ; "
    f"<answer> {first['value']} </answer>"
  )
  found = losses(record(question, 4, [turn], 0))
  rest = tuple(f["relation"] for f in question.metadata["facts"][1:])
  assert found[lib.SLIPS, "answers too early"] == BEST.value(rest, 4)
  assert second["entity"] == first["value"]
