"""What the stages of a pipeline do with the passages of queries."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from anysearch_jax import types
from retrieval.index import fusion, search
from retrieval.pipeline import spec

Answer = tuple[types.Passage, ...]


class Query(NamedTuple):
  """A query and the corpus that it asks; "": the retriever's own."""

  text: str
  corpus: str = ""


class Stage(Protocol):
  """One stage; `before` are the passages that earlier stages found."""

  settings: spec.Stage
  part: Any  # The retriever or the reranker that it asks, or None.

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the stage's answers."""
    ...

  def kept(self, query: Query, before: Answer) -> Answer | None:
    """Returns the answer if nothing has to be asked for it, or None."""
    ...

  async def answers(
    self, queries: Sequence[Query], before: Sequence[Answer]
  ) -> Sequence[Answer | Exception]:
    """Returns the passages of each query, best first, or its exception.

    Raises:
      RetrievalError: no query can be answered.
    """
    ...


class Reranker(Protocol):
  """Scores the passages of queries."""

  async def scores(
    self, asked: Sequence[tuple[str, Sequence[str]]]
  ) -> Sequence[Sequence[float] | Exception]:
    """Returns a score for each text of each (query, texts), or an exception.

    Raises:
      RetrievalError: no query can be answered.
    """
    ...

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the scores."""
    ...


class Cache:
  """The last results by key; thread-safe. Size 0 keeps nothing."""

  def __init__(self, size: int):
    self._size = size
    self._lock = threading.Lock()
    self._kept: collections.OrderedDict[Hashable, Any] = (
      collections.OrderedDict()
    )

  def get(self, key: Hashable) -> Any:
    """Returns the result, or None."""
    with self._lock:
      found = self._kept.get(key)
      if found is not None:
        self._kept.move_to_end(key)
      return found

  def put(self, key: Hashable, result: Any) -> None:
    """Keeps a result in place of the one that was used longest ago."""
    with self._lock:
      self._kept[key] = result
      self._kept.move_to_end(key)
      while len(self._kept) > self._size:
        self._kept.popitem(last=False)


class Retrieve:
  """Asks a retriever for the first `keep` passages of each query.

  Args:
    settings: of the stage.
    retriever: answers many queries in one call.
    identity: identity of the retriever.
  """

  def __init__(
    self, settings: spec.Stage, retriever: types.BatchRetriever, identity: Any
  ):
    self.settings, self.part = settings, retriever
    self._identity = identity
    self._cache = Cache(settings.cache)

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the stage's answers."""
    return {"retrieve": self._identity, "keep": self.settings.keep}

  def kept(self, query: Query, before: Answer) -> Answer | None:
    """Returns the answer if the stage has it already."""
    del before
    return self._cache.get(query)

  async def answers(
    self, queries: Sequence[Query], before: Sequence[Answer]
  ) -> list[Answer | Exception]:
    """Returns the passages of each query, best first, or its exception."""
    del before
    keep = self.settings.keep
    found = await self.part.search_many(
      [types.SearchRequest(q.text, keep, q.corpus) for q in queries]
    )
    out: list[Answer | Exception] = []
    for query, some in zip(queries, found, strict=True):
      if not isinstance(some, Exception):
        some = tuple(some)[:keep]
        self._cache.put(query, some)
      out.append(some)
    return out


