"""Builds an index in a folder that describes itself.

    build.json   corpus, encoder and settings; a resumed build must have the
                 same ones
    corpus/      the prepared corpus, see `passages`
    vectors/     the encoder's vectors, see `vectors`
    words/       the index of BM25, see `word_index`
    index.json   the identity of the finished index, written last

Several processes may build one folder: each encodes its share of the shards,
and a process that finds all shards written finishes the index. A builder that
was killed resumes with its first unfinished shard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from anysearch_jax.config import settings as config_settings
from anysearch_jax.host import disk, json_files, run_lock
from anysearch_jax.retrieval import analysis, passages
from anysearch_jax.retrieval.index import search, vectors

KINDS = ("bm25", "flat", "hybrid", "faiss_file")
# The kinds with an index of words, and with vectors in shards.
_WORDS = ("bm25", "hybrid")
_VECTORS = ("flat", "hybrid")
BUILT = "index.json"
BEGUN = "build.json"
# Names the folder of the newest of several builds, see `documents.folder`.
CURRENT = "current.json"
# The most bytes of an index of words for each byte of its corpus.
_WORD_INDEX_SHARE = 0.25
_PATIENCE = 6 * 3600.0  # Seconds to wait for another builder's lock.


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of an index.

  Attributes:
    kind: `bm25`; `flat`, exact search over an encoder's vectors; `hybrid`,
      both, fused; `faiss_file`, an existing index file with its encoder.
    dtype: dtype of the encoder's vectors, one of `vectors.DTYPES`.
    language: language of the passages for BM25, see `analysis.get_analyzer`.
    faiss_file: the file of kind `faiss_file`; its ids are rows of the corpus.
    search: lists (`nprobe`) or candidates (`efSearch`) that a search of
      `faiss_file` reads; 0 means 64 lists or 256 candidates.
    vectors: the file of an IndexFlatIP whose row i is the vector of passage i;
      "": the encoder makes the vectors.
    shard: rows of a shard; a stopped build loses at most one shard's vectors.
    skip_malformed: whether to skip lines that are not a passage.
  """

  kind: str
  dtype: str = "float32"
  language: str = "english"
  faiss_file: str = ""
  search: int = 0
  vectors: str = ""
  shard: int = 65536
  skip_malformed: bool = False


class OtherIndexError(ValueError):
  """The folder contains an index, or a begun one, of other settings."""


def build(
  source: str | os.PathLike,
  folder: str | os.PathLike,
  settings: Settings,
  *,
  encoder: search.Encoder | None = None,
  process: int = 0,
  processes: int = 1,
  on_bytes: Callable[[int], None] = lambda done: None,
  on_rows: Callable[[int, int], None] = lambda done, total: None,
  on_plan: Callable[[str], None] = lambda line: None,
) -> bool:
  """Builds an index, or resumes building it.

  Args:
    source: the corpus, see `passages.prepare`.
    folder: folder of the index; created if missing.
    settings: settings of the index.
    encoder: encoder of passages; required for all kinds except `bm25`.
    process: number of this process, from 0.
    processes: number of processes that build together.
    on_bytes: called with the number of bytes of the corpus read so far.
    on_rows: called with the number of rows that this process has encoded, and
      of all its rows.
    on_plan: called with a line about the size of the index, before it is built.

  Returns:
    Whether the index is finished; False if other processes still encode.

  Raises:
    OtherIndexError: the folder has another corpus, encoder or setting.
    ValueError: the settings are invalid, the corpus cannot be read, or the disk
      has too little space.
  """
  _validate(settings, encoder, process, processes)
  folder = pathlib.Path(folder)
  if (folder / CURRENT).is_file():
    raise OtherIndexError(
      f"{folder}: found an index of documents, expected one of a corpus; name "
      "another folder."
    )
  folder.mkdir(parents=True, exist_ok=True)
  with locked(folder):
    corpus = passages.prepare(
      source,
      folder / "corpus",
      skip_malformed=settings.skip_malformed,
      on_bytes=on_bytes,
    )
    identity = _identity(corpus, settings, encoder)
    _claim(folder, identity)
  if (folder / BUILT).is_file():
    return True
  if settings.kind in _WORDS:
    on_plan(_size_line(folder, corpus, None))
  if encoder is not None and settings.kind in _VECTORS:
    shards = shards_of(folder, identity)
    on_plan(_size_line(folder, corpus, shards))
    if settings.vectors:
      vector_source = _open_file(settings, corpus, encoder)[0].stored
    else:
      vector_source = vectors.from_encoder(corpus, encoder)
    _write_shards(
      shards,
      vector_source,
      process=process,
      processes=processes,
      on_rows=on_rows,
    )
    if not all(map(shards.written, range(len(shards)))):
      return False
  with locked(folder):
    if not (folder / BUILT).is_file():
      if settings.kind in _WORDS:
        from anysearch_jax.retrieval.index import word_index

        texts = corpus.contents(0, len(corpus))
        word_index.write(folder / "words", texts, language=settings.language)
      if encoder is not None and settings.kind == "faiss_file":
        parameter = _open_file(settings, corpus, encoder)[1]
        if parameter:
          identity = _hashed(identity | {"search": parameter})
      json_files.write(folder / BUILT, identity)
  return True


