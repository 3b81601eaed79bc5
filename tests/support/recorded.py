"""A retriever to record, and recorders of it."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np

from anysearch_jax import types
from retrieval import recording as recording_lib

WHO = {"kind": "test", "corpus": "abc"}


def ask(query, k=3, corpus=""):
  return types.SearchRequest(query, k, corpus)


def truth(request, word="text"):
  """Returns the passages that `Source` finds, with float32 scores."""
  return tuple(
    types.Passage(
      f"{request.corpus}/{request.query}/{rank}",
      f'"{request.query}"',
      f"{word} {rank}",
      float(np.float32(1 / (rank + 3))),
    )
    for rank in range(request.k)
  )


class Source:
  """Answers by `truth`; queries with "bad" fail. `calls` has all requests."""

  def __init__(self, word="text"):
    self.calls, self.word = [], word

  async def search_many(self, requests):
    self.calls.append([request.query for request in requests])
    await asyncio.sleep(0)
    return [
      types.RetrievalError(f"No {request.query}.")
      if "bad" in request.query
      else truth(request, self.word)
      for request in requests
    ]


@contextlib.contextmanager
def recording(retriever, path, mode="record", identity=WHO):
  tested = recording_lib.Recorder(retriever, path, mode=mode, identity=identity)
  try:
    yield tested
  finally:
    tested.close()


def search(tested, *requests):
  return asyncio.run(tested.search_many(requests))
