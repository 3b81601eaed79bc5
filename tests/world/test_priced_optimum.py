"""The best use of cents: by hand, against an exhaustive search, and played."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from played_evaluation import play, rows_of

from anysearch_jax import budgets as budgets_lib
from anysearch_jax.evaluation import harness
from anysearch_jax.world import (
  cheap_retrieval,
  optimum,
  priced_expert,
  priced_optimum,
  priced_policy,
  versions,
)
from anysearch_jax.world import world as world_lib
from configs import priced_tools
from launch import retrievers, world_source

WORLD = world_lib.World(versions.config("graded", 0))
MISS = WORLD.config.alternative
BEST = priced_optimum.PricedOptimum(WORLD)
Fact = priced_expert.Fact


def situation(fact, *rest, money=20, settled=()):
  return priced_expert.Situation(fact, rest, money, settled)


def test_one_fact_by_hand():
  known, right, guess, twin = optimum.relation_odds(WORLD)["river"]
  assert (right, guess) == (pytest.approx(0.8), 1 / 24)
  # No cent: trust memory, or guess.
  expected = known * right + (1 - known) * guess
  assert BEST.value(["river"], 0) == pytest.approx(expected)
  # One cent: .9 right, .02 wrong. With a memory, trust what was found.
  expected = (1 - known) * (0.9 + 0.08 * guess)
  expected += known * (0.9 + right * 0.02 / 23 * 0 + 0.08 * right)
  agrees_wrongly = 0.2 * 0.02 / 23
  assert BEST.value(["river"], 1) == pytest.approx(expected, abs=agrees_wrongly)
  # The dear one alone needs at most three searches.
  dear = priced_optimum.PricedOptimum(WORLD, tools=("dear",))
  assert dear.value(["river"], 9) == pytest.approx(1)
  assert dear.value(["river"], 2) == pytest.approx(
    known * right + (1 - known) * guess
  )
  one = (1 - known) * ((1 - MISS) * (1 - twin / 2) + MISS * guess)
  one += known * (1 - MISS + MISS * right)
  assert dear.value(["river"], 5) == pytest.approx(one)


def test_decisions_by_hand():
  def action(*args, **more):
    ((found, p),) = BEST(situation(*args, **more)).items()
    assert p == 1
    return found

  assert action(Fact("country", True)) == "recall"  # Always right.
  # Easy facts are asked the cheap search first.
  assert action(Fact("river", False), money=4) == "cheap"
  assert action(Fact("river", False, "nothing"), money=3) == "dear"
  assert action(Fact("river", False, "value"), money=2) == "settle"
  # What a hard relation gives is right half of the time: verify it.
  assert action(Fact("mayor", False, "value"), money=3) == "dear"
  # A memory that is always right is trusted against the cheap search.
  assert action(Fact("country", True, "differs"), money=0) == "recall"
  assert action(Fact("mayor", False), money=0) == "recall"


def test_a_price_is_paid_only_for_what_it_buys():
  # For an easy fact that memory lacks, a cent buys .86 of a right answer.
  fact = situation(Fact("river", False))
  for price, bought in ((0.5, "cheap"), (0.9, "recall")):
    best = priced_optimum.PricedOptimum(WORLD, price=price)
    assert best(fact) == {bought: 1.0}
  # After a guess the chain is most likely lost.
  lost = fact._replace(settled=((Fact("mayor", False), "recall"),))
  assert priced_optimum.PricedOptimum(WORLD, price=0.5)(lost) == {"recall": 1.0}
  with pytest.raises(ValueError, match="the price -1"):
    priced_optimum.PricedOptimum(WORLD, price=-1)
  with pytest.raises(ValueError, match="the tool 'x'"):
    priced_optimum.PricedOptimum(WORLD, tools=("x",))


class Exhaustive:
  """Maximises over all plans, from a list of everything that may be so.

  A case is (memory is right or None, alternative wording, twin, what the cheap
  search states), with its probability. It tries every action at every history,
  the alternative wording first and repeated searches too.
  """

  def __init__(self, tools=("cheap", "dear"), price=0.0):
    self.tools, self.price = tools, price

  def chain(self, relations, money, q=1.0):
    if not relations:
      return q
    return sum(
      self.fact(cases, relations, money, q, frozenset())
      for cases in self.cases(relations[0])
    )

  def cases(self, relation):
    """Yields the cases with and without a memory."""
    o = optimum.relation_odds(WORLD)[relation]
    cheap = cheap_retrieval.ODDS[relation]
    kind = optimum.relations_lib.ALL[optimum.relations_lib.INDEX[relation]]
    others = len(WORLD.members[kind.object]) - 1 - (kind.subject == kind.object)
    none = 1 - cheap.right - cheap.wrong
    for known in (True, False):
      share = o.known if known else 1 - o.known
      cases = {}
      memories = ((True, o.right), (False, 1 - o.right))
      twins = ((True, o.twin), (False, 1 - o.twin))
      for (memory, pm), (twin, pt), alternative in itertools.product(
        memories if known else ((None, 1.0),),
        ((False, 1.0),) if known else twins,
        (True, False),
      ):
        special = "memory" if memory is False else "twin" if twin else None
        stated = {"truth": cheap.right, None: none}
        if special:
          stated[special] = cheap.wrong / others
          stated["other"] = cheap.wrong * (others - 1) / others
        else:
          stated["other"] = cheap.wrong
        for value, pv in stated.items():
          p = share * pm * pt * pv * (MISS if alternative else 1 - MISS)
          if p:
            cases[memory, alternative, twin, value] = p
      yield cases

  def seen(self, case, tool):
    """What a search shows of a case."""
    memory, alternative, twin, value = case
    if tool == "cheap":
      return ("cheap", None if value is None else self.alike(case))
    if tool == "verdict":
      return ("truth",)
    if alternative != (tool == "alternative"):
      return (tool, "missed")
    return ("conflict",) if twin else ("truth",)

  def alike(self, case):
    """The value of the cheap search as an agent sees it."""
    memory, _, _, value = case
    if memory is None:
      return "value"
    same = value == ("truth" if memory else "memory")
    return "agrees" if same else "differs"

  def fact(self, cases, relations, money, q, history):
    total = sum(cases.values())
    o = optimum.relation_odds(WORLD)[relations[0]]
    rest = relations[1:]

    def then(right):
      """The value where the chosen value is right in these cases."""
      p = sum(p for case, p in cases.items() if right(case))
      return total * self.chain(rest, money, q * p / total)

    known = next(iter(cases))[0] is not None
    if ("truth",) in history:
      return total * self.chain(rest, money, q)
    options = []
    if known:
      options.append(then(lambda case: case[0]))
    else:
      options.append(total * self.chain(rest, money, q * o.guess))
    if any(h[0] == "cheap" and h[1] for h in history):
      options.append(then(lambda case: case[3] == "truth"))
    if ("conflict",) in history:
      options.append(total * self.chain(rest, money, q / 2))
    searches = ["cheap"] * ("cheap" in self.tools)
    if "dear" in self.tools:
      conflict = ("conflict",) in history
      searches += ["verdict"] if conflict else ["usual", "alternative"]
    for tool in searches:
      cost = 1 if tool == "cheap" else 3
      if cost > money:
        continue
      parts = {}
      for case, p in cases.items():
        shown = self.seen(case, tool)
        # After both, an agent sees whether the value is one of the two.
        after = history | {shown}
        if ("conflict",) in after and ("cheap", "value") in after:
          after |= {("among", case[3] in ("truth", "twin"))}
        parts.setdefault(after, {})[case] = p
      if tool == "cheap" and {*parts} == {history}:
        continue
      value = sum(
        self.fact(part, relations, money - cost, q, after)
        for after, part in parts.items()
      )
      options.append(value - self.price * cost * total)
    return max(options)


@pytest.mark.parametrize(
  "tools", [("cheap", "dear"), ("cheap",), ("dear",)], ids=str
)
def test_no_plan_is_better(tools):
  best = priced_optimum.PricedOptimum(WORLD, tools=tools)
  oracle = Exhaustive(tools)
  for relation in ("river", "mayor", "mentor", "country"):
    for money in (0, 1, 3, 4, 6):
      assert best.value((relation,), money) == pytest.approx(
        oracle.chain((relation,), money), abs=1e-12
      )


def test_no_plan_is_better_in_a_chain_or_with_a_price():
  assert BEST.value(("mayor", "mentor"), 4) == pytest.approx(
    Exhaustive().chain(("mayor", "mentor"), 4), abs=1e-12
  )
  best = priced_optimum.PricedOptimum(WORLD, price=0.05)
  oracle = Exhaustive(price=0.05)
  for chain, money in ((("river",), 7), (("mayor",), 4)):
    assert best.value(chain, money) == pytest.approx(
      oracle.chain(chain, money), abs=1e-12
    )


@pytest.mark.parametrize(
  "preset, name",
  [
    ("mixed", "priced_optimum"),
    ("cheap", "cheap_optimum"),
    ("dear", "dear_optimum"),
  ],
)
def test_play_has_the_computed_values(preset, name, tmp_path):
  """Held-out questions, as `launch.evaluate --scripted=NAME` plays them."""
  n, budgets = 150, (1, 4, 11)
  config = priced_tools.get_config(preset)
  pairs = tuple(f"dollars={cents / 100}" for cents in budgets)
  evaluation = dataclasses.replace(config.evaluation, pairs=pairs)
  config = dataclasses.replace(config, evaluation=evaluation)
  source = world_source.make(config.data, config.retrieval.kind)
  questions = WORLD.questions("held-out", n, 2024)
  player = harness.Player(
    *priced_policy.named(name, WORLD, config.evaluation.prices)
  )
  retriever = retrievers.make(config, source.retriever)
  _, text = play(config, player, questions, retriever, tmp_path / name)
  rows = rows_of(text)
  assert {row["outcome"] for row in rows} == {"answered"}
  assert not any(row["violation"] for row in rows)
  tools = tuple(priced_policy.TOOLS[name])
  best = priced_optimum.PricedOptimum(WORLD, tools=tools)
  for cents in budgets:
    mine = [row for row in rows if row["caps"]["dollars"] == cents / 100]
    assert max(row["cost"] for row in mine) <= cents / 100
    expected = np.mean(
      [best.value(q.text.split()[1:-1], cents) for q in questions]
    )
    error = np.sqrt(expected * (1 - expected) / n)
    assert abs(np.mean([row["em"] for row in mine]) - expected) < 3.5 * error
    spent = [best.outcome(q.text.split()[1:-1], cents).cents for q in questions]
    cost = 100 * np.array([row["cost"] for row in mine])
    error = np.std(cost - spent) / np.sqrt(n) + 1e-9
    assert abs(np.mean(cost) - np.mean(spent)) < 3.5 * error


def test_an_invalid_name_or_price_is_refused():
  prices = priced_tools.get_config().evaluation.prices
  with pytest.raises(ValueError, match="priced_optimum:0.02"):
    priced_policy.named("priced_optimum:x", WORLD, prices)
  with pytest.raises(ValueError, match="whole cents"):
    priced_policy.named("priced_optimum", WORLD, budgets_lib.Prices())
