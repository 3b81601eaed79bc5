"""Search in a memory-mapped FAISS file of any kind that someone else built.

FAISS's own defaults read one list of an inverted file, and 16 candidates of a
graph, which finds little. `tune` chooses the smallest number that finds most of
what a search of the whole file finds. Ids are rows, or passages' own ids.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import faiss
import numpy as np

from retrieval import passages
from retrieval.index import search as search_lib
from retrieval.index import vectors as vectors_lib

# A search is good if it finds this share of the first 10 of the whole file.
LEAST, _K = 0.95, 10
_MOST_OF_GRAPHS = 4096


class FaissFile:
  """A `search.VectorIndex` over a FAISS file of any kind.

  Args:
    path: path of the file.
    rows: the row of each id, see `rows_of_ids`; None: ids are
      row numbers.

  Attributes:
    index: FAISS's index.

  Raises:
    vectors.DamagedError: FAISS cannot read the file.
    ValueError: the metric of the index is not the inner product.
  """

  def __init__(self, path: str | os.PathLike, rows: np.ndarray | None = None):
    self.index, self._rows = _open(pathlib.Path(path)), rows
    self.count, self.dim = self.index.ntotal, self.index.d
    self.type = type(self.index).__name__

  def search(self, vectors: np.ndarray, k: int) -> list[search_lib.Hits]:
    """See `search.VectorIndex`."""
    scores, ids = self.index.search(search_lib.checked(vectors, self.dim), k)
    if self._rows is not None and len(self._rows[0]):
      at = np.searchsorted(self._rows[0], ids)
      ids = np.where(ids >= 0, self._rows[1][at % len(self._rows[0])], -1)
    return _hits(scores, ids)


def _open(path: pathlib.Path) -> faiss.Index:
  try:
    index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
  except RuntimeError as error:
    reason = str(error).splitlines()[0]
    raise vectors_lib.DamagedError(
      f"{path}: FAISS cannot read it ({reason}); expected an index file. Run "
      "launch.build_index again, or copy the file again."
    ) from error
  if index.metric_type != faiss.METRIC_INNER_PRODUCT:
    raise ValueError(
      f"{path}: found an index of FAISS metric {index.metric_type}, expected "
      "inner products (metric 0); build it with METRIC_INNER_PRODUCT over unit "
      "vectors."
    )
  return index


def _hits(scores: np.ndarray, rows: np.ndarray) -> list[search_lib.Hits]:
  """Converts FAISS's results: no empty slots, equal scores by ascending row."""
  out = []
  for s, r in zip(scores, rows, strict=True):
    kept = np.flatnonzero((r >= 0) & np.isfinite(s))
    order = kept[np.lexsort((r[kept], -s[kept]))]
    out.append(
      search_lib.Hits(r[order].astype(np.int64), s[order].astype(np.float32))
    )
  return out


class Search(NamedTuple):
  """How an index is searched.

  Attributes:
    parameter: FAISS's name of it, `nprobe` or `efSearch`.
    value: lists, or candidates, that a search reads.
    recall: share of the first 10 hits of the whole file that are found.
  """

  parameter: str
  value: int
  recall: float


def parameter(index: Any) -> str:
  """Returns the name of an index's search parameter; "" if it has none."""
  if faiss.try_extract_index_ivf(index) is not None:
    return "nprobe"
  return "efSearch" if _graph(index) is not None else ""


def apply(index: Any, value: int) -> None:
  """Makes searches of an index read `value` lists or candidates.

  Raises:
    ValueError: the index has no such parameter.
  """
  ivf: Any = faiss.try_extract_index_ivf(index)
  graph = _graph(index)
  if ivf is not None:
    ivf.nprobe = min(value, ivf.nlist)
    lists = _graph(ivf.quantizer)
    if lists is not None:  # The graph that finds the lists.
      lists.hnsw.efSearch = max(lists.hnsw.efSearch, 2 * ivf.nprobe)
  elif graph is not None:
    graph.hnsw.efSearch = value
  else:
    raise ValueError(
      f"nprobe, ef_search: found {value} for a {type(index).__name__}, "
      "expected an index with inverted lists or a graph."
    )


