"""Tests the optimum and exact agents: by hand, by enumeration, against play."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from played_evaluation import configured, play, rows_of

from anysearch_jax import config as config_lib
from anysearch_jax.evaluation import harness
from anysearch_jax.world import expert, expert_policy, optimum
from anysearch_jax.world import world as world_lib
from retrieval import lexical

WORLD = world_lib.World()
MISS = world_lib.ALTERNATIVE
QUESTIONS = WORLD.questions("held-out", 1000, 3)
AGENTS = {
  "optimum": optimum.Optimum(WORLD),
  "priced": optimum.Optimum(WORLD, price=0.05),
  "unknown": optimum.search_unknown,
  "everything": optimum.search_everything,
}


def accuracy(question, budget, agent="everything"):
  table = optimum.accuracy(WORLD, AGENTS[agent], [question.id], [budget])
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


KINDS = ("known", "unknown", "miss", "conflict")


def odds(relation):
  """Counts P(known) and P(twin | unknown) from the world's snapshots."""
  r = world_lib.INDEX[relation]
  snapshots = [WORLD.snapshot(i) for i in WORLD.split_snapshots("train")]
  applies = snapshots[0].values[:, r] >= 0
  known = WORLD.known[applies, r]
  twins = [(s.twins[applies, r] >= 0)[~known] for s in snapshots]
  return known.mean(), np.mean(twins)


def situation(decision, *relations, remaining=3, settled=()):
  known = decision == "known"
  return expert.Situation(decision, known, relations, remaining, settled)


def test_decisions_by_hand():
  best = optimum.Optimum(WORLD)
  assert best(situation("known", "country")) == 0  # Always right.
  assert best(situation("known", "mayor")) == 1  # Right half of the time.
  assert best(situation("known", "mayor", remaining=0)) == 0
  # The only search is worth most where there is no memory.
  few = ("river", "mouth")
  assert best(situation("known", *few, remaining=1)) == 0
  assert best(situation("unknown", *few, remaining=2)) == 1
  assert best(situation("conflict", "river", remaining=1)) == 1
  assert best(situation("miss", "river", remaining=1)) == 1


def test_a_price_is_paid_only_for_what_it_buys():
  known = situation("known", "river")  # A search adds .2 to being right.
  assert optimum.Optimum(WORLD, price=0.1)(known) == 1
  assert optimum.Optimum(WORLD, price=0.25)(known) == 0
  # After a guess, the chain is most likely lost.
  lost = situation("known", "river", settled=(("mayor", "guess"),))
  assert optimum.Optimum(WORLD, price=0.1)(lost) == 0
  assert optimum.Optimum(WORLD)(lost) == 1
  assert optimum.Optimum(WORLD, price=2).value(("mayor", "river"), 8) == (
    pytest.approx(optimum.Optimum(WORLD).value(("mayor", "river"), 0))
  )


def enumerated(tables, relations, searches, price):
  """The value of the best of `tables`: (decision, searches left) -> 0 or 1."""

  def value(table, rest, r, q):
    if not rest:
      return q
    relation, after = rest[0], rest[1:]
    p_known, twin = odds(relation)
    right = WORLD.reliability(relation)
    guess = 1 / len(WORLD.objects(relation))

    def step(decision, known, r):
      if not (r and table[len(rest), decision, r]):
        if decision == "conflict":
          return value(table, after, r, q / 2)
        return value(table, after, r, q * (right if known else guess))
      if decision == "conflict":
        return value(table, after, r - 1, q) - price
      found = value(table, after, r - 1, q)
      if not known:
        found *= 1 - twin
        found += twin * step("conflict", known, r - 1)
      if decision == "miss":
        return found - price
      missed = step("miss", known, r - 1)
      return (1 - MISS) * found + MISS * missed - price

    return p_known * step("known", True, r) + (1 - p_known) * step(
      "unknown", False, r
    )

  return max(value(table, relations, searches, 1.0) for table in tables)


@pytest.mark.parametrize("price", [0.0, 0.15])
def test_no_table_of_decisions_is_better(price):
  keys = list(itertools.product((1,), KINDS, (1, 2)))
  tables = [
    dict(zip(keys, bits)) for bits in itertools.product((0, 1), repeat=8)
  ]
  for relation, searches in itertools.product(("mayor", "river"), (1, 2)):
    best = optimum.Optimum(WORLD, price=price).value((relation,), searches)
    assert best == pytest.approx(
      enumerated(tables, (relation,), searches, price), abs=1e-12
    )


def test_accuracy_of_one_fact_by_hand():
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


