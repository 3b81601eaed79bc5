"""The cheap retriever: its answers by hand, its frequencies, its addresses."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from anysearch_jax import types
from anysearch_jax.world import cheap_retrieval, versions
from anysearch_jax.world import relations as relations_lib
from anysearch_jax.world import world as world_lib

WORLD = world_lib.World(versions.config("graded", 0))
CHEAP = cheap_retrieval.CheapRetriever(WORLD)
NAMES = [relation.name for relation in relations_lib.ALL]


def always(right, wrong):
  odds = dict.fromkeys(NAMES, cheap_retrieval.Odds(right, wrong))
  return cheap_retrieval.CheapRetriever(WORLD, odds)


def facts(snapshot=0):
  return np.argwhere(WORLD.snapshot(snapshot).values >= 0).tolist()


def test_a_sure_retriever_states_every_fact_in_the_usual_wording():
  sure = always(1.0, 0.0)
  values = WORLD.snapshot(0).values
  for e, r in facts()[::17]:
    entity, relation = WORLD.entities[e], relations_lib.ALL[r]
    (found,) = sure.lookup(f"{entity} {relation.name}", 3, "snapshot-0")
    assert found.title == entity
    assert found.text == f"{relation.name} {WORLD.entities[values[e, r]]}"
    assert not sure.lookup(f"{entity} {relation.alternative}", 3, "snapshot-0")


def test_a_wrong_retriever_never_states_the_fact():
  liar = always(0.0, 1.0)
  values = WORLD.snapshot(0).values
  for e, r in facts():
    value = liar.value(0, e, r)
    assert value not in (values[e, r], e)
    assert value in WORLD.members[relations_lib.ALL[r].object]


@pytest.mark.parametrize(
  "query", ["", "bedur", "bedur verdict", "nobody river", "x y z", " "]
)
def test_other_queries_find_nothing(query):
  assert always(1.0, 0.0).lookup(query, 3, "snapshot-0") == ()


def test_a_relation_of_another_kind_finds_nothing():
  person = WORLD.entities[WORLD.members["person"].start]
  assert always(1.0, 0.0).lookup(f"{person} river", 3, "snapshot-0") == ()


def test_frequencies_are_the_stated_odds():
  right, wrong, count = (dict.fromkeys(NAMES, 0) for _ in range(3))
  for snapshot in range(len(WORLD.split_snapshots("train"))):
    values = WORLD.snapshot(snapshot).values
    for e, r in facts(snapshot):
      name = NAMES[r]
      found = CHEAP.value(snapshot, e, r)
      count[name] += 1
      right[name] += found == values[e, r]
      wrong[name] += found not in (-1, values[e, r])
  for name, odds in cheap_retrieval.ODDS.items():
    n = count[name]
    for found, p in ((right[name], odds.right), (wrong[name], odds.wrong)):
      assert abs(found / n - p) < 4 * np.sqrt(p * (1 - p) / n)


def test_an_answer_depends_on_its_fact_alone():
  queries = [f"{WORLD.entities[e]} {NAMES[r]}" for e, r in facts()[::29] * 2]
  asked = [types.SearchRequest(query, 3, "snapshot-0") for query in queries]
  other = cheap_retrieval.CheapRetriever(world_lib.World(WORLD.config))
  backwards = asyncio.run(other.search_many(asked[::-1]))[::-1]
  assert asyncio.run(CHEAP.search_many(asked)) == backwards
  one = asyncio.run(CHEAP.search(asked[0]))
  assert one == backwards[0]


def test_identity_names_the_odds_and_the_world():
  found = CHEAP.identity()
  assert found["kind"] == "cheap"
  assert found == cheap_retrieval.CheapRetriever(WORLD).identity()
  assert always(1.0, 0.0).identity()["sha256"] != found["sha256"]
  seeded = world_lib.World(dataclasses.replace(WORLD.config, seed=1))
  other = cheap_retrieval.CheapRetriever(seeded).identity()
  assert other["sha256"] != found["sha256"]


def test_bad_arguments_are_refused():
  with pytest.raises(ValueError, match="k=0"):
    CHEAP.lookup("a b", 0, "snapshot-0")
  with pytest.raises(ValueError, match="corpus 'x'"):
    CHEAP.lookup("a b", 1, "x")
  with pytest.raises(ValueError, match="sum is at most 1"):
    always(0.9, 0.2)
  with pytest.raises(ValueError, match="None of the relation"):
    cheap_retrieval.CheapRetriever(WORLD, {})
