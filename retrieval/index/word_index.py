"""BM25 over a corpus, in memory-mapped files."""

from __future__ import annotations

import array
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import bm25s
import numpy as np

from retrieval import analysis
from retrieval.index import search as search_lib
from retrieval.index import vectors as vectors_lib
from retrieval.index import word_ranking

_INFO = "words.json"
# Words that are held in memory and counted at a time.
_WORDS_AT_ONCE = 1 << 23
# The beginnings of this many texts are kept with their terms, in characters:
# another version of the stemmer would find other ones.
_SAMPLED, _BEGINNING = 64, 200


class WordIndex:
  """A `search.TextIndex` over a folder that `write` made.

  Args:
    folder: the folder.
    part: rows that may be found, see `word_ranking.WordRanking`.

  Raises:
    vectors.DamagedError: a file is missing or not as it was written.
  """

  type, metric = "BM25", "bm25"

  def __init__(
    self, folder: str | os.PathLike, part: tuple[int, int] | None = None
  ):
    folder = pathlib.Path(folder)
    try:
      info = json.loads((folder / _INFO).read_text())
      for name, sha256 in info["sha256"].items():
        if pathlib.PurePath(name).name != name:
          raise ValueError(f"{name!r} is not a file name")
        if vectors_lib.digest(folder / name) != sha256:
          raise ValueError(f"{name} differs from what was written")
      self.count = info["count"]
      index = bm25s.BM25.load(folder, mmap=True, load_vocab=True)
      # Indexes of earlier versions name no language.
      self.language = info.get("language", "plain")
      self._analyzer = analysis.shared(self.language)
      sample = info.get("sample", {})
      for text, terms in sample.items():
        found = self._analyzer(text)
        if found != terms:
          raise ValueError(
            f"found terms {sorted(set(found) - set(terms))}, the index was "
            f"built with {sorted(set(terms) - set(found))}; the stemmer is "
            "another version"
          )
    except (OSError, ValueError, KeyError) as error:
      raise vectors_lib.DamagedError(
        f"{folder}: {error}; run launch.build_index again."
      ) from error
    self._vocabulary = index.vocab_dict
    self._ranking = word_ranking.WordRanking(index.scores, part)

  def search(self, queries: Sequence[str], k: int) -> list[search_lib.Hits]:
    """Returns rows that share a word with the query; see `search.TextIndex`."""
    number = self._vocabulary.get
    found = []
    for query in queries:
      numbers = map(number, self._analyzer(query))
      words = [n for n in numbers if n is not None]
      found.append(self._ranking.rank(words, k))
    return found


def write(
  folder: str | os.PathLike,
  texts: Iterable[str],
  *,
  k1: float,
  b: float,
  language: str = analysis.DEFAULT,
) -> None:
  """Builds the index of all texts on disk, equal to the one that bm25s builds.

  bm25s needs all tokens in memory. Here memory holds the words of a block of
  texts, the vocabulary and four bytes for each text. The disk needs three times
  the size of the index.

  Args:
    folder: created if missing; complete only when this returns.
    texts: the texts in the order of rows.
    k1, b: saturation and length normalisation.
    language: language of the texts, one of `analysis.LANGUAGES`.

  Raises:
    ValueError: no text contains a word, or the language is unknown.
  """
  analyzer = analysis.shared(language)
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  index = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
  beside = folder / "spool"
  shutil.rmtree(beside, ignore_errors=True)  # Left by a killed builder.
  beside.mkdir()
  try:
    sample: dict[str, list[str]] = {}
    spool = _Spool(beside, _analyzed(texts, analyzer, sample))
    index.vocab_dict = spool.vocabulary
    index.scores = spool.scores(k1=k1, b=b)
    index.nonoccurrence_array = None
    index.save(folder)
  finally:
    shutil.rmtree(beside)
  files = sorted(p.name for p in folder.iterdir() if p.name != _INFO)
  info = {
    "count": len(spool.lengths),
    "language": language,
    "sample": sample,
    "sha256": {name: vectors_lib.digest(folder / name) for name in files},
  }
  (folder / _INFO).write_text(json.dumps(info, indent=2) + "\n")


def _analyzed(
  texts: Iterable[str],
  analyzer: analysis.Analyzer,
  sample: dict[str, list[str]],
) -> Iterator[list[str]]:
  """Yields the terms of each text; the sample gets the first ones."""
  for i, text in enumerate(texts):
    if i < _SAMPLED:
      sample[text[:_BEGINNING]] = analyzer(text[:_BEGINNING])
    yield analyzer(text)


class _Spool:
  """Counts of each word in each text, in files; the scores follow from them.

  Attributes:
    vocabulary: maps each word to its number.
    lengths: number of words of each text.
  """

  def __init__(self, folder: pathlib.Path, texts: Iterable[Iterable[str]]):
    self.vocabulary: dict[str, int] = {}
    self.lengths = array.array("i")
    self._folder = folder
    self._blocks = 0
    # Number of texts with each word, for the vocabulary so far.
    self._has = np.zeros(0, np.int64)
    numbers = array.array("i")
    number = self.vocabulary.setdefault
    begun = 0
    for text in texts:
      before = len(numbers)
      numbers.extend(number(w, len(self.vocabulary)) for w in text)
      self.lengths.append(len(numbers) - before)
      if len(numbers) >= _WORDS_AT_ONCE:
        self._write(numbers, begun)
        numbers, begun = array.array("i"), len(self.lengths)
    if not self.vocabulary:
      raise ValueError("Found no word in any passage, expected at least one.")
    self._write(numbers, begun)

  def _write(self, numbers: array.array, begun: int) -> None:
    """Writes a block: `[word, row, times]` of texts from `begun`, sorted."""
    lengths = np.asarray(self.lengths[begun:], np.int64)
    row = np.repeat(np.arange(len(lengths)), lengths)
    pair, times = np.unique(
      np.asarray(numbers, np.int64) * len(lengths) + row, return_counts=True
    )
    word, row = np.divmod(pair, len(lengths))
    block = np.stack([word, row + begun, times]).astype(np.int32)
    np.save(self._folder / f"{self._blocks}.npy", block)
    self._blocks += 1
    has = np.bincount(word, minlength=len(self.vocabulary))
    has[: len(self._has)] += self._has
    self._has = has

  def scores(self, *, k1: float, b: float) -> dict[str, Any]:
    """Returns bm25s's sparse matrix: each word's rows and their scores."""
    count = len(self.lengths)
    lengths = np.asarray(self.lengths, np.int32)
    idf = np.log(1 + (count - self._has + 0.5) / (self._has + 0.5))
    idf = idf.astype(np.float32)
    starts = np.concatenate([[0], np.cumsum(self._has)])
    scores, rows = (
      np.lib.format.open_memmap(
        self._folder / name, "w+", dtype=dtype, shape=(starts[-1],)
      )
      for name, dtype in (("scores", np.float32), ("rows", np.int32))
    )
    place = starts[:-1].copy()
    for i in range(self._blocks):
      word, row, times = np.load(self._folder / f"{i}.npy", mmap_mode="r")
      first = np.searchsorted(word, word)
      at = place[word] + np.arange(len(word)) - first
      norm = k1 * ((1 - b) + b * lengths[row] / lengths.mean())
      scores[at] = idf[word] * (times / (norm + times))
      rows[at] = row
      place += np.bincount(word, minlength=len(place))
    return {
      "data": scores,
      "indices": rows,
      "indptr": starts,
      "num_docs": count,
    }
