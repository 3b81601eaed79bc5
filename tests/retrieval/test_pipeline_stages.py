"""A pipeline's stages: fusion, order, deadlines, caches, what is left out."""

from __future__ import annotations

import asyncio
import collections
import json
import logging

import pytest

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.rollout import searching
from retrieval import requests as requests_lib
from retrieval.pipeline import pipeline, rerankers, spec, stages


class Known(requests_lib.OneByBatch):
  """A retriever with the passages of each query; counts its calls."""

  def __init__(self, found, wait=0.0):
    self.found, self.wait, self.calls = found, wait, []

  async def search_many(self, requests):
    self.calls.append([(r.query, r.k) for r in requests])
    await asyncio.sleep(self.wait)
    answers = [self.found[r.query] for r in requests]
    if any(isinstance(a, KeyError) for a in answers):
      raise answers[0]
    return [
      a if isinstance(a, Exception) else tuple(map(passage, a))[: r.k]
      for a, r in zip(answers, requests, strict=True)
    ]


class ByLength:
  """Scores a passage by its length plus the length of the query."""

  def __init__(self, failures=()):
    self.asked, self.failures = [], list(failures)

  def scores(self, pairs):
    import numpy as np

    self.asked.append(list(pairs))
    if self.failures:
      raise self.failures.pop(0)
    return np.asarray([len(q) + len(t) for q, t in pairs], np.float32)

  def identity(self):
    return {"kind": "by length"}


def passage(name):
  return types.Passage(name, f'"{name}"', "x" * len(name))


def stage(kind, name, **values):
  return spec.Stage(kind, {}, name, **{"keep": 10, **values})


def retrieve(retriever, name="words", **values):
  return stages.Retrieve(stage("retrieve", name, **values), retriever, name)


def rerank(model, **values):
  return stages.Rerank(
    stage("rerank", "rerank", **values), rerankers.LocalReranker(model)
  )


def ask(made, *queries, k=3):
  asked = [types.SearchRequest(query, k) for query in queries]
  return [
    a if isinstance(a, Exception) else [p.id for p in a]
    for a in asyncio.run(made.search_many(asked))
  ]


def test_stages_follow_each_other():
  words = Known({"q": ["a", "bb", "ccc"], "r": ["dd", "e"]})
  made = pipeline.PipelineRetriever(
    [
      retrieve(words, keep=3),
      rerank(ByLength(), keep=2),
      stages.Cut(spec.Stage("cut", {"score": 8.0}, "cut", 10)),
    ]
  )
  # Scores, by the lengths of query and contents: 6, 8, 10, and 8, 6.
  assert ask(made, "q", "r", "q") == [["ccc", "bb"], ["dd"], ["ccc", "bb"]]
  assert words.calls == [[("q", 3), ("r", 3)]]
  assert ask(made, "q", k=1) == [["ccc"]]
  (found,) = asyncio.run(made.search_many([types.SearchRequest("q", 2)]))
  assert [p.score for p in found] == [10.0, 8.0]
  assert asyncio.run(made.search_many([])) == []


def test_retrievers_are_fused_by_reciprocal_ranks():
  one = Known({"q": ["a", "b", "c"]})
  other = Known({"q": ["c", "d", "c"]})
  made = pipeline.PipelineRetriever([retrieve(one), retrieve(other, "vectors")])
  # By hand: c 1/63 + 1/61, a 1/61, then b and d 1/62 in the order of lists.
  assert ask(made, "q", k=9) == [["c", "a", "b", "d"]]
  (found,) = asyncio.run(made.search_many([types.SearchRequest("q", 2)]))
  assert found[0].score == pytest.approx(1 / 63 + 1 / 61)


def test_each_stage_keeps_its_results():
  words, model = Known({"q": ["a", "bb"], "r": ["bb"]}), ByLength()
  made = pipeline.PipelineRetriever([retrieve(words), rerank(model)])
  first = ask(made, "q")
  assert ask(made, "q", "r") == [*first, ["bb"]]
  assert words.calls == [[("q", 10)], [("r", 10)]]
  assert [len(pairs) for pairs in model.asked] == [2, 1]
  assert made.counters["words.cached"] == made.counters["rerank.cached"] == 1
  small = pipeline.PipelineRetriever([retrieve(words, cache=0)])
  ask(small, "q"), ask(small, "q")
  assert len(words.calls) == 4


def test_results_that_were_used_longest_ago_leave_the_cache():
  cache = stages.Cache(2)
  for key in "ab":
    cache.put(key, key)
  assert cache.get("a") == "a"
  cache.put("c", "c")
  assert [cache.get(key) for key in "abc"] == ["a", None, "c"]


def test_a_late_stage_fails_its_queries_by_name():
  words = Known({"q": ["a"]}, wait=5)
  made = pipeline.PipelineRetriever([retrieve(words, deadline=0.05)])
  (error,) = ask(made, "q")
  assert isinstance(error, types.RetrievalError)
  assert "'words'" in str(error) and "within 0.05 seconds" in str(error)
  with pytest.raises(types.RetrievalError, match="'words'"):
    asyncio.run(made.search(types.SearchRequest("q", 1)))
  assert made.counters["words.failures"] == 2


