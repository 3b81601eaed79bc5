"""Pipelines: fusion, order, deadlines, what is left out, and runs over them."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import scripted
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.launch import retrievers
from anysearch_jax.retrieval import pipeline
from anysearch_jax.retrieval import requests as requests_lib
from anysearch_jax.rollout import searching


class Known(requests_lib.OneByBatch):
  """A retriever with the passages of each query; counts its calls."""

  def __init__(self, found, wait=0.0):
    self.found, self.wait, self.calls = found, wait, []

  async def search_many(self, requests):
    self.calls.append([(r.query, r.k) for r in requests])
    await asyncio.sleep(self.wait)
    return [
      a if isinstance(a, Exception) else tuple(map(passage, a))[: r.k]
      for r in requests
      for a in (self.found[r.query],)
    ]


class ByLength:
  """Scores a passage by its length plus that of the query."""

  def __init__(self, failure=None):
    self.failure = failure

  async def scores(self, asked):
    if isinstance(self.failure, types.RetrievalError):
      raise self.failure
    return [[len(query) + len(t) for t in texts] for query, texts in asked]

  def identity(self):
    return {"kind": "by length"}


GONE = types.RetrievalError("gone")


def passage(name):
  return types.Passage(name, f'"{name}"', "x" * len(name))


def ask(made, *queries, k=3):
  asked = [types.SearchRequest(query, k) for query in queries]
  return [
    a if isinstance(a, Exception) else [p.id for p in a]
    for a in asyncio.run(made.search_many(asked))
  ]


def test_retrievers_are_fused_by_reciprocal_ranks():
  one, other = Known({"q": ["a", "b", "c"]}), Known({"q": ["c", "d", "c"]})
  made = pipeline.fuse(one, other, k=5)
  # By hand: c 1/63 + 1/61, a 1/61, then b and d 1/62 in the order of lists.
  assert ask(made, "q", k=9) == [["c", "a", "b", "d"]]
  (found,) = asyncio.run(made.search_many([types.SearchRequest("q", 2)]))
  assert found[0].score == pytest.approx(1 / 63 + 1 / 61)
  assert one.calls == [[("q", 9)], [("q", 5)]]


def test_stages_follow_each_other():
  words = Known({"q": ["a", "bb", "ccc"], "r": ["dd", "e"], "s": GONE})
  made = pipeline.rerank(words, ByLength(), first=3)
  assert ask(made, "q", "r", "s", k=2) == [["ccc", "bb"], ["dd", "e"], GONE]
  (found,) = asyncio.run(made.search_many([types.SearchRequest("q", 1)]))
  assert [p.score for p in found] == [10.0]
  assert words.calls[0] == [("q", 3), ("r", 3), ("s", 3)]
  assert asyncio.run(made.search_many([])) == []
  assert made.identity() == {
    "kind": "reranked",
    "of": ["Known", {"kind": "by length"}],
    "first": 3,
  }


def test_a_stage_that_fails_fails_its_queries_alone_or_is_left_out():
  words, vectors = (
    Known({"q": ["a"], "r": ["b"]}),
    Known({"q": GONE, "r": ["c"]}),
  )
  assert ask(pipeline.fuse(words, vectors), "q", "r") == [GONE, ["b", "c"]]
  made = pipeline.fuse(words, pipeline.optional(vectors, deadline=9.0))
  assert ask(made, "q", "r") == [["a"], ["b", "c"]]
  assert made.counters == {"1/left_out": 1}
  # A reranker that fails leaves the order as it was.
  made = pipeline.optional(
    pipeline.rerank(words, ByLength(GONE)), deadline=9.0, instead=words
  )
  assert ask(made, "q", "r") == [["a"], ["b"]]
  assert made.counters["left_out"] == 2


def test_a_late_stage_is_left_out_and_a_bug_is_not():
  slow = Known({"q": ["a"]}, wait=60.0)
  assert ask(pipeline.optional(slow, deadline=0.05), "q") == [[]]
  (bug,) = ask(pipeline.optional(Known({}), deadline=9.0), "q")
  assert isinstance(bug, KeyError)


def test_a_late_search_takes_no_answers_from_others():
  class Alone:
    async def search(self, request):
      await asyncio.sleep(60.0 * (request.query == "slow"))
      return [passage(request.query)]

  made = pipeline.optional(Alone(), deadline=0.1)
  assert ask(made, "a", "slow", "b") == [["a"], [], ["b"]]
  assert made.counters["left_out"] == 1


OWN = """
from anysearch_jax import types
from anysearch_jax.retrieval import pipeline

class Echo:
  async def search(self, request):
    return [types.Passage("7", request.query, "text")]

def make(config):
  return pipeline.fuse(Echo(), Echo())

def nothing(config):
  return 3
"""


def test_a_run_searches_a_retriever_of_ones_own(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text(OWN)
  config = small_run.CONFIG
  c = dataclasses.replace(config.retrieval, kind=f"{path}:make")
  made = retrievers.make(dataclasses.replace(config, retrieval=c), None)
  assert ask(made, "q") == [["7"]]
  said = made.identity()["identity"]
  assert len(said["sha256"]) == 64 and said["of"]["kind"] == "fused"
  for name, words in (("gone", "no 'gone'"), ("nothing", "returned a int")):
    c = dataclasses.replace(config.retrieval, kind=f"{path}:{name}")
    with pytest.raises(ValueError, match=f"retrieval.kind.*{words}"):
      retrievers.make(dataclasses.replace(config, retrieval=c), None)


# Requests.


def test_a_fused_answer_holds_no_id_twice():
  lists = [types.Passage("7", "A", "iron")], [types.Passage("7", "B", "gold")]
  fused = pipeline.fuse(*(scripted.Retriever({"q": x}) for x in lists))
  batching = searching.BatchingRetriever(fused, config_lib.SearchConfig())
  answer = asyncio.run(batching.search(types.SearchRequest("q", 2)))
  assert [(p.id, p.text) for p in answer] == [("7", "iron"), ("7#2", "gold")]
