"""Opens an index that `building` built."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

from anysearch_jax.host import json_files
from anysearch_jax.retrieval import passages
from anysearch_jax.retrieval.encoder import (
  encoder_settings,
  installed,
  served,
)
from anysearch_jax.retrieval.index import building, search, vectors

# How an index is searched: by words, by vectors, or by both.
RANKINGS = ("bm25", "dense", "hybrid")
# Of two vectors of a text by one served model, which may round differently.
_LEAST_COSINE = 0.95


def open_index(
  folder: str | os.PathLike,
  *,
  encoder: str | os.PathLike | search.Encoder | None = None,
  ranking: str = "",
  key_variable: str = "",
  devices: Sequence[Any] | None = None,
  verify: bool = False,
) -> search.SearchIndex:
  """Opens a finished index, and compiles what it loads.

  Args:
    folder: folder of the index.
    encoder: the encoder that built the index, its folder, or the address of its
      server; None: the folder from which it was loaded then, or the encoder of
      the extra `dense`.
    ranking: how an index of kind `hybrid` is searched, one of `RANKINGS`; "":
      `hybrid`. Other kinds have one ranking.
    key_variable: environment variable with the key of the encoder's server; "":
      no key.
    devices: JAX devices for the vectors of `flat` and for an encoder that is
      loaded here; None: the CPU.
    verify: whether to read the corpus and the vectors of `flat` and compare
      their hashes.

  Returns:
    The index, which answers queries with passages.

  Raises:
    passages.CorpusError: the corpus is missing or a different one.
    vectors.DamagedError: a file of the index differs from what was written.
    ValueError: the index is not finished, it has no such ranking, or the
      encoder is a different one.
  """
  folder = building.newest_build(folder)
  identity = read(folder)
  ranking = _ranking(folder, identity["kind"], ranking)
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
  index: Any = None
  loaded_encoder = None
  model = ""
  if ranking != "dense":
    from anysearch_jax.retrieval.index import word_index

    index = word_index.WordIndex(folder / "words")
  if ranking != "bm25":
    expected_encoder = identity["encoder"]
    loaded_encoder = _encoder(expected_encoder, encoder, devices, key_variable)
    model = expected_encoder.get("model", "")
    encoder_folder = expected_encoder.get("folder", "")
    if isinstance(encoder, str | os.PathLike):
      encoder_folder = encoder
    if encoder_folder and not model:
      model = encoder_settings.model_name(pathlib.Path(encoder_folder))
    vector_index = _vectors(folder, identity, devices=devices, verify=verify)
    if expected_encoder.get("kind") == served.KIND:
      _check_served(folder, identity, corpus, loaded_encoder)
    if ranking == "hybrid":
      from anysearch_jax.retrieval.index import hybrid

      index = hybrid.HybridIndex(index, vector_index, loaded_encoder)
      loaded_encoder = None
    else:
      index = vector_index
  if identity["kind"] == "hybrid":
    identity["searched"] = ranking
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


def _ranking(folder: pathlib.Path, kind: str, ranking: str) -> str:
  """Returns how an index of a kind is searched, one of `RANKINGS`."""
  rankings = {"bm25": ("bm25",), "hybrid": RANKINGS}.get(kind, ("dense",))
  if ranking and ranking not in rankings:
    raise ValueError(
      f"{folder}: found an index of kind {kind}, which is searched by "
      f"{' or '.join(rankings)}, expected one for {ranking}; build it again "
      "with --kind=hybrid or, over documents, with --search=hybrid."
    )
  return ranking or rankings[-1]


def _encoder(
  expected: dict[str, Any],
  encoder: str | os.PathLike | search.Encoder | None,
  devices: Sequence[Any] | None,
  key_variable: str,
) -> search.Encoder:
  """Returns the encoder of an index, loaded if need be; refuses other ones."""
  index_encoder: Any = encoder
  if encoder is None or isinstance(encoder, str | os.PathLike):
    if expected.get("kind") == served.KIND:
      index_encoder = _ask_encoder(expected, encoder, key_variable)
    elif expected.get("kind") == installed.KIND:
      index_encoder = installed.open_encoder()
    else:
      index_encoder = _load_encoder(expected, encoder, devices)
  identity = {"dim": index_encoder.dim} | index_encoder.identity()
  for name in expected:
    # The encoder's folder may have moved.
    if name != "folder" and identity.get(name) != expected[name]:
      raise ValueError(
        f"encoder: found {name} {identity.get(name)}, the index was built with "
        f"{expected[name]}; expected the same encoder."
      )
  return index_encoder


def _ask_encoder(
  identity: dict[str, Any],
  url: str | os.PathLike | None,
  key_variable: str,
) -> search.Encoder:
  """Returns the encoder of an identity behind an address."""
  # The index does not store the address: it may be from a stranger, who would
  # get the queries and the key.
  if url is None:
    raise ValueError(
      f"encoder: found vectors by the model {identity['model']} of a server, "
      "expected its address: --embeddings=URL."
    )
  return served.open_encoder(os.fspath(url), identity["model"], key_variable)


def _load_encoder(
  identity: dict[str, Any],
  folder: str | os.PathLike | None,
  devices: Sequence[Any] | None,
) -> search.Encoder:
  """Returns the encoder of an identity from its folder, or from another."""
  from anysearch_jax.retrieval.encoder import encoder as encoder_lib

  try:
    encoder = encoder_lib.Encoder.like(identity, folder, devices=devices)
  except KeyError as error:
    raise ValueError(
      "encoder: the index was built with an encoder that reports no "
      f"{error}, so it was not loaded from a folder; pass that encoder."
    ) from error
  encoder.compile()
  return encoder


def _check_served(
  folder: pathlib.Path,
  identity: dict[str, Any],
  corpus: passages.Corpus,
  encoder: search.Encoder,
) -> None:
  """Refuses a server whose model changed under the same name."""
  stored = building.shards_of(folder, identity).rows(0)[0]
  (vector,) = encoder.passages([*corpus.contents(0, 1)])
  cosine = float(vector @ stored)
  if cosine < _LEAST_COSINE:
    raise ValueError(
      f"encoder: found a cosine of {cosine:.2f} between the stored vector of a "
      "passage and the server's, expected 1; it has another model under the "
      f"name {identity['encoder']['model']}. Remove {folder.parent}, and all "
      "passages are embedded again."
    )


def _vectors(
  folder: pathlib.Path,
  identity: dict[str, Any],
  *,
  devices: Sequence[Any] | None,
  verify: bool,
) -> search.Index:
  if identity["kind"] in ("flat", "hybrid"):
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
