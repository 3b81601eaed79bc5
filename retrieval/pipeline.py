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
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from anysearch_jax import types
from anysearch_jax.host import counting
from anysearch_jax.retrieval import requests as requests_lib

Requests = Sequence[types.SearchRequest]
Answer = Sequence[types.Passage] | Exception


class _Stage(requests_lib.OneByBatch):
  """A retriever over others; `counters` has theirs, after their numbers."""

  def __init__(
    self,
    kind: str,
    parts: Sequence[Any],
    search: Callable[[Requests], Awaitable[list[Answer]]],
    **settings: Any,
  ):
    self._identity = {"kind": kind} | settings
    self._parts, self._search = parts, search
    self.own: Counter[str] = Counter()

  async def search_many(self, requests: Requests) -> list[Answer]:
    return await self._search(requests)

  @property
  def counters(self) -> Counter[str]:
    return self.own + counting.of_parts(dict(enumerate(self._parts)))

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the answers."""
    parts = [requests_lib.identity(part) for part in self._parts]
    return self._identity | {"of": parts}


def fuse(*retrievers: Any, k: int = 100) -> types.BatchRetriever:
  """Returns a retriever that fuses others by reciprocal rank.

  Passages with equal titles and texts are one; scores are the sums of
  1 / (60 + rank), https://doi.org/10.1145/1571941.1572114. A search fails if
  one of the retrievers does.

  Args:
    k: passages that each is asked for.
  """

  async def search(requests: Requests) -> list[Answer]:
    lists = await asyncio.gather(*(_more(r, requests, k) for r in retrievers))
    return [_fused(some, r.k) for r, *some in zip(requests, *lists)]

  return _Stage("fused", retrievers, search, k=k)


def rerank(
  retriever: Any, reranker: Any, *, first: int = 100
) -> types.BatchRetriever:
  """Returns a retriever that sorts another's passages by a reranker's scores.

  Args:
    reranker: has the methods of `served_reranker.ServedReranker`.
    first: the most passages of a query that are scored.
  """

  async def search(requests: Requests) -> list[Answer]:
    out = [*await _more(retriever, requests, first)]
    kept = {i: x for i, x in enumerate(out) if not isinstance(x, Exception)}
    scores = await reranker.scores(
      [(requests[i].query, [p.contents for p in x]) for i, x in kept.items()]
    )
    for (i, found), some in zip(kept.items(), scores, strict=True):
      is_scored = not isinstance(some, Exception)
      out[i] = _best(zip(found, some), requests[i].k) if is_scored else some
    return out

  return _Stage("reranked", (retriever, reranker), search, first=first)


def optional(
  retriever: Any, *, deadline: float, instead: Any = None
) -> types.BatchRetriever:
  """Returns a retriever that may fail or be late: then `instead` answers.

  `counters["left_out"]` counts these searches; a run reports them.

  Args:
    deadline: seconds of a search or, if it is asked in batches, of a batch;
      waiting for a turn counts.
    instead: another retriever; None: there are no passages.
  """

  async def timely(some: Requests) -> Sequence[Answer]:
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(deadline):
        return await requests_lib.answers(retriever, some)
    return [types.RetrievalError("It had no answer in time.")] * len(some)

  async def search(requests: Requests) -> list[Answer]:
    is_one = hasattr(retriever, "search_many")
    parts = [requests] if is_one else [[each] for each in requests]
    found = await asyncio.gather(*map(timely, parts))
    out = [answer for some in found for answer in some]
    left = [i for i, x in enumerate(out) if isinstance(x, types.RetrievalError)]
    stage.own["left_out"] += len(left)
    others: Sequence[Answer] = [()] * len(left)
    if instead is not None and left:
      others = await requests_lib.answers(instead, [requests[i] for i in left])
    for i, answer in zip(left, others, strict=True):
      out[i] = answer
    return out

  stage = _Stage("optional", (retriever, instead), search, deadline=deadline)
  return stage


async def _more(retriever: Any, requests: Requests, k: int) -> Sequence[Answer]:
  """Asks for at least k passages."""
  asked = [dataclasses.replace(r, k=max(k, r.k)) for r in requests]
  return await requests_lib.answers(retriever, asked)


def _best(scored: Iterable[tuple[Any, float]], k: int) -> list[types.Passage]:
  """Returns the k passages with the best scores; equal ones keep order."""
  passages = [dataclasses.replace(p, score=float(s)) for p, s in scored]
  return sorted(passages, key=lambda p: -p.score)[:k]


def _fused(answers: Sequence[Answer], k: int) -> Answer:
  passages: dict[tuple[str, str], types.Passage] = {}
  sums: Counter[tuple[str, str]] = Counter()
  for answer in answers:
    if isinstance(answer, Exception):
      return answer
    keys = [(p.title, p.text) for p in answer]
    passages = dict(zip(reversed(keys), reversed(answer))) | passages
    # A passage that a list has twice counts at its first place.
    for rank, key in enumerate(dict.fromkeys(keys)):
      sums[key] += 1 / (61 + rank)  # type: ignore[assignment]  # A float.
  return _best(((passages[key], sums[key]) for key in sums), k)
