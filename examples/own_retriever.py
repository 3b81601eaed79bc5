r"""Answers the searches by a retriever of your own, in a pipeline with BM25.

    python -m launch.evaluate --config=configs/quickstart.py --output=runs/own \
        --config.retrieval.kind=examples/own_retriever.py:best

A retriever is anything with `search`. It may also have `search_many`, which is
given the searches of many episodes at once: they are then asked in batches.
"""

from __future__ import annotations

import dataclasses

import anysearch_jax as aj


class WordOverlap:
  """Ranks the passages of a corpus by the words that a query has too."""

  def __init__(self, corpora):
    self._corpora = corpora  # Returns the passages of a corpus by its name.

  async def search(self, request: aj.SearchRequest) -> list[aj.Passage]:
    """Returns at most `request.k` passages, best first.

    Raises `aj.RetrievalError` if it cannot answer: the episode is then left
    out of training. Any other error is a bug, and ends the run.
    """
    query_words = set(request.query.split())
    scored = [
      dataclasses.replace(
        p, score=len(query_words & {p.title, *p.text.split()})
      )
      for p in self._corpora(request.corpus)
    ]
    best = sorted(scored, key=lambda passage: -passage.score)
    return [p for p in best[: request.k] if p.score > 0]


def best(config: aj.ExperimentConfig) -> aj.Retriever:
  """Returns the retriever that `retrieval.kind` names.

  It fuses the ranks of word overlap and of BM25.
  """
  world = aj.World()  # A retriever of yours opens its own documents.
  lexical = aj.LexicalRetriever(world.corpus, reads=world.searched)
  return aj.fuse(WordOverlap(world.corpus), lexical, k=5)
