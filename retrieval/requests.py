"""Requests: a batch of one, checks, and how to ask a retriever of any kind."""

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
    """Returns the answer of `search_many`; raises it if it is an exception."""
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


async def by_k(
  requests: Sequence[types.SearchRequest],
  ask: Callable[[list[str], int], Awaitable[Sequence[T]]],
  *,
  most: int = sys.maxsize,
) -> list[T]:
  """Returns answers in the order of requests; those with equal `k` ask at once.

  Args:
    requests: any, also none; see `check`.
    ask: returns the answers to some queries with one `k`.
    most: the most queries of a call.
  """
  check(requests)
  rows: dict[int, list[int]] = {}
  for row, request in enumerate(requests):
    rows.setdefault(request.k, []).append(row)
  calls = [
    (k, some[at : at + most])
    for k, some in rows.items()
    for at in range(0, len(some), most)
  ]
  found = await asyncio.gather(
    *(ask([requests[row].query for row in some], k) for k, some in calls)
  )
  out: dict[int, T] = {}
  for (_, some), each in zip(calls, found, strict=True):
    out |= zip(some, each, strict=True)
  return [out[row] for row in range(len(requests))]


async def answers(
  retriever: Any, requests: Sequence[types.SearchRequest]
) -> Sequence[Sequence[types.Passage] | Exception]:
  """Asks a retriever in one batch, or by concurrent calls.

  Returns:
    For each request its passages, or what the retriever raised; a bug too, so
    that it loses no other answer.
  """
  if not hasattr(retriever, "search_many"):
    alone = map(retriever.search, requests)
    found = await asyncio.gather(*alone, return_exceptions=True)
    return cast("list[Sequence[types.Passage] | Exception]", found)
  try:
    found = await retriever.search_many(requests)
    if len(found) != len(requests):
      raise types.RetrievalError(
        f"Found {len(found)} answers to {len(requests)} queries, expected "
        "one for each."
      )
  except Exception as error:
    return [error] * len(requests)
  return found


def identity(part: Any) -> Any:
  """Returns the identity of a retriever; without one, the name of its class."""
  said = getattr(part, "identity", None)
  return said() if callable(said) else type(part).__name__
