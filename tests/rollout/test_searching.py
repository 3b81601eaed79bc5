"""Batched searches: sharing, caching, limits."""

from __future__ import annotations

import asyncio
from collections import Counter

import hypothesis
import pytest
import scripted
from scripted_search import (
  DRAWN,
  KINDS,
  Many,
  One,
  ask,
  listed,
  rounds,
  run,
  searcher,
  truth,
)

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import loop
from anysearch_jax.rollout import driver, searching
from retrieval import lexical


@KINDS
@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(**DRAWN)
def test_answers_do_not_depend_on_the_order_of_searches(
  kind, asked, latencies, sizes
):
  batch, concurrency = sizes
  inner = kind(lambda request: latencies[request.query])
  ret = searcher(inner, batch=batch, concurrency=concurrency)

  async def one(request, start):
    await rounds(start)
    return await ret.search(request)

  async def play():
    return await asyncio.gather(*(one(*each[:2]) for each in asked))

  answers = loop.run(play())
  assert listed(answers) == [truth(request) for request, *_ in asked]
  # Each distinct query was sent once.
  assert Counter(inner.asked) == Counter({request for request, *_ in asked})
  if kind is Many:
    assert max(map(len, inner.calls)) <= batch
    assert inner.most <= concurrency
  else:
    assert inner.most <= batch * concurrency
  count = ret.counters
  assert count["searches"] == len(asked)
  assert count["batches"] == len(inner.calls)
  assert count["batched_queries"] == len(inner.asked)
  assert count["cache_hits"] + count["deduplicated"] == (
    len(asked) - len(inner.asked)
  )


def test_one_event_loop_iteration_is_one_batch_in_order():
  inner = Many()
  requests = [ask(q) for q in "dbcab"]
  assert listed(run(searcher(inner), *requests)) == list(map(truth, requests))
  assert inner.calls == [[ask(q) for q in "dbca"]]


def test_without_search_many_queries_are_sent_concurrently():
  inner = One(lambda request: 5)
  run(searcher(inner), *map(ask, "abcdef"))
  assert inner.most == 6


def test_batches_and_calls_are_bounded():
  inner = Many(lambda request: 5)
  run(searcher(inner, batch=2, concurrency=2), *map(ask, "abcdefg"))
  assert [len(call) for call in inner.calls] == [2, 2, 2, 1]
  assert inner.most == 2
  inner = One(lambda request: 5)
  run(searcher(inner, batch=2, concurrency=2), *map(ask, "abcdefg"))
  assert inner.most == 4


def test_queries_that_wait_for_a_call_form_one_batch():
  """A slow retriever gets fewer and larger calls, not more of them."""
  inner = Many(lambda request: 20)
  ret = searcher(inner, concurrency=1)

  async def one(i):
    await rounds(i)
    return await ret.search(ask(str(i)))

  async def play():
    await asyncio.gather(*map(one, range(10)))

  loop.run(play())
  assert [len(call) for call in inner.calls] == [1, 9]


@KINDS
def test_k_and_corpus_distinguish_queries(kind):
  inner = kind()
  requests = [ask("a", 1), ask("a", 2), ask("a", 2, "other"), ask("a", 2)]
  assert listed(run(searcher(inner), *requests)) == list(map(truth, requests))
  assert len(inner.asked) == 3


def test_answers_outlive_the_event_loop():
  inner = Many()
  ret = searcher(inner)
  first = run(ret, ask("a"))
  assert run(ret, ask("a")) == first
  assert len(inner.calls) == 1
  assert ret.counters["cache_hits"] == 1


def test_cached_answer_does_not_yield_to_the_event_loop():
  ret = searcher(Many())
  run(ret, ask("a"))

  async def at_once():
    with pytest.raises(StopIteration) as done:
      ret.search(ask("a")).send(None)
    return list(done.value.value)

  assert loop.run(at_once()) == truth(ask("a"))


def test_empty_answer_is_cached():
  inner = scripted.Retriever()
  ret = searcher(inner)
  assert run(ret, ask("a")) == run(ret, ask("a")) == [()]
  assert len(inner.requests) == 1


def test_least_recently_used_answer_is_evicted():
  inner = Many()
  ret = searcher(inner, cache=2)
  for query in "abaca":
    run(ret, ask(query))
  assert [r.query for r in inner.asked] == list("abc")
  run(ret, ask("b"))
  assert [r.query for r in inner.asked] == list("abcb")


