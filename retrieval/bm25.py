"""The plain words of a text, and how BM25 ranks texts in memory by them."""

from __future__ import annotations

import logging
import math
import re

import bm25s
import numpy as np

_WORD = re.compile(r"\w+")
# bm25s logs a line for every index that it builds.
logging.getLogger("bm25s").setLevel(logging.WARNING)


def words(text: str) -> list[str]:
  """Returns the runs of letters, digits and underscores, in lower case."""
  return _WORD.findall(text.lower())


def check(k1: float, b: float) -> None:
  """Refuses parameters with which BM25 does not rank.

  Raises:
    ValueError: `k1` is not a number of at least 0, or `b` not one of 0 to 1.
  """
  if not 0 <= k1 < math.inf:
    raise ValueError(f"k1: found {k1}, expected a number of at least 0.")
  if not 0 <= b <= 1:
    raise ValueError(f"b: found {b}, expected a number from 0 to 1.")


def rank(
  index: bm25s.BM25, query: str, k: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the best k rows that share a word with the query.

  Equal scores keep the order of rows, so that a run repeats to the byte.

  Returns:
    The rows, int64 `[n]`, best first, and their scores, float32 `[n]`.
  """
  known = [w for w in words(query) if w in index.vocab_dict]
  if not known:
    return np.zeros(0, np.int64), np.zeros(0, np.float32)
  return best(index.get_scores(known), k)


def best(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the best k rows with a score above 0, as `rank` does."""
  if k < len(scores):
    # Keep all ties at the k-th place, so that the sort below breaks them.
    least = np.partition(scores, -k)[-k]
    rows = np.flatnonzero(scores >= max(least, np.finfo(np.float32).tiny))
  else:
    rows = np.flatnonzero(scores > 0)
  rows = rows[np.argsort(-scores[rows], kind="stable")[:k]]
  return rows, scores[rows].astype(np.float32)
