"""Where the vectors of passages come from: an encoder, or a file with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from retrieval import passages
from retrieval.index import flat_file, search

# Passages that an encoder sorts by length at a time.
_TEXTS = 4096
# Passages that stand for a corpus, and the least cosine of equal vectors.
_SAMPLE, _SAME = 64, 0.98

# Yields the vectors of rows from the first to the second, exclusive.
Source = Callable[[int, int], Iterator[np.ndarray]]


def encoded(corpus: passages.Corpus, encoder: search.Encoder) -> Source:
  """Returns the vectors that an encoder makes of the passages."""

  def make(start: int, end: int) -> Iterator[np.ndarray]:
    for first in range(start, end, _TEXTS):
      last = min(first + _TEXTS, end)
      yield encoder.passages(list(corpus.contents(first, last)))

  return make


def read(
  corpus: passages.Corpus, encoder: search.Encoder, file: flat_file.FlatFile
) -> Source:
  """Returns the vectors of a file, after encoding a sample of its passages.

  Raises:
    ValueError: the file has other rows than the corpus, or the encoder makes
      other vectors of the sampled passages.
  """
  if (file.count, file.dim) != (len(corpus), encoder.dim):
    raise ValueError(
      f"vectors: found {file.count} rows of {file.dim}, expected {len(corpus)} "
      f"of {encoder.dim}, one row a passage, of the encoder's dimension."
    )
  rows = sample(len(corpus))
  made = encoder.passages([corpus[row].contents for row in rows])
  for row, vector in zip(rows, made, strict=True):
    (stored,) = next(file.rows(row, row + 1))
    cosine, length = float(stored @ vector), float(np.linalg.norm(stored))
    if not (cosine > _SAME and abs(length - 1) < 1 - _SAME):
      raise ValueError(
        f"vectors: found one of length {length:.3f} for row {row}, whose "
        f"cosine with the encoder's vector of that passage is {cosine:.3f}; "
        f"expected more than {_SAME}. The corpus or the encoder is another "
        "one, or vectors are not of unit length."
      )
  return file.rows


def sample(count: int) -> list[int]:
  """Returns up to 64 rows that are spread over `count` rows."""
  rows = np.linspace(0, count - 1, _SAMPLE).astype(int)
  return np.unique(rows).tolist()
