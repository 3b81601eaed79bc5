"""Checks of the requests that clients of one corpus get."""

from __future__ import annotations

from collections.abc import Sequence

from anysearch_jax import types


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
