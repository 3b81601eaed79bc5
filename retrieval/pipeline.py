"""A pipeline is Python: functions of retrievers that return a retriever.

    both = pipeline.fuse(words, pipeline.optional(vectors, deadline=2.0))
    best = pipeline.rerank(both, ServedReranker(url), first=50)

A run names the last one as `--config.retrieval.kind=file.py:NAME`; see
examples/own_retriever.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from anysearch_jax import types
from anysearch_jax.host import counting
from anysearch_jax.retrieval import fusion
from anysearch_jax.retrieval import requests as requests_lib

Requests = Sequence[types.SearchRequest]
Answer = Sequence[types.Passage] | Exception


class _Stage(requests_lib.OneByBatch):
  """A retriever over others; their counters are under `0/`, `1/` and so on."""

  def __init__(
    self,
    kind: str,
    parts: Sequence[Any],
    search: Callable[[Requests], Awaitable[list[Answer]]],
    **settings: Any,
  ):
    self._identity = {"kind": kind} | settings
    self._parts = parts
    self._search = search
    self.own_counters: Counter[str] = Counter()

  async def search_many(self, requests: Requests) -> list[Answer]:
    return await self._search(requests)

  @property
  def counters(self) -> Counter[str]:
    return self.own_counters + counting.of_parts(dict(enumerate(self._parts)))

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the answers."""
    parts = [requests_lib.identity(part) for part in self._parts]
    return self._identity | {"of": parts}


def fuse(
  *retrievers: Any, k: int = 100, weights: Sequence[float] = ()
) -> types.BatchRetriever:
  """Returns a retriever that fuses others by reciprocal rank, or by scores.

  Passages with equal titles and texts are one; scores are the sums of
  1 / (60 + rank), https://doi.org/10.1145/1571941.1572114, or with weights
  those of the scores, each list's between 0 and 1. A search fails if one of the
  retrievers does.

  Args:
    retrievers: retrievers of any kind. Weights expect passages that were split
      in one way: a passage that one retriever lacks has no score of it.
    k: the number of passages that each retriever is asked for.
    weights: the weight of each retriever's scores; (): ranks, equally.

  Raises:
    ValueError: there are more or fewer weights than retrievers.
  """
  if weights and len(weights) != len(retrievers):
    raise ValueError(
      f"weights: found {len(weights)} weights for {len(retrievers)} "
      "retrievers, expected one of each."
    )

  async def search(requests: Requests) -> list[Answer]:
    answers = await asyncio.gather(
      *(_ask_for(retriever, requests, k) for retriever in retrievers)
    )
    return [
      _fused(answers_of_request, request.k, weights)
      for request, *answers_of_request in zip(requests, *answers)
    ]

  settings: dict[str, Any] = {"k": k}
  if weights:
    settings["weights"] = [*weights]
  return _Stage("fused", retrievers, search, **settings)


def rerank(
  retriever: Any, reranker: Any, *, first: int = 100
) -> types.BatchRetriever:
  """Returns a retriever that sorts another's passages by a reranker's scores.

  Args:
    retriever: finds the passages.
    reranker: an object with the methods of `served_reranker.ServedReranker`.
    first: the most passages of a query that are scored.
  """

  async def search(requests: Requests) -> list[Answer]:
    answers = [*await _ask_for(retriever, requests, first)]
    ranked = {
      i: x for i, x in enumerate(answers) if not isinstance(x, Exception)
    }
    replies = await reranker.scores(
      [(requests[i].query, [p.contents for p in x]) for i, x in ranked.items()]
    )
    for (i, passages), scores in zip(ranked.items(), replies, strict=True):
      if isinstance(scores, Exception):
        answers[i] = scores
      else:
        answers[i] = _best(zip(passages, scores), requests[i].k)
    return answers

  return _Stage("reranked", (retriever, reranker), search, first=first)


def optional(
  retriever: Any, *, deadline: float, instead: Any = None
) -> types.BatchRetriever:
  """Returns a retriever that uses `instead` if another one fails or is late.

  `counters["left_out"]` counts these searches; a run reports them.

  Args:
    retriever: the retriever that may fail.
    deadline: seconds that a search may take or, for a retriever that takes
      batches, a batch; waiting for a turn counts.
    instead: the retriever that answers instead; None: no passages are found.
  """

  async def answer_in_time(batch: Requests) -> Sequence[Answer]:
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(deadline):
        return await requests_lib.answers(retriever, batch)
    return [types.RetrievalError("It had no answer in time.")] * len(batch)

  async def search(requests: Requests) -> list[Answer]:
    takes_batches = hasattr(retriever, "search_many")
    batches = [requests] if takes_batches else [[x] for x in requests]
    batch_answers = await asyncio.gather(*map(answer_in_time, batches))
    answers = [*itertools.chain.from_iterable(batch_answers)]
    failed = [
      i for i, x in enumerate(answers) if isinstance(x, types.RetrievalError)
    ]
    stage.own_counters["left_out"] += len(failed)
    replacements: Sequence[Answer] = [()] * len(failed)
    if instead is not None and failed:
      failed_requests = [requests[i] for i in failed]
      replacements = await requests_lib.answers(instead, failed_requests)
    for i, answer in zip(failed, replacements, strict=True):
      answers[i] = answer
    return answers

  stage = _Stage("optional", (retriever, instead), search, deadline=deadline)
  return stage


async def _ask_for(
  retriever: Any, requests: Requests, k: int
) -> Sequence[Answer]:
  """Asks for at least k passages of each request."""
  larger = [dataclasses.replace(r, k=max(k, r.k)) for r in requests]
  return await requests_lib.answers(retriever, larger)


def _best(scored: Iterable[tuple[Any, float]], k: int) -> list[types.Passage]:
  """Returns the k passages with the best scores; equal ones keep order."""
  passages = [dataclasses.replace(p, score=float(s)) for p, s in scored]
  return sorted(passages, key=lambda p: -p.score)[:k]


def _fused(
  answers: Sequence[Answer], k: int, weights: Sequence[float]
) -> Answer:
  passages: dict[tuple[str, str], types.Passage] = {}
  rankings: list[dict[tuple[str, str], float]] = []
  for answer in answers:
    if isinstance(answer, Exception):
      return answer
    # A passage that a list has twice counts at its first place.
    distinct: dict[tuple[str, str], types.Passage] = {}
    for passage in answer:
      distinct.setdefault((passage.title, passage.text), passage)
    passages = distinct | passages
    ranking = {key: 1 / (61 + rank) for rank, key in enumerate(distinct)}
    if weights:
      ranking = fusion.scaled({key: p.score for key, p in distinct.items()})
    rankings.append(ranking)
  sums = fusion.added(rankings, weights or [1.0] * len(rankings))
  return _best(((passages[key], score) for key, score in sums.items()), k)
