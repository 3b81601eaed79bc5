"""The optimum a second way: by all searches of all facts, in small worlds."""

from __future__ import annotations

import functools
import itertools

import pytest

from anysearch_jax.world import optimum
from anysearch_jax.world import world as world_lib

MISS = world_lib.ALTERNATIVE
SEARCHES = ("usual", "alternative", "verdict")


def hypotheses(world, entity, name, twins):
  """Yields (probability, value, in the alternative wording, twin or -1)."""
  r = world_lib.INDEX[name]
  objects = world.members[world_lib.RELATIONS[r].object]
  memory, others = world.memory[entity, r], len(objects) - 1
  for value, alternative in itertools.product(objects, (False, True)):
    p = 1 / len(objects)
    if memory >= 0:
      sure = world.reliability(name)
      p = sure if value == memory else (1 - sure) / others
    p *= MISS if alternative else 1 - MISS
    twin = 0 if memory >= 0 else twins[entity]
    yield p * (1 - twin), value, alternative, -1
    for other in set(objects) - {value}:
      yield p * twin / others, value, alternative, other


def shown(hypothesis, search):
  """Returns the values that a search shows if this hypothesis is true."""
  _, value, alternative, twin = hypothesis
  if search == "verdict":
    return {value} if twin >= 0 else set()
  if alternative != (search == "alternative"):
    return set()
  return {value, twin} - {-1}


def expectimax(world, start, chain, budget, twins, price=0.0):
  """Returns the value of the best order of all searches of all facts.

  A state has the hypotheses of every fact that are left; the answer is the most
  likely final value.
  """
  first = world.index[start]
  kinds = [world_lib.RELATIONS[world_lib.INDEX[name]] for name in chain]
  facts, start_state = [], []
  for hop, (name, kind) in enumerate(zip(chain, kinds, strict=True)):
    for entity in world.members[kind.subject] if hop else [first]:
      facts.append((hop, entity))
      rows = hypotheses(world, entity, name, twins)
      start_state.append(tuple(row for row in rows if row[0]))

  def stop(state):
    chances = {first: 1.0}
    for hop, kind in enumerate(kinds):
      after = dict.fromkeys(world.members[kind.object], 0.0)
      for rows, (at, entity) in zip(state, facts, strict=True):
        total = sum(row[0] for row in rows)
        for p, value, *_ in rows if at == hop else ():
          after[value] += chances[entity] * p / total
      chances = after
    return max(chances.values())

  @functools.cache
  def value(state, left):
    best = stop(state)
    if not left or best > 1 - 1e-12:
      return best
    for i, search in itertools.product(range(len(facts)), SEARCHES):
      groups = {}
      for row in state[i]:
        groups.setdefault(frozenset(shown(row, search)), []).append(row)
      mean = -price
      for rows in groups.values() if len(groups) > 1 else ():
        p = sum(row[0] for row in rows) / sum(row[0] for row in state[i])
        mean += p * value((*state[:i], tuple(rows), *state[i + 1 :]), left - 1)
      best = max(best, mean)
    return best

  return value(tuple(start_state), budget)


def small(monkeypatch, size, seed, reliability=0.0):
  monkeypatch.setattr(world_lib, "KINDS", dict.fromkeys(world_lib.KINDS, size))
  return world_lib.World(seed, reliability)


def both(world, chain, budget, price=0.0):
  """Returns what the optimum computes, and what the other way finds."""
  kind = world_lib.RELATIONS[world_lib.INDEX[chain[0]]].subject
  start = world.entities[world.members[kind][0]]
  twins = {}
  for odds in map(optimum.relation_odds(world).get, chain):
    twins |= zip(odds.subjects, odds.twin, strict=True)
  best = optimum.Optimum(world, price=price).value(start, chain, budget)
  return best, expectimax(world, start, chain, budget, twins, price)


@pytest.mark.parametrize("price", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(4))
def test_one_fact_is_exact(monkeypatch, seed, price):
  world = small(monkeypatch, 5, seed)
  for name, budget in itertools.product(("employer", "river"), range(5)):
    found, expected = both(world, (name,), budget, price)
    assert found == pytest.approx(expected, abs=1e-12)


CHAIN = ("employer", "headquarters")


def test_two_facts_are_exact_where_no_memory_differs(monkeypatch):
  """Where nothing of the second facts is in memory, all means are equal."""
  checked = 0
  for seed in range(60):
    world = small(monkeypatch, 3, seed)
    first, second = (world_lib.INDEX[name] for name in CHAIN)
    known = world.known[world.members["person"][0], first]
    if known and not world.known[world.members["company"], second].any():
      for budget in range(3):
        found, expected = both(world, CHAIN, budget)
        assert found == pytest.approx(expected, abs=1e-12)
      checked += 1
  assert checked > 1


@pytest.mark.parametrize("price", [0.0, 0.1])
@pytest.mark.parametrize("reliability", [0.0, 0.9])
def test_what_is_neglected_is_little(monkeypatch, reliability, price):
  """A mean over other values has the remembered one; guesses are not searched.

  Of three values these weigh much; in the world there are 16 to 100.
  """
  for seed, budget in itertools.product(range(3), (1, 2)):
    world = small(monkeypatch, 3, seed, reliability)
    found, expected = both(world, CHAIN, budget, price)
    assert expected - 0.12 < found < expected + 0.02


def test_of_more_values_less_is_neglected(monkeypatch):
  gaps = []
  for size in (3, 10):
    world = small(monkeypatch, size, 2, 0.6)
    found, expected = both(world, CHAIN, 1)
    gaps.append(abs(found - expected))
  assert gaps[0] > 0.05 > 0.01 > gaps[1]
