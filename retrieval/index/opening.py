"""Opens an index that `building` built."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

from anysearch_jax.host import json_files
from anysearch_jax.retrieval import passages
from anysearch_jax.retrieval.encoder import encoder_settings
from anysearch_jax.retrieval.index import building, search, vectors


def open_index(
  folder: str | os.PathLike,
  *,
  encoder: str | os.PathLike | search.Encoder | None = None,
  devices: Sequence[Any] | None = None,
  verify: bool = False,
) -> search.SearchIndex:
  """Opens a finished index, and compiles what it loads.

  Args:
    folder: folder of the index.
    encoder: the encoder that built the index, or its folder; None: the folder
      from which it was loaded then.
    devices: JAX devices for the vectors of `flat` and for an encoder that is
      loaded here; None: the CPU.
    verify: whether to read the corpus and the vectors of `flat` and compare
      their hashes.

  Returns:
    The index, which answers queries with passages.

  Raises:
    passages.CorpusError: the corpus is missing or a different one.
    vectors.DamagedError: a file of the index differs from what was written.
    ValueError: the index is not finished, or the encoder is a different one.
  """
  folder = building.newest_build(folder)
  identity = read(folder)
  corpus = passages.Corpus(folder / "corpus")
  expected = identity["corpus"]
  if (corpus.sha256, len(corpus)) != (expected["sha256"], expected["passages"]):
    raise passages.CorpusError(
      f"{folder}: found a corpus of {len(corpus)} passages with SHA-256 "
      f"{corpus.sha256}, expected {expected['passages']} with "
      f"{expected['sha256']}; build the index again."
    )
  if verify:
    corpus.verify()
  index: search.Index
  loaded_encoder = None
  model = ""
  if identity["kind"] == "bm25":
    from anysearch_jax.retrieval.index import word_index

    index = word_index.WordIndex(folder / "words")
  else:
    loaded_encoder = _encoder(identity["encoder"], encoder, devices)
    encoder_folder = identity["encoder"].get("folder", "")
    if isinstance(encoder, str | os.PathLike):
      encoder_folder = encoder
    if encoder_folder:
      model = encoder_settings.model_name(pathlib.Path(encoder_folder))
    index = _vectors(folder, identity, devices=devices, verify=verify)
  return search.SearchIndex(
    corpus,
    index,
    identity=building.without_paths(identity),
    encoder=loaded_encoder,
    model=model,
  )


def read(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the identity of an index; raises ValueError if it is damaged."""
  try:
    identity = json_files.read(folder / building.BUILT)
    if identity["kind"] not in building.KINDS:
      raise ValueError(f"its kind {identity['kind']!r} is unknown")
    return identity
  except (OSError, ValueError, KeyError) as error:
    raise ValueError(
      f"{folder}: found no finished index ({error}); build it by "
      "`anysearch build_index`; the same command resumes one that was stopped."
    ) from error


def _encoder(
  expected: dict[str, Any],
  encoder: str | os.PathLike | search.Encoder | None,
  devices: Sequence[Any] | None,
) -> search.Encoder:
  """Returns the encoder of an index, loaded if need be; refuses other ones."""
  index_encoder: Any = encoder
  is_loaded_here = encoder is None or isinstance(encoder, str | os.PathLike)
  if is_loaded_here:
    from anysearch_jax.retrieval.encoder import encoder as encoder_lib

    try:
      index_encoder = encoder_lib.Encoder.like(
        expected, index_encoder, devices=devices
      )
    except KeyError as error:
      raise ValueError(
        "encoder: the index was built with an encoder that reports no "
        f"{error}, so it was not loaded from a folder; pass that encoder."
      ) from error
  identity = {"dim": index_encoder.dim} | index_encoder.identity()
  for name in expected:
    # The encoder's folder may have moved.
    if name != "folder" and identity.get(name) != expected[name]:
      raise ValueError(
        f"encoder: found {name} {identity.get(name)}, the index was built with "
        f"{expected[name]}; expected the same encoder."
      )
  if is_loaded_here:
    index_encoder.compile()
  return index_encoder


def _vectors(
  folder: pathlib.Path,
  identity: dict[str, Any],
  *,
  devices: Sequence[Any] | None,
  verify: bool,
) -> search.Index:
  if identity["kind"] == "flat":
    from anysearch_jax.retrieval.index import flat

    shards = building.shards_of(folder, identity)
    if verify:
      for shard in range(len(shards)):
        shards.check(shard)
    return flat.open_flat(shards, devices=devices)
  from anysearch_jax.retrieval.index import faiss_file

  file = identity["file"]
  path = pathlib.Path(file["path"])
  if not path.is_file() or path.stat().st_size != file["bytes"]:
    raise vectors.DamagedError(
      f"{path}: expected the file of {file['bytes']} bytes that the index "
      "was built over."
    )
  index = faiss_file.FaissFile(path)
  if parameter := identity.get("search"):
    faiss_file.set_search_depth(index.index, parameter["value"])
  return index