class Rerank:
  """Sorts the passages of each query by a reranker's scores, keeps the best.

  Equal scores keep their order. Scores of passages are cached one by one.

  Args:
    settings: of the stage.
    reranker: scores passages.
  """

  def __init__(self, settings: spec.Stage, reranker: Reranker):
    self.settings, self.part = settings, reranker
    self._cache = Cache(settings.cache)

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the stage's answers."""
    return {"rerank": self.part.identity(), "keep": self.settings.keep}

  def kept(self, query: Query, before: Answer) -> Answer | None:
    """Returns the answer if all its passages have scores already."""
    scores = [self._cache.get(_pair(query.text, p.contents)) for p in before]
    if any(score is None for score in scores):
      return None
    return self._sorted(before, scores)

  async def answers(
    self, queries: Sequence[Query], before: Sequence[Answer]
  ) -> list[Answer | Exception]:
    """Returns the passages of each query, best first, or its exception."""
    keys = [
      [_pair(query.text, p.contents) for p in some]
      for query, some in zip(queries, before, strict=True)
    ]
    scores = [[self._cache.get(key) for key in some] for some in keys]
    missing = [
      [i for i, score in enumerate(some) if score is None] for some in scores
    ]
    asked = [
      (query.text, [some[i].contents for i in left])
      for query, some, left in zip(queries, before, missing, strict=True)
    ]
    found = await self.part.scores(asked)
    out: list[Answer | Exception] = []
    for place, some in enumerate(found):
      if isinstance(some, Exception):
        out.append(some)
        continue
      for i, score in zip(missing[place], some, strict=True):
        scores[place][i] = float(score)
        self._cache.put(keys[place][i], float(score))
      out.append(self._sorted(before[place], scores[place]))
    return out

  def _sorted(self, passages: Answer, scores: Sequence[float]) -> Answer:
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return tuple(
      _scored(passages[i], scores[i]) for i in order[: self.settings.keep]
    )


class Cut:
  """Keeps the first passages, as far as their scores and their length allow.

  Args:
    settings: of the stage; its options are `score`, the lowest score of a
      passage, and `characters`, the most of an answer's titles and texts. The
      first passage is cut to them; a further one that does not fit is left out,
      and all after it.
  """

  def __init__(self, settings: spec.Stage):
    self.settings, self.part = settings, None
    self._score = float(settings.options.get("score", -math.inf))
    self._most = int(settings.options.get("characters", 0))

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the stage's answers."""
    return {"cut": dict(self.settings.options), "keep": self.settings.keep}

  def kept(self, query: Query, before: Answer) -> Answer:
    """Returns the answer, for which nothing has to be asked."""
    del query
    out: list[types.Passage] = []
    left = self._most
    for passage in before[: self.settings.keep]:
      if passage.score < self._score:
        continue
      if self._most:
        size = len(passage.contents)
        if size > left and out:
          break
        passage = dataclasses.replace(
          passage,
          title=passage.title[:left],
          text=passage.text[: max(0, left - len(passage.title) - 1)],
        )
        left -= size
      out.append(passage)
    return tuple(out)

  async def answers(
    self, queries: Sequence[Query], before: Sequence[Answer]
  ) -> list[Answer | Exception]:
    """See `Stage`."""
    return [self.kept(*pair) for pair in zip(queries, before, strict=True)]


def fuse(answers: Sequence[Answer], k: int) -> Answer:
  """Returns the best k passages of several answers by reciprocal rank fusion.

  Passages with equal titles and texts are one. Scores are the sums of
  reciprocal ranks; equal sums are in the order of the answers.
  """
  rows: dict[tuple[str, str], int] = {}
  passages: list[types.Passage] = []
  hits = []
  for answer in answers:
    found: dict[int, None] = {}
    for passage in answer:
      row = rows.setdefault((passage.title, passage.text), len(passages))
      if row == len(passages):
        passages.append(passage)
      found[row] = None
    each = np.fromiter(found, np.int64, len(found))
    hits.append(search.Hits(each, np.zeros(len(found), np.float32)))
  best = fusion.fuse(hits, k)
  return tuple(
    _scored(passages[row], score)
    for row, score in zip(best.rows.tolist(), best.scores.tolist(), strict=True)
  )


def _scored(p: types.Passage, score: float) -> types.Passage:
  """Returns a passage with another score, faster than `dataclasses.replace`."""
  return types.Passage(p.id, p.title, p.text, score)


def _pair(query: str, text: str) -> bytes:
  """Returns the key of a score, small because there are many."""
  head = f"{len(query)} {query}".encode(errors="surrogatepass")
  return hashlib.blake2b(
    head + text.encode(errors="surrogatepass"), digest_size=16
  ).digest()