def _size_line(
  folder: pathlib.Path, corpus: passages.Corpus, shards: vectors.Shards | None
) -> str:
  """Returns a line about the size of the index.

  Raises:
    ValueError: the disk has too little space.
  """
  if shards is None:
    size = _WORD_INDEX_SHARE * corpus.info["bytes"]
    unwritten = 2 * size  # Segments are merged into new ones.
  else:
    row_bytes = shards.dim * (4 if shards.dtype == "float32" else 2)
    spans = [
      shards.span(i) for i in range(len(shards)) if not shards.written(i)
    ]
    size = len(corpus) * row_bytes
    unwritten = sum(end - start for start, end in spans) * row_bytes
  free = shutil.disk_usage(folder).free
  line = (
    f"{folder}: the index takes {size / 1e9:.1f} GB, which searches need in "
    f"memory to be fast; {unwritten / 1e9:.1f} GB are to be written"
  )
  if unwritten > free:
    raise ValueError(
      f"{line}, found {free / 1e9:.1f} GB free; expected more. Free some, or "
      "name a folder on another disk; --dtype=bfloat16 halves vectors."
    )
  return line


def newest_build(folder: str | os.PathLike) -> pathlib.Path:
  """Returns the folder of the newest of several builds, or this folder."""
  folder = pathlib.Path(folder)
  try:
    # The file may be a stranger's: only a part of this folder is opened.
    builds = {path.name: path for path in folder.iterdir()}
    return builds[json_files.read(folder / CURRENT)["build"]]
  except (OSError, ValueError, LookupError, TypeError):  # Missing or damaged.
    return folder


def shards_of(
  folder: str | os.PathLike, identity: dict[str, Any]
) -> vectors.Shards:
  """Returns the vectors of an index with this identity."""
  return vectors.Shards(
    pathlib.Path(folder) / "vectors",
    count=identity["corpus"]["passages"],
    rows_per_shard=identity["shard"],
    dim=identity["encoder"]["dim"],
    dtype=identity["dtype"],
  )


def _validate(
  settings: Settings,
  encoder: search.Encoder | None,
  process: int,
  processes: int,
) -> None:
  kind = settings.kind
  config_settings.require("kind", kind, KINDS)
  if (encoder is None) != (kind == "bm25"):
    raise ValueError(
      f"encoder: found {'none' if encoder is None else 'one'} for kind "
      f"{kind}, expected {'one' if encoder is None else 'none'}."
    )
  if kind == "faiss_file" and not settings.faiss_file:
    raise ValueError("faiss_file: found nothing, expected the index's file.")
  for name, kind_with_setting in (
    ("faiss_file", "faiss_file"),
    ("search", "faiss_file"),
    ("vectors", "flat"),
  ):
    value = getattr(settings, name)
    if value and kind != kind_with_setting:
      raise ValueError(
        f"{name}: found {value} for kind {kind}, expected it for kind "
        f"{kind_with_setting} only."
      )
  if kind in _WORDS:
    analysis.get_analyzer(settings.language)
  if settings.shard < 1 or not 0 <= process < processes:
    raise ValueError(
      f"Found shards of {settings.shard} rows and process {process} of "
      f"{processes}; expected at least 1, and a process from 0."
    )


def _identity(
  corpus: passages.Corpus, settings: Settings, encoder: search.Encoder | None
) -> dict[str, Any]:
  """Returns JSON values that identify the answers, and their hash."""
  values: dict[str, Any] = {
    "kind": settings.kind,
    "corpus": {"sha256": corpus.sha256, "passages": len(corpus)},
  }
  if settings.kind in _WORDS:
    values |= {"ranking": "tantivy", "language": settings.language}
  if encoder is not None:
    values["encoder"] = {"dim": encoder.dim} | encoder.identity()
  if settings.kind == "faiss_file":
    values["file"] = _identity_of_file("faiss_file", settings.faiss_file)
  elif encoder is not None:
    values |= {"dtype": settings.dtype, "shard": settings.shard}
    if settings.vectors:
      file = _identity_of_file("vectors", settings.vectors)
      values["vectors"] = {k: v for k, v in file.items() if k != "path"}
  if settings.search:
    values["search"] = settings.search
  return _hashed(values)


