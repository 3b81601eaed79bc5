r"""Writes vectors that Tevatron pickled as a FAISS file of exact search.

    python -m research.tevatron_vectors --corpus=CORPUS \
        --vectors='qwen3/corpus.shard*.pkl' --output=qwen3.index
    python -m launch.build_index --corpus=CORPUS --kind=flat \
        --encoder=ENCODER --vectors=qwen3.index --output=indexes/qwen3

Each pickle has an array `[n, dim]` and the ids of its rows. The file has a row
for each passage, in the order of the corpus. A pickle can name any function for
Python to call; here it is given NumPy's arrays and nothing else, in a process
that ends with the conversion. The project itself reads no pickle.
"""

from __future__ import annotations

import argparse
import glob
import pathlib
import pickle
import re
import tempfile
from collections.abc import Sequence
from typing import Any

import faiss
import numpy as np

from anysearch_jax.retrieval import passages

# What pickled arrays name, by NumPy 1 and 2.
_NAMED = re.compile(
  r"numpy\.(ndarray|dtype|_?core\.(multiarray\._reconstruct|numeric\._frombuffer))"
)


class _Made:
  """Keeps what a pickle asks NumPy to make, which would trust any address."""

  state: Any = None

  def __init__(self, *args: Any):
    self.args = args

  def __setstate__(self, state: Any) -> None:
    self.state = state

  def array(self) -> np.ndarray:
    if self.state is None:  # Since protocol 5.
      data, dtype, shape, order = self.args
    else:
      _, shape, dtype, fortran, data = self.state
      order = "F" if fortran else "C"
    read = np.frombuffer(data, dtype.state[1] + dtype.args[0])
    return read.reshape(shape, order=order)


class _Unpickler(pickle.Unpickler):
  def find_class(self, module: str, name: str) -> Any:
    if (module, name) == ("_codecs", "encode"):  # Bytes of old protocols.
      return lambda text, encoding: text.encode("latin1")
    if not _NAMED.fullmatch(f"{module}.{name}"):
      raise pickle.UnpicklingError(f"a call of {module}.{name}")
    return _Made


def unpickled(parts: Sequence[str], passage_ids: Sequence[str]) -> np.ndarray:
  """Reads pickled vectors.

  Args:
    parts: paths of the pickles; globs too.
    passage_ids: the ids of the passages, which the pickles may have in any
      order, and others besides.

  Returns:
    The vectors of these passages, float32 `[passages, dim]`.

  Raises:
    ValueError: a file is missing or another, or a passage has no vector.
  """
  paths = [path for part in parts for path in glob.glob(part) or [part]]
  arrays = []
  ids = []
  # A damaged pickle can raise almost any exception.
  try:
    for path in paths:
      with open(path, "rb") as file:
        array, names = _Unpickler(file).load()
      arrays.append(array.array())
      ids += [str(name) for name in names]
    vectors = np.concatenate(arrays).astype(np.float32)
    rows = dict(zip(ids, range(len(vectors)), strict=True))
    if len(rows) < len(ids) or not rows.keys() >= set(passage_ids):
      raise ValueError(f"{len(rows)} ids for {len(ids)} vectors")
  except Exception as error:
    raise ValueError(
      f"{', '.join(paths)}: found {error}; expected pickles of Tevatron: an "
      "array and the ids of its rows, with one vector for each passage."
    ) from error
  return vectors[[rows[name] for name in passage_ids]]


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--corpus", required=True, help="as of build_index")
  parser.add_argument(
    "--vectors", required=True, nargs="+", help="the pickles; globs too"
  )
  parser.add_argument(
    "--output", required=True, type=pathlib.Path, help="the FAISS file"
  )
  args = parser.parse_args(argv)
  with tempfile.TemporaryDirectory() as folder:
    corpus = passages.prepare(args.corpus, folder)
    passage_ids = [corpus[row].id for row in range(len(corpus))]
  vectors = unpickled(args.vectors, passage_ids)
  index = faiss.IndexFlatIP(vectors.shape[1])
  index.add(vectors)
  faiss.write_index(index, str(args.output))
  print(f"{args.output}: {index.ntotal} vectors of {index.d} numbers")


if __name__ == "__main__":
  main()