def test_a_query_that_fails_alone_fails_alone():
  words = Known({"q": ["a"], "bad": types.RetrievalError("refused")})
  model = ByLength()
  made = pipeline.PipelineRetriever([retrieve(words), rerank(model)])
  good, bad = ask(made, "q", "bad")
  assert good == ["a"] and str(bad) == "refused"
  assert len(model.asked) == 1
  # A failure is not kept.
  words.found["bad"] = ["b"]
  assert ask(made, "bad") == [["b"]]


def test_an_optional_retriever_is_left_out_and_counted(caplog):
  words = Known({"q": ["a", "b"]})
  vectors = Known({"q": types.RetrievalError("down")})
  made = pipeline.PipelineRetriever(
    [retrieve(words), retrieve(vectors, "vectors", optional=True)]
  )
  searcher = searching.BatchingRetriever(made, config_lib.SearchConfig())
  with caplog.at_level(logging.WARNING):
    found = asyncio.run(searcher.search(types.SearchRequest("q", 5)))
  assert [p.id for p in found] == ["a", "b"]
  assert "went on without its stage 'vectors'" in caplog.text
  assert searching.metrics(searcher.counters)["search/left_out"] == 1
  assert made.counters["vectors.left_out"] == 1
  # Nothing is left when all retrievers fail.
  words.found["q"] = types.RetrievalError("down too")
  alone = pipeline.PipelineRetriever(
    [retrieve(words, optional=True), retrieve(vectors, "v", optional=True)]
  )
  (error,) = ask(alone, "q")
  assert str(error) == "down too"


def test_an_optional_reranker_leaves_the_order_as_it_was():
  words = Known({"q": ["a", "bb"]})
  model = ByLength([types.RetrievalError("busy")])
  made = pipeline.PipelineRetriever(
    [retrieve(words), rerank(model, optional=True)]
  )
  assert ask(made, "q") == [["a", "bb"]]
  assert made.counters["left_out"] == made.counters["rerank.failures"] == 1
  # The next search has scores.
  assert ask(made, "q") == [["bb", "a"]]
  required = pipeline.PipelineRetriever(
    [retrieve(words), rerank(ByLength([types.RetrievalError("busy")]))]
  )
  (error,) = ask(required, "q")
  assert str(error) == "busy"


def test_what_the_parts_count_is_counted():
  words = Known({"q": ["a"]})
  words.counters = collections.Counter(cost=0.5)
  made = pipeline.PipelineRetriever([retrieve(words), rerank(ByLength())])
  searcher = searching.BatchingRetriever(made, config_lib.SearchConfig())
  words.counters["cost"] += 0.25
  asyncio.run(searcher.search(types.SearchRequest("q", 5)))
  found = searching.metrics(searcher.counters)
  assert found["search/source/words/cost"] == 0.25
  assert found["search/source/words.queries"] == 1


def test_a_bug_is_never_left_out():
  words = Known({"q": ["a"]})
  broken = Known({"q": KeyError("bug")})
  made = pipeline.PipelineRetriever(
    [retrieve(words), retrieve(broken, "broken", optional=True)]
  )
  with pytest.raises(KeyError):
    ask(made, "q")


def test_a_cut_limits_the_characters_of_an_answer():
  cut = stages.Cut(spec.Stage("cut", {"characters": 14}, "cut", 10))
  found = tuple(map(passage, ["a", "bb", "ccc"]))
  # 5 and 8 characters fit, the next 10 do not.
  assert [p.id for p in cut.kept(stages.Query("q"), found)] == ["a", "bb"]
  (long,) = cut.kept(stages.Query("q"), (types.Passage("l", "t", "y" * 50),))
  assert len(long.contents) == 14


def test_the_identity_is_of_all_stages():
  words = Known({})
  base = [retrieve(words), rerank(ByLength())]
  first = pipeline.PipelineRetriever(base).identity()
  assert json.loads(json.dumps(first)) == first
  others = [
    pipeline.PipelineRetriever(some).identity()
    for some in (
      base[:1],
      [retrieve(words, "vectors"), base[1]],
      [retrieve(words, keep=9), base[1]],
      [base[0], rerank(ByLength(), keep=9)],
      [*base, stages.Cut(spec.Stage("cut", {"score": 1.0}, "cut", 10))],
    )
  ]
  assert all(other != first for other in others)
  # Deadlines and caches change no answer.
  same = [retrieve(words, deadline=1.0, cache=1), base[1]]
  assert pipeline.PipelineRetriever(same).identity() == first


def test_a_request_for_no_passage_is_refused():
  made = pipeline.PipelineRetriever([retrieve(Known({"q": []}))])
  with pytest.raises(ValueError, match="k=0"):
    ask(made, "q", k=0)
  with pytest.raises(ValueError, match="begin with its retrievers"):
    pipeline.PipelineRetriever([rerank(ByLength())])
