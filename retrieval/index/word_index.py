"""BM25 over a corpus, by the search library tantivy.

tantivy gets the terms of `analysis` and ranks by its BM25 (k1 1.2, b .75, and
lengths above 40 rounded to a byte, as Lucene rounds them).
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
from collections.abc import Iterable, Sequence
from concurrent import futures

import numpy as np
import tantivy

from anysearch_jax.host import disk, json_files
from anysearch_jax.retrieval import analysis
from anysearch_jax.retrieval.index import search as search_lib
from anysearch_jax.retrieval.index import vectors as vectors_lib

_INFO = "words.json"
_TERMS = "terms"
_ROW = "row"
# Bytes of postings in memory before they are written as a segment.
_MEMORY = 512 << 20
# Hits beyond k that are requested, to see whether some equal the k-th.
_EXTRA_HITS = 8
# The index stores the terms of the beginnings of its first texts, because
# another version of the stemmer would make other terms of them.
_SAMPLED_TEXTS = 64
_SAMPLED_CHARACTERS = 200


class WordIndex:
  """A `search.Index` over a folder that `write` made.

  Args:
    folder: the folder.

  Raises:
    vectors.DamagedError: a file is missing or not as it was written.
  """

  type = "BM25"

  def __init__(self, folder: str | os.PathLike):
    folder = pathlib.Path(folder)
    try:
      info = json_files.read(folder / _INFO)
      for name, sha256 in info["sha256"].items():
        if pathlib.PurePath(name).name != name:
          raise ValueError(f"{name!r} is not a file name")
        if disk.fingerprint(folder / name)["sha256"] != sha256:
          raise ValueError(f"{name} differs from what was written")
      self._analyzer = analysis.get_analyzer(info["language"])
      if any(self._analyzer(t) != terms for t, terms in info["sample"].items()):
        raise ValueError("the stemmer that built it is another version")
      index = tantivy.Index.open(str(folder))
      index.config_reader("manual")  # Else a thread watches the folder.
      self._searcher = index.searcher()
      self._schema = index.schema
      self.count = self._searcher.num_docs
      if self.count != info["count"]:
        raise ValueError(f"found {self.count} rows")
    except (OSError, ValueError, KeyError) as error:
      raise vectors_lib.DamagedError(
        f"{folder}: {error}; remove {folder.parent} and build it again."
      ) from error
    self._threads = futures.ThreadPoolExecutor(os.cpu_count(), "words")

  def search(self, queries: Sequence[str], k: int) -> list[search_lib.Hits]:
    """Returns rows that share a word with the query; see `search.Index`."""
    if len(queries) == 1:
      return [self._rank(queries[0], k)]
    return list(self._threads.map(lambda query: self._rank(query, k), queries))

  def _rank(self, query: str, k: int) -> search_lib.Hits:
    groups = self._analyzer.query(query)
    if not groups:
      return search_lib.NO_HITS
    any_term = tantivy.Query.boolean_query(
      [(tantivy.Occur.Should, self._group_query(group)) for group in groups]
    )
    limit = k + _EXTRA_HITS
    while True:
      limit = min(limit, self.count)
      hits = self._searcher.search(any_term, limit, count=False).hits
      # tantivy orders equal scores by segment. All hits with the k-th score are
      # needed to order them by row.
      if len(hits) < limit or limit == self.count:
        break
      if hits[-1][0] < hits[k - 1][0]:
        break
      limit *= 8
    addresses = [address for _, address in hits]
    values = self._searcher.fast_field_values(_ROW, addresses)
    rows = np.asarray(values, np.int64)
    scores = np.asarray([score for score, _ in hits], np.float32)
    best = np.lexsort((rows, -scores))[:k]
    return search_lib.Hits(rows[best], scores[best])

  def _group_query(self, group: Sequence[str]) -> tantivy.Query:
    """Returns a query whose score is that of the best term of a group."""
    queries = [
      tantivy.Query.term_query(self._schema, _TERMS, term, "freq")
      for term in group
    ]
    if len(queries) == 1:
      return queries[0]
    return tantivy.Query.disjunction_max_query(queries)


def write(
  folder: str | os.PathLike,
  texts: Iterable[str],
  *,
  language: str = analysis.DEFAULT,
) -> None:
  """Builds the index of all texts on disk, in constant memory.

  Args:
    folder: created if missing; complete only when this returns.
    texts: the texts in the order of rows.
    language: language of the texts, see `analysis.get_analyzer`.

  Raises:
    ValueError: no text contains a word, or the language is unknown.
  """
  analyzer = analysis.get_analyzer(language)
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  for stale_file in folder.iterdir():  # Of a builder that was killed.
    stale_file.unlink()
  # Terms are runs of letters: blanks separate them again.
  schema = (
    tantivy.SchemaBuilder()
    .add_text_field(_TERMS, tokenizer_name="whitespace", index_option="freq")
    .add_unsigned_field(_ROW, fast=True)
    .build()
  )
  index = tantivy.Index(schema, str(folder))
  # One thread: rows stay in their order, and segments are few.
  writer = index.writer(_MEMORY, num_threads=1)
  sample: dict[str, list[str]] = {}
  count = 0
  is_empty = True
  for count, text in enumerate(texts, start=1):
    if count <= _SAMPLED_TEXTS:
      beginning = text[:_SAMPLED_CHARACTERS]
      sample[beginning] = analyzer(beginning)
    terms = analyzer(text)
    is_empty = is_empty and not terms
    document = tantivy.Document()
    document.add_text(_TERMS, " ".join(terms))
    document.add_unsigned(_ROW, count - 1)
    writer.add_document(document)
  if is_empty:
    raise ValueError("Found no word in any passage, expected at least one.")
  writer.commit()
  writer.wait_merging_threads()
  for file in (".managed.json", "meta.json"):  # tantivy lets only us read them.
    (folder / file).chmod(0o644)
  files = sorted(p.name for p in folder.iterdir() if p.name[0] != ".")
  info = {
    "tantivy": importlib.metadata.version("tantivy"),
    "count": count,
    "language": language,
    "sample": sample,
    "sha256": {n: disk.fingerprint(folder / n)["sha256"] for n in files},
  }
  json_files.write(folder / _INFO, info)