def test_without_a_cache_only_searches_in_flight_are_shared():
  inner = Many()
  ret = searcher(inner, cache=0)
  run(ret, ask("a"), ask("a"))
  run(ret, ask("a"))
  assert len(inner.asked) == 2
  assert ret.counters["deduplicated"] == 1


def test_changed_identity_ignores_cached_answers():
  inner = Many()
  ret = searcher(inner, identity="2018")
  run(ret, ask("a"))
  ret.identity = "2019"
  run(ret, ask("a"))
  ret.identity = "2018"
  run(ret, ask("a"))
  assert len(inner.asked) == 2


def test_rollout_is_unchanged_and_sends_each_query_once():
  hits = {f"q{i}": [types.Passage(str(i), f"T{i}", "text")] for i in range(3)}

  def script(request):
    address = request.address
    if request.turn < address.sample:
      return scripted.search(f"q{address.question}")
    return scripted.answer("yes")

  def play(retriever):
    rollout = loop.run(
      driver.run_groups(
        [
          driver.Assignment(
            i, types.Question(f"{i}", "Which?", ("a",)), 3, True
          )
          for i in range(3)
        ],
        driver.EpisodeParts(
          engine=scripted.Engine(script, seconds=scripted.shuffled_seconds(1)),
          retriever=retriever,
          config=config_lib.EpisodeConfig(prompts="world", max_generated=500),
          codec=scripted.CODEC,
        ),
        group=4,
        rollout=0,
      )
    )
    return [
      [scripted.as_value(t) for t in group.trajectories]
      for group in rollout.groups
    ]

  plain, inner = scripted.Retriever(hits), scripted.Retriever(hits)
  ret = searcher(inner)
  assert play(ret) == play(plain)
  assert len(plain.requests) == 18
  assert sorted(r.query for r in inner.requests) == ["q0", "q1", "q2"]
  assert ret.counters["searches"] == 18


def test_bm25_batch_equals_single_searches():
  passages = [
    types.Passage(str(i), title, f"{title} is a town.")
    for i, title in enumerate(["Ost", "West", "Nord"])
  ]
  retriever = lexical.LexicalRetriever({"": passages})
  requests = [ask("West"), ask("town", 2), ask("nothing")]
  expected = [retriever.lookup(r.query, r.k) for r in requests]
  assert expected[0] and expected[1] and expected[2] == ()
  assert loop.run(retriever.search_many(requests)) == expected
  assert run(searcher(retriever), *requests) == expected


class Long:
  """Returns passages of given sizes (characters of title and text)."""

  def __init__(self, *sizes):
    self.found = [
      types.Passage(f"{i}", "t" * title, "x" * text)
      for i, (title, text) in enumerate(sizes)
    ]

  async def search(self, request):
    return self.found


def test_long_passages_and_answers_are_cut_and_counted():
  inner = Long((2, 8), (3, 8), (20, 5), (1, 4), (1, 4))
  ret = searcher(inner, passage_characters=10, answer_characters=32)
  for _ in range(2):  # The cache answers the second search.
    (answer,) = run(ret, ask("a"))
    sizes = [(len(p.title), len(p.text)) for p in answer]
    assert sizes == [(2, 8), (3, 7), (10, 0), (1, 1), (0, 0)]
    assert answer[0] is inner.found[0]
    assert [p.id for p in answer] == list("01234")
  assert searching.metrics(ret.counters)["search/cut_passages"] == 4


def test_an_id_of_any_length_is_cut_too():
  inner = Long((1, 1))
  inner.found = [types.Passage("i" * 99, "t", "x")]
  ((passage,),) = run(searcher(inner, passage_characters=10), ask("a"))
  assert passage == types.Passage("i" * 10, "t", "x")


def test_metrics_are_counts_and_shares():
  inner = Many()
  ret = searcher(inner)
  run(ret, *map(ask, "aab"))
  run(ret, *map(ask, "ab"))
  found = searching.metrics(ret.counters)
  assert found.pop("search/seconds_a_batch") > 0
  assert found == {
    "search/searches": 5,
    "search/cache_hits": 2,
    "search/deduplicated": 1,
    "search/batches": 1,
    "search/failures": 0,
    "search/left_out": 0,
    "search/cut_passages": 0,
    "search/hit_rate": 0.4,
    "search/queries_a_batch": 2,
  }
  assert set(searching.metrics({}).values()) == {0}
