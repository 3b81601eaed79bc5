"""Checks requests, and asks retrievers of any kind for their answers."""

from __future__ import annotations

import abc
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

from anysearch_jax import types

T = TypeVar("T")


class OneByBatch(abc.ABC):
  """A `types.BatchRetriever` whose `search` is a batch of one request."""

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Returns the one answer of `search_many`, or raises it if it failed."""
    (answer,) = await self.search_many([request])
    if isinstance(answer, Exception):
      raise answer
    return answer

  @abc.abstractmethod
  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> Sequence[Sequence[types.Passage] | Exception]:
    """Returns the answers in the order of the requests.

    Raises:
      ValueError: a request is invalid, see `check`.
    """


def check(requests: Sequence[types.SearchRequest]) -> None:
  """Refuses requests that a retriever of one corpus cannot answer.

  Raises:
    ValueError: a `k` is below 1, or a request names a corpus.
  """
  for request in requests:
    if request.k < 1:
      raise ValueError(f"Found k={request.k}, expected 1 or more passages.")
    if request.corpus:
      raise ValueError(
        f"Found a search of corpus {request.corpus!r}; this retriever has one "
        "corpus, without a name. Use one retriever for each corpus."
      )


async def ask_by_k(
  requests: Sequence[types.SearchRequest],
  ask: Callable[[list[str], int], Awaitable[Sequence[T]]],
  *,
  batch: int = sys.maxsize,
) -> list[T]:
  """Answers requests in their order, those with equal `k` in common calls.

  Args:
    requests: any number of requests, also none; see `check`.
    ask: returns the answers to a list of queries with one `k`.
    batch: the most queries of a call.

  Raises:
    ValueError: a request is invalid.
  """
  check(requests)
  rows_by_k: dict[int, list[int]] = {}
  for row, request in enumerate(requests):
    rows_by_k.setdefault(request.k, []).append(row)
  calls = [
    (k, rows[start : start + batch])
    for k, rows in rows_by_k.items()
    for start in range(0, len(rows), batch)
  ]
  answers_by_call = await asyncio.gather(
    *(ask([requests[row].query for row in rows], k) for k, rows in calls)
  )
  answer_by_row: dict[int, T] = {}
  for (_, rows), call_answers in zip(calls, answers_by_call, strict=True):
    answer_by_row |= zip(rows, call_answers, strict=True)
  return [answer_by_row[row] for row in range(len(requests))]


async def answers(
  retriever: Any, requests: Sequence[types.SearchRequest]
) -> Sequence[Sequence[types.Passage] | Exception]:
  """Asks a retriever in one batch, or by concurrent calls.

  Returns:
    For each request its passages, or the exception that the retriever raised:
    also one from a bug, so that the other answers are kept.
  """
  if not hasattr(retriever, "search_many"):
    searches = map(retriever.search, requests)
    replies = await asyncio.gather(*searches, return_exceptions=True)
    return cast("list[Sequence[types.Passage] | Exception]", replies)
  try:
    replies = await retriever.search_many(requests)
    if len(replies) != len(requests):
      raise types.RetrievalError(
        f"Found {len(replies)} answers to {len(requests)} queries, expected "
        "one for each."
      )
  except Exception as error:
    return [error] * len(requests)
  return replies


def identity(part: Any) -> Any:
  """Returns the identity of a retriever; without one, the name of its class."""
  method = getattr(part, "identity", None)
  return method() if callable(method) else type(part).__name__
