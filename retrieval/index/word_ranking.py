"""The best rows of BM25 without scoring every row: MaxScore over arrays.

A word cannot add more to a score than its largest entry. Words are read from
the rarest to the most frequent; as soon as the words that are left cannot lift
an unseen row among the best k, only rows that were seen are looked up. See
Turtle and Flood, https://doi.org/10.1016/0306-4573(95)00020-H

The result is that of scoring all rows: the same float32 sums in the query's
order of words, equal scores by ascending row.
"""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrieval.index import search as search_lib

# The first bound is the k-th best of 256 rows of each of the 3 rarest words.
_RAREST, _TRIED = 3, 256
# Of a longer list of rows the first ones are tried: selection would cost more.
_LONG = 50_000
# Float32 rounds each of n additions by up to 2**-24 of the sum; a bound and a
# score that are compared have each been rounded.
_ROUNDING = 2.0**-22


class WordRanking:
  """Ranks rows by a sparse matrix of words and rows; thread-safe.

  Args:
    scores: bm25s's matrix: `data`, float32 and positive, and `indices`, int32,
      ascending within a word, both `[entries]`; `indptr` `[words + 1]`, where
      each word begins; `num_docs`, the number of rows.
    part: the first row that may be found, and the row after the last; None:
      all rows. Scores are those of the whole.
  """

  def __init__(
    self, scores: Mapping[str, Any], part: tuple[int, int] | None = None
  ):
    self._part = part
    # Plain views: slices of a memory map cost ten times as much.
    self._data = np.asarray(scores["data"])
    self._rows = np.asarray(scores["indices"])
    self._starts = np.asarray(scores["indptr"])
    self._count = int(scores["num_docs"])
    self._largest = np.maximum.reduceat(self._data, self._starts[:-1])
    # Zeros of `[rows]`, one for each search that is under way.
    self._buffers: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()

  def rank(self, words: Sequence[int], k: int) -> search_lib.Hits:
    """Returns the best k rows that have a word of the query.

    Args:
      words: numbers of the query's words, repeated ones too.
      k: the most rows, >= 1.
    """
    if not words:
      return search_lib.Hits(np.zeros(0, np.int64), np.zeros(0, np.float32))
    rows = self._candidates(words, k)
    scores = np.zeros(len(rows), np.float32)
    for word in words:
      scores += self._of(word, rows)
    best = np.argsort(-scores, kind="stable")[:k]
    return search_lib.Hits(rows[best].astype(np.int64), scores[best])

  def _candidates(self, words: Sequence[int], k: int) -> np.ndarray:
    """Returns rows in ascending order, the best k and their ties among them."""
    times = Counter(words)
    order = sorted(times, key=self._length)
    slack = _ROUNDING * (len(words) + 4)
    # What the words from each on can add to a score, rounded up.
    rest = [0.0]
    for word in reversed(order):
      rest.append(rest[-1] + float(self._largest[word]) * times[word])
    rest = [(1 + slack) * value for value in reversed(rest)]
    floor = (1 - slack) * self._first_floor(order, times, k)
    rows: np.ndarray = np.zeros(0, np.int32)
    scores: np.ndarray = np.zeros(0, np.float32)
    for i, word in enumerate(order):
      floor = max(floor, (1 - slack) * _kth_at_least(scores, k))
      kept = np.flatnonzero(scores + np.float32(rest[i]) >= floor)
      rows, scores = rows[kept], scores[kept]
      if floor <= rest[i]:
        rows, scores = self._joined(rows, scores, word, times[word])
      else:
        scores = scores + self._of(word, rows) * np.float32(times[word])
    floor = max(floor, (1 - slack) * _kth_at_least(scores, k))
    return np.sort(rows[scores >= floor])

  def _first_floor(
    self, order: Sequence[int], times: Mapping[int, int], k: int
  ) -> float:
    """Returns a score that k rows reach; 0 if that many were not tried."""
    tried = max(_TRIED, 2 * k)
    pool = []
    for word in order[:_RAREST]:
      rows, data = self._entries(word)
      if tried < len(rows) <= _LONG:
        rows = rows[np.argpartition(data, -tried)[-tried:]]
      pool.append(rows[:tried])
    rows = np.unique(np.concatenate(pool))
    if len(rows) < k:
      return 0.0
    scores = np.zeros(len(rows), np.float32)
    for word in order:
      scores += self._of(word, rows) * np.float32(times[word])
    return float(np.partition(scores, -k)[-k])

  def _joined(
    self, rows: np.ndarray, scores: np.ndarray, word: int, times: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Adds a word to the scores of rows, and the rows that only it has."""
    more, data = self._entries(word)
    data = data * np.float32(times)
    if not len(rows):
      return more, data
    try:
      sums = self._buffers.get_nowait()
    except queue.Empty:
      sums = np.zeros(self._count, np.float32)
    sums[rows] = scores
    sums[more] += data
    scores = sums[rows]
    sums[rows] = 0
    sums_of_more = sums[more]
    new = np.flatnonzero(sums_of_more)
    sums[more] = 0
    self._buffers.put(sums)
    return (
      np.concatenate([rows, more[new]]),
      np.concatenate([scores, sums_of_more[new]]),
    )

  def _of(self, word: int, rows: np.ndarray) -> np.ndarray:
    """Returns what a word adds to the scores of rows, float32 `[n]`."""
    has, data = self._entries(word)
    if not len(has):
      return np.zeros(len(rows), np.float32)
    place = np.searchsorted(has, rows)
    place[place == len(has)] = 0
    return np.where(has[place] == rows, data[place], np.float32(0))

  def _entries(self, word: int) -> tuple[np.ndarray, np.ndarray]:
    here = slice(self._starts[word], self._starts[word + 1])
    rows, data = self._rows[here], self._data[here]
    if self._part is None:
      return rows, data
    here = slice(*np.searchsorted(rows, np.asarray(self._part, rows.dtype)))
    return rows[here], data[here]

  def _length(self, word: int) -> int:
    return self._starts[word + 1] - self._starts[word]


def _kth_at_least(scores: np.ndarray, k: int) -> float:
  """Returns a number that at least k scores reach; 0 for fewer scores.

  Of many scores, the k-th largest maximum of blocks: partitioning all of them
  would cost most of the search, for scores have many ties.
  """
  if len(scores) < k:
    return 0.0
  blocks = 16 * k
  if len(scores) > 8 * blocks:
    each = len(scores) // blocks
    scores = scores[: each * blocks].reshape(blocks, each).max(1)
  return float(np.partition(scores, -k)[-k])
