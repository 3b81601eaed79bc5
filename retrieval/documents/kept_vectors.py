"""Vectors of passages that outlast an update of an index of documents.

    kept-384-3f0c2a9d41.vectors   by the width and the digest of the encoder:
                                  records of the SHA-256 of a passage and its
                                  float32 vector

An update appends the vectors as they are made, so one that is killed loses
those of its last call at most. The file goes when an index has its vectors; an
index of words keeps it, without the passages that are gone.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import numpy as np

from anysearch_jax.host import json_files
from anysearch_jax.retrieval import passages
from anysearch_jax.retrieval.index import building, search

_PATTERN = "kept-*.vectors"
# Passages of a call of the encoder: the most vectors that a kill loses.
_BATCH = 128


class KeptEncoder:
  """An encoder that makes the vector of a passage once.

  Args:
    encoder: makes the vectors.
    folder: folder of the index of documents.
    build: its newest build, whose vectors are taken if they are this encoder's.
  """

  def __init__(
    self, encoder: search.Encoder, folder: pathlib.Path, build: pathlib.Path
  ):
    self._encoder = encoder
    self.dim = encoder.dim
    self.queries = encoder.queries
    self.identity = encoder.identity
    self._file = _file(folder, {"dim": encoder.dim} | encoder.identity())
    self._vectors = {**_stored(build, self._file.name), **_read(self._file)}

  def complete(
    self, texts: Sequence[str], on_rows: Callable[[int, int], None]
  ) -> None:
    """Makes the vectors that are missing.

    Args:
      texts: the passages.
      on_rows: called with the number of vectors made, and of all to make.
    """
    missing = {_digest(text): text for text in texts}
    for digest in missing.keys() & self._vectors.keys():
      del missing[digest]
    digests = [*missing]
    kept_bytes = len(_read(self._file)) * _record(self._file).itemsize
    with self._file.open("ab") as records:
      records.truncate(kept_bytes)  # The last record of a killed update.
      for start in range(0, len(digests), _BATCH):
        batch = digests[start : start + _BATCH]
        vectors = self._encoder.passages([missing[digest] for digest in batch])
        new_vectors = dict(zip(batch, vectors, strict=True))
        _write(records, new_vectors)
        self._vectors |= new_vectors
        on_rows(start + len(batch), len(digests))

  def passages(self, texts: Sequence[str]) -> np.ndarray:
    """Returns the vectors of passages that are complete."""
    return np.array([self._vectors[_digest(text)] for text in texts])


def forget(folder: pathlib.Path) -> None:
  """Removes the vectors that an index has now."""
  for file in folder.glob(_PATTERN):
    file.unlink()


def keep(
  folder: pathlib.Path, build: pathlib.Path, texts: Sequence[str]
) -> None:
  """Keeps the known vectors of passages for an index that has none.

  Args:
    folder: folder of the index of documents.
    build: the build that is replaced.
    texts: the passages of the new one; the vectors of all others are removed.
  """
  digests = {*map(_digest, texts)}
  names = {file.name for file in folder.glob(_PATTERN)}
  identity = _identity(build)
  if identity is not None:
    names.add(_file(folder, identity["encoder"]).name)
  for name in names:
    vectors = {**_stored(build, name), **_read(folder / name)}
    surviving = {key: vectors[key] for key in vectors.keys() & digests}
    next_file = folder / f"{name}.next"
    with next_file.open("wb") as records:
      _write(records, surviving)
    next_file.replace(folder / name)


def _digest(text: str) -> bytes:
  return hashlib.sha256(text.encode()).digest()


def _file(folder: pathlib.Path, encoder: Mapping[str, Any]) -> pathlib.Path:
  """Returns the file for the vectors of an encoder."""
  identity = building.without_paths({"encoder": encoder})
  digest = json_files.sha256(identity)[:10]
  return folder / f"kept-{encoder['dim']}-{digest}.vectors"


def _record(file: pathlib.Path) -> np.dtype:
  dim = int(file.name.split("-")[1])
  return np.dtype([("digest", "V32"), ("vector", "<f4", (dim,))])


def _read(file: pathlib.Path) -> dict[bytes, np.ndarray]:
  """Returns the vectors of a file, of which the last may be incomplete."""
  record = _record(file)
  content = file.read_bytes() if file.is_file() else b""
  records = np.frombuffer(content, record, len(content) // record.itemsize)
  return {row["digest"].tobytes(): row["vector"] for row in records}


def _write(records: IO[bytes], vectors: Mapping[bytes, np.ndarray]) -> None:
  """Appends vectors to a file."""
  for digest, vector in vectors.items():
    records.write(digest + vector.astype("<f4").tobytes())
  records.flush()


def _identity(build: pathlib.Path) -> dict[str, Any] | None:
  """Returns the identity of a build with vectors, or None."""
  try:
    identity = json_files.read(build / building.BUILT)
    building.shards_of(build, identity)
  except (OSError, ValueError, LookupError, TypeError):  # Missing or damaged.
    return None
  return identity


def _stored(build: pathlib.Path, name: str) -> dict[bytes, np.ndarray]:
  """Returns the vectors of a build if they belong into the file of a name."""
  identity = _identity(build)
  if identity is None or _file(build, identity["encoder"]).name != name:
    return {}
  shards = building.shards_of(build, identity)
  if not all(map(shards.finished, range(len(shards)))):
    return {}
  texts = passages.Corpus(build / "corpus").contents(0, shards.count)
  vectors: dict[bytes, np.ndarray] = {}
  for shard in range(len(shards)):
    for row in shards.rows(shard):
      vectors[_digest(next(texts))] = row
  return vectors
