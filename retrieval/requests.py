"""Requests of retrievers: a batch of one, and the checks of one corpus."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from anysearch_jax import types


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
    """Returns the answers in the order of the requests."""


def check(requests: Sequence[types.SearchRequest], corpus: str) -> None:
  """Refuses requests that a retriever of one corpus cannot answer.

  Raises:
    ValueError: a `k` is below 1, or a request names a corpus other than
      `corpus` and "".
  """
  for request in requests:
    if request.k < 1:
      raise ValueError(f"Found k={request.k}, expected 1 or more passages.")
    if request.corpus not in ("", corpus):
      raise ValueError(
        f"Found a search of corpus {request.corpus!r}; this retriever has "
        f"only {corpus!r}. Name that one in `corpus`, or use one retriever for "
        "each corpus."
      )
