"""What databases of passages note of themselves, and what runs check of it.

A collection of Milvus or a table of PostgreSQL stores a description: the JSON
values from which it was built.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from retrieval import filters as filters_lib
from retrieval import passages
from retrieval.index import search as search_lib


def description(
  corpus: passages.Corpus,
  *,
  encoder: search_lib.Encoder | None,
  language: str,
  vectors: str,
  fields: Sequence[str],
) -> dict[str, Any]:
  """Returns the description of what is built from these values.

  Args:
    corpus: the passages.
    encoder: encoder of passages; None: words only.
    language: language of the passages.
    vectors: how vectors are indexed, a word of the database.
    fields: other fields of the corpus's rows, for filters.

  Raises:
    ValueError: the rows lack a field.
  """
  filters_lib.check_fields(corpus, fields)
  values = {
    "corpus": {"sha256": corpus.sha256, "passages": len(corpus)},
    "language": language,
  }
  if encoder is not None:
    values |= {"encoder": named(encoder), "vectors": vectors}
  if fields:
    values |= {"fields": sorted(fields)}
  return values


def named(encoder: search_lib.Encoder) -> dict[str, Any]:
  """Returns what identifies an encoder, wherever its folder is."""
  said = {k: v for k, v in encoder.identity().items() if k != "folder"}
  return {"dim": encoder.dim} | said


def check_ranking(ranking: str, known: Sequence[str]) -> None:
  """Refuses a ranking that is not one of `known`, with a ValueError."""
  if ranking not in known:
    raise ValueError(
      f"ranking: found {ranking!r}, expected one of {', '.join(known)}."
    )


def check_encoder(
  ranking: str,
  encoder: search_lib.Encoder | None,
  built: Mapping[str, Any],
  where: str,
) -> None:
  """Refuses an encoder other than that of the vectors that a ranking reads.

  Args:
    ranking: `dense`, `hybrid`, or one of words alone.
    encoder: encodes the queries; None for words.
    built: the description of the collection or table.
    where: its name, for the message.

  Raises:
    ValueError: there are no vectors, or another encoder made them.
  """
  if ranking not in ("dense", "hybrid"):
    return
  expected = built.get("encoder")
  given = encoder and named(encoder)
  if expected is None or given != expected:
    raise ValueError(
      f"ranking {ranking}: found the encoder {given}, expected the one of "
      f"{where}, {expected}."
    )


def identity(
  kind: str,
  ranking: str,
  built: Mapping[str, Any],
  filters: filters_lib.Filters,
  **more: Any,
) -> dict[str, Any]:
  """Returns JSON values that identify a retriever's answers, with their hash.

  Args:
    kind: of the retriever.
    ranking: see `check_ranking`.
    built: the description of the collection or table.
    filters: values that fields of the passages may have.
    **more: what else the answers depend on.
  """
  values = {"kind": kind, "ranking": ranking} | more | dict(built)
  if filters:
    values |= {"filter": {k: list(v) for k, v in filters.items()}}
  canonical = json.dumps(values, sort_keys=True).encode()
  return values | {"sha256": hashlib.sha256(canonical).hexdigest()}
