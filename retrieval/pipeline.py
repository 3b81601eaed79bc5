"""A pipeline is Python: retrievers that ask others, in stages.

    from retrieval import pipeline
    from retrieval.served_reranker import ServedReranker

    words, vectors = ..., ...
    both = pipeline.fuse(words, pipeline.optional(vectors, deadline=2.0))
    best = pipeline.rerank(both, ServedReranker(url), first=50)

Each function returns a retriever, so they nest. A run names the last one as
`--config.retrieval.kind=file.py:NAME`; see examples/own_retriever.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from anysearch_jax import types
from anysearch_jax.host import counting
from retrieval import requests as requests_lib

Answer = Sequence[types.Passage] | Exception


class Reranker(Protocol):
  """Scores passages, such as `served_reranker.ServedReranker`."""

  async def scores(
    self, asked: Sequence[tuple[str, Sequence[str]]]
  ) -> Sequence[Sequence[float] | Exception]:
    """Returns a score for each text of each (query, texts), or an exception."""
    ...

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the scores."""
    ...


class _Stage(requests_lib.OneByBatch):
  """A retriever over others; `counters` has theirs, after their numbers."""

  def __init__(self, kind: str, *parts: Any, **settings: Any):
    self._kind, self._parts, self._settings = kind, parts, settings
    self._own: Counter[str] = Counter()

  @property
  def counters(self) -> Counter[str]:
    return self._own + Counter(
      {
        f"{i}/{name}": value
        for i, part in enumerate(self._parts)
        for name, value in counting.counters(part).items()
      }
    )

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the answers."""
    parts = [requests_lib.identity(part) for part in self._parts]
    return {"kind": self._kind, "of": parts} | self._settings


class _Fused(_Stage):
  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer]:
    k = self._settings["k"]
    asked = [dataclasses.replace(r, k=max(k, r.k)) for r in requests]
    found = await asyncio.gather(
      *(requests_lib.answers(part, asked) for part in self._parts)
    )
    return [
      _fused(answers, request.k)
      for answers, request in zip(
        zip(*found, strict=True), requests, strict=True
      )
    ]


class _Reranked(_Stage):
  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer]:
    retriever, reranker = self._parts
    first = self._settings["first"]
    found = await requests_lib.answers(
      retriever, [dataclasses.replace(r, k=max(first, r.k)) for r in requests]
    )
    out = list(found)
    kept = {
      i: some for i, some in enumerate(found) if not isinstance(some, Exception)
    }
    pairs = [
      (requests[i].query, [p.contents for p in some])
      for i, some in kept.items()
    ]
    try:
      scores = await reranker.scores(pairs)
    except types.RetrievalError as error:
      scores = [error] * len(kept)
    for i, some in zip(kept, scores, strict=True):
      if isinstance(some, Exception):
        out[i] = some
      else:
        scored = [
          dataclasses.replace(p, score=float(score))
          for p, score in zip(kept[i], some, strict=True)
        ]
        # Equal scores keep their order.
        out[i] = sorted(scored, key=lambda p: -p.score)[: requests[i].k]
    return out


class _Optional(_Stage):
  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer]:
    part, instead = self._parts
    late = types.RetrievalError("It had no answer in time.")
    found: Sequence[Answer] = [late] * len(requests)
    try:
      async with asyncio.timeout(self._settings["deadline"]):
        found = await requests_lib.answers(part, requests)
    except TimeoutError:
      pass
    out = list(found)
    left = [i for i, x in enumerate(out) if isinstance(x, types.RetrievalError)]
    self._own["left_out"] += len(left)
    if instead is None or not left:
      return [() if i in left else x for i, x in enumerate(out)]
    others = await requests_lib.answers(instead, [requests[i] for i in left])
    for i, answer in zip(left, others, strict=True):
      out[i] = answer
    return out


def fuse(*retrievers: Any, k: int = 100) -> types.BatchRetriever:
  """Returns a retriever that fuses others by reciprocal rank.

  Passages with equal titles and texts are one; scores are the sums of
  1 / (60 + rank), https://doi.org/10.1145/1571941.1572114. A search fails if
  one of the retrievers does.

  Args:
    retrievers: each is asked at the same time.
    k: passages that each is asked for.
  """
  return _Fused("fused", *retrievers, k=k)


def rerank(
  retriever: Any, reranker: Reranker, *, first: int = 100
) -> types.BatchRetriever:
  """Returns a retriever that sorts another's passages by a reranker's scores.

  Args:
    retriever: is asked for the `first` passages.
    reranker: scores them.
    first: the most passages of a query that are scored.
  """
  return _Reranked("reranked", retriever, reranker, first=first)


def optional(
  retriever: Any, *, deadline: float, instead: Any = None
) -> types.BatchRetriever:
  """Returns a retriever that may fail or be late: then `instead` answers.

  `counters["left_out"]` counts these searches; a run reports them.

  Args:
    retriever: is given `deadline` seconds.
    deadline: seconds of a batch of searches.
    instead: another retriever; None: there are no passages.
  """
  return _Optional("optional", retriever, instead, deadline=deadline)


def _fused(answers: Sequence[Answer], k: int) -> Answer:
  """Returns the best k passages of several answers; equal sums keep order."""
  sums: dict[tuple[str, str], float] = {}
  passages: dict[tuple[str, str], types.Passage] = {}
  for answer in answers:
    if isinstance(answer, Exception):
      return answer
    for rank, key in enumerate(
      dict.fromkeys((p.title, p.text) for p in answer)
    ):
      sums[key] = sums.get(key, 0.0) + 1 / (61 + rank)
    passages = {(p.title, p.text): p for p in reversed(answer)} | passages
  best = sorted(sums, key=lambda key: -sums[key])[:k]
  return [dataclasses.replace(passages[key], score=sums[key]) for key in best]