def _identity_of_file(setting: str, name: str) -> dict[str, Any]:
  """Returns the path and the hash of a file that a setting names."""
  file = pathlib.Path(name).absolute()
  if not file.is_file():
    raise ValueError(f"{setting}: found no file {file}.")
  return {"path": str(file), **disk.fingerprint(file)}


def _hashed(values: dict[str, Any]) -> dict[str, Any]:
  """Returns an identity with the hash of all of its other values."""
  values = {k: v for k, v in values.items() if k != "sha256"}
  return values | {"sha256": json_files.sha256(without_paths(values))}


def without_paths(identity: dict[str, Any]) -> dict[str, Any]:
  """Returns an identity without paths, which may change or be private."""
  cleaned = dict(identity)
  for name, key in (("encoder", "folder"), ("file", "path")):
    if name in cleaned:
      cleaned[name] = {k: v for k, v in cleaned[name].items() if k != key}
  return cleaned


def _claim(folder: pathlib.Path, identity: dict[str, Any]) -> None:
  """Claims the folder for an index, or checks that it is for the same one."""
  path = folder / BEGUN
  if not path.is_file():
    json_files.write(path, identity)
    return
  begun = without_paths(json_files.read(path))
  identity = without_paths(identity)
  for name in [*identity, *begun]:
    if begun.get(name) != identity.get(name):
      raise OtherIndexError(
        f"{folder}: the build was begun with {name} {begun.get(name)}, and the "
        f"command now has {identity.get(name)}; name another folder, or remove "
        "this one."
      )


def _write_shards(
  shards: vectors.Shards,
  vector_source: vectors.Source,
  *,
  process: int,
  processes: int,
  on_rows: Callable[[int, int], None],
) -> None:
  """Writes the shards of this process that are not finished."""
  shard_numbers = range(process, len(shards), processes)
  total = sum(end - start for start, end in map(shards.span, shard_numbers))
  done = 0

  def counted(start: int, end: int) -> Iterator[np.ndarray]:
    nonlocal done
    for block in vector_source(start, end):
      yield block
      done += len(block)
      on_rows(done, total)

  on_rows(0, total)
  for shard in shard_numbers:
    start, end = shards.span(shard)
    if shards.finished(shard):
      done += end - start
      on_rows(done, total)
    else:
      shards.write(shard, counted(start, end))


def _open_file(
  settings: Settings, corpus: passages.Corpus, encoder: search.Encoder
) -> tuple[Any, dict[str, Any]]:
  """Opens the FAISS file of the settings, and checks its rows by a sample.

  Returns:
    The `FaissFile`, and the result of `faiss_file.set_search_depth`.

  Raises:
    ValueError: the file is of another kind, or has other rows or vectors.
  """
  from anysearch_jax.retrieval.index import faiss_file

  path = settings.faiss_file or settings.vectors
  file = faiss_file.FaissFile(path)
  if settings.vectors and not file.type.startswith("IndexFlat"):
    raise ValueError(
      f"{path}: found a FAISS file of kind {file.type}, expected IndexFlatIP. "
      "Other kinds are searched as they are: --kind=faiss_file."
    )
  if (file.count, file.dim) != (len(corpus), encoder.dim):
    raise ValueError(
      f"{path}: found {file.count} rows of {file.dim}, expected {len(corpus)} "
      f"of {encoder.dim}, one row a passage, of the encoder's dimension."
    )
  parameter = faiss_file.set_search_depth(file.index, settings.search)
  rows = vectors.sample_rows(len(corpus))
  encoded = encoder.passages([corpus[row].contents for row in rows])
  agreement = faiss_file.agreement(file.index, rows, encoded)
  expected = 1.0 if settings.vectors else faiss_file.LEAST_AGREEMENT
  if agreement < expected:
    raise ValueError(
      f"{path}: found the encoder's vectors in {agreement:.0%} of {len(rows)} "
      f"sampled rows, expected them in {expected:.0%}. The file, the "
      "corpus or the encoder (its pooling and prefix too) is another one, or "
      "the rows or ids are in another order."
    )
  return file, parameter


def locked(folder: pathlib.Path) -> contextlib.AbstractContextManager[None]:
  """Waits for the folder's lock and holds it; raises as `run_lock.hold`."""
  return run_lock.hold(folder / ".lock", patience=_PATIENCE)