def simulated(relations, searches, rng):
  """Yields what the optimum knows at each forecast, and the searches made."""
  made, told = 0, True
  for i, relation in enumerate(relations):
    p_known, twin = odds(relation)
    known = rng.random() < p_known
    decision = "known" if known else "unknown"
    while decision:
      left = searches - made
      here = expert.Situation(decision, known, relations[i:], left, ())
      if told and left:
        yield here, made
      told = bool(AGENTS["optimum"](here))
      made += told
      missed = decision in ("known", "unknown") and rng.random() < MISS
      twins = not (known or missed or decision == "conflict")
      twins = twins and rng.random() < twin
      decision = told and ("miss" if missed else "conflict" if twins else "")
  if told and made < searches:
    yield "end", made
  yield "over", made


def test_forecasts_of_the_optimum_by_hand_and_by_simulation():
  ids = ["dev/0/x/country", "dev/0/x/mayor-river"]
  rng = np.random.default_rng(5)
  found = optimum.forecasts(AGENTS["optimum"], ids, (0, 1, 2, 4))
  known, _ = odds("country")
  # What memory holds needs no search. The others need one, and another after
  # a miss or two values, which is not known before.
  assert (found[:, 0] == 0).all()
  np.testing.assert_allclose(found[0, 1], [1, 1, 0])
  np.testing.assert_allclose(found[0, 2], [2 - known, 2 - known, 1 - known])
  follow = {}
  for _ in range(8000):
    *moments, (_, made) = simulated(("mayor", "river"), 4, rng)
    for state, before in moments:
      follow.setdefault(state, []).append(made - before)
  sums = np.zeros(3)
  for values in follow.values():
    low, high = np.quantile(values, [0.1, 0.9], method="inverted_cdf")
    held = [low <= value <= high for value in values]
    sums += len(values), sum(held), len(values) * (high - low)
  np.testing.assert_allclose(found[1, 3], sums / 8000, rtol=0.02)


@pytest.mark.parametrize(
  "name", ["nq-17", "dev/3/nobody/mayor", "dev/x/gasur/mayor", "dev/99/gasur/x"]
)
def test_another_question_is_refused(name):
  with pytest.raises(ValueError, match="expected one of the generated world"):
    optimum.accuracy(WORLD, AGENTS["optimum"], [name], [1])


@pytest.mark.parametrize(
  ("name", "agent"),
  [
    ("optimum", "optimum"),
    ("optimum:0.05", "priced"),
    ("unknown_only", "unknown"),
    ("everything", "everything"),
    ("expert", None),
  ],
)
def test_play_has_the_computed_accuracy(tmp_path, name, agent):
  """Held-out questions, as `launch.evaluate --scripted=NAME` plays them."""
  budgets, seeds, questions = (0, 1, 3, 8), (1, 2, 3, 4), QUESTIONS[:25]
  config = dataclasses.replace(
    # The expert's decisions depend on the scaffold.
    configured(budgets=budgets, seeds=seeds, scaffold=agent is None),
    episode=config_lib.EpisodeConfig(
      prompts="world", max_generated=300, max_context=544
    ),
  )
  player = harness.Player(*expert_policy.named(name, WORLD))
  retriever = lexical.LexicalRetriever(WORLD.corpus, reads=WORLD.searched)
  rows = rows_of(play(config, player, questions, retriever, tmp_path)[1])
  assert {row["outcome"] for row in rows} == {"answered"}
  # Only the expert searches beyond its budget.
  assert any(row["violation"] for row in rows) == (agent is None)
  assert all(row["format"] != row["violation"] for row in rows)
  if agent is None:
    return
  right = {(q.id, b): [] for q in questions for b in budgets}
  for row in rows:
    right[row["question_id"], row["budget"]].append(row["em"])
  p = optimum.accuracy(WORLD, AGENTS[agent], [q.id for q in questions], budgets)
  assert ((p >= 0) & (p <= 1)).all()
  found = np.array([np.mean(each) for each in right.values()]).reshape(p.shape)
  sure = (p == 0) | (p == 1)
  np.testing.assert_array_equal(found[sure], p[sure])
  error = np.sqrt((p * (1 - p)).sum(0) / len(seeds)) / len(p)
  assert (abs(found.mean(0) - p.mean(0)) < 4 * error + 1e-12).all()


def test_an_invalid_name_or_price_is_refused():
  for name, words in (
    ("optimum:x", "optimum:0.05"),
    ("optimum:-1", "found the price -1.0"),
    ("everything:1", "expected one of expert, optimum"),
  ):
    with pytest.raises(ValueError, match=f"(?i){words}"):
      expert_policy.named(name, WORLD)
