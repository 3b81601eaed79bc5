"""A search of one request is a batch of one, and corpora have names."""

from __future__ import annotations

import asyncio

import pytest

from anysearch_jax import types
from retrieval import requests

PASSAGES = (types.Passage("1", "Paris", "a city", 2.0),)


class Fixed(requests.OneByBatch):
  """Gives every request the same answer."""

  def __init__(self, answer):
    self.answer, self.asked = answer, []

  async def search_many(self, requests):
    self.asked.append(list(requests))
    return [self.answer] * len(requests)


def test_a_search_is_a_batch_of_one():
  retriever = Fixed(PASSAGES)
  request = types.SearchRequest("capital of France", 3)
  assert isinstance(retriever, types.BatchRetriever)
  assert asyncio.run(retriever.search(request)) == PASSAGES
  assert retriever.asked == [[request]]


def test_the_exception_of_the_only_request_is_raised():
  retriever = Fixed(types.RetrievalError("no answer"))
  with pytest.raises(types.RetrievalError, match="no answer"):
    asyncio.run(retriever.search(types.SearchRequest("capital", 3)))


@pytest.mark.parametrize(
  "request_, words",
  [
    (types.SearchRequest("a", 0), "k=0, expected 1 or more"),
    (types.SearchRequest("a", 1, corpus="b"), "corpus 'b'; .* only 'wiki'"),
  ],
)
def test_invalid_requests_are_refused(request_, words):
  with pytest.raises(ValueError, match=words):
    requests.check([request_], "wiki")