def tune(index: Any, queries: np.ndarray, value: int = 0) -> Search:
  """Chooses how much a search reads, and measures what it finds.

  Args:
    index: an index with a search parameter; it is set.
    queries: vectors of typical queries, float32 `[Q, dim]`.
    value: the parameter; 0: the smallest power of two, or all, that finds .95
      of the first 10 hits of the whole file.
  """
  exact = _exact(index, queries)
  ivf: Any = faiss.try_extract_index_ivf(index)
  most = ivf.nlist if ivf is not None else _MOST_OF_GRAPHS
  tried = [value] if value else _powers(1 if ivf is not None else 16, most)
  for each in tried:
    apply(index, each)
    found = index.search(queries, _K)[1]
    recall = _recall(found, exact)
    if recall >= LEAST:
      break
  return Search(parameter(index), each, recall)


def rows_of_ids(index: Any, corpus: passages.Corpus) -> np.ndarray | None:
  """Returns the row of each id of an index, where ids are no row numbers.

  Returns:
    None if the ids are the numbers of the rows. Otherwise int64 `[2, count]`,
    the ids of the index in ascending order, and the row of each passage that
    has this id in the corpus.

  Raises:
    ValueError: an id is no passage's, or two are equal.
  """
  ids = _ids(index)
  if ids is None or np.array_equal(np.sort(ids), np.arange(len(corpus))):
    return None
  row_of: dict[str, int] = {}
  for row in range(len(corpus)):
    row_of[corpus[row].id] = row
  ids = np.sort(ids)
  rows = [row_of.pop(str(each), -1) for each in ids.tolist()]
  if -1 in rows:
    raise ValueError(
      f"faiss_file: found id {ids[rows.index(-1)]}, expected ids that are row "
      "numbers from 0, or the ids of the corpus, each once."
    )
  return np.stack([ids, np.asarray(rows, np.int64)])


def _graph(index: Any) -> Any:
  """Returns the HNSW graph in an index; None if there is none."""
  index = faiss.downcast_index(index)
  if isinstance(index, faiss.IndexIDMap | faiss.IndexPreTransform):
    return _graph(index.index)
  return index if isinstance(index, faiss.IndexHNSW) else None


def _exact(index: Any, queries: np.ndarray) -> np.ndarray:
  """Returns the ids of the best 10 of the whole file, int64 `[Q, 10]`."""
  ivf: Any = faiss.try_extract_index_ivf(index)
  if ivf is not None:
    apply(index, ivf.nlist)
    return index.search(queries, _K)[1]
  index = faiss.downcast_index(index)  # Read from a file, or part of one.
  if isinstance(index, faiss.IndexIDMap):
    found = _exact(index.index, queries)
    ids = faiss.vector_to_array(index.id_map)
    return np.where(found >= 0, ids[found], -1)
  if isinstance(index, faiss.IndexPreTransform):
    chain: Any = index.chain
    for i in range(chain.size()):
      queries = chain.at(i).apply(queries)
    return _exact(index.index, queries)
  return index.storage.search(queries, _K)[1]


def _recall(found: np.ndarray, exact: np.ndarray) -> float:
  shares = [
    len(set(f.tolist()) & set(e[e >= 0].tolist())) / max(1, (e >= 0).sum())
    for f, e in zip(found, exact, strict=True)
  ]
  return float(np.mean(shares))


def _ids(index: Any) -> np.ndarray | None:
  """Returns the ids that an index gives its rows; None if it has none."""
  if isinstance(index, faiss.IndexIDMap):
    return faiss.vector_to_array(index.id_map)
  ivf: Any = faiss.try_extract_index_ivf(index)
  if ivf is None:
    return None
  lists = ivf.invlists
  return np.concatenate(
    [
      faiss.rev_swig_ptr(lists.get_ids(i), lists.list_size(i)).copy()
      for i in range(ivf.nlist)
      if lists.list_size(i)
    ]
    or [np.zeros(0, np.int64)]
  )


def _powers(least: int, most: int) -> Sequence[int]:
  """Returns `least`, its doubles below `most`, and `most`."""
  out = []
  while least < most:
    out.append(least)
    least *= 2
  return [*out, most]
