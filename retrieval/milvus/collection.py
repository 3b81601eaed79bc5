"""Fills a collection of Milvus with the passages of a corpus.

The address of a file (`passages.db`) opens Milvus Lite in this process, the
address of a server (`http://host:19530`) a server or cluster of any size. A
collection holds ids, titles and texts, a BM25 index of the contents' terms (as
`analysis` makes them, so that a file and a server find the same), and, if an
encoder made it, vectors. Its description says what it was built from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pymilvus

from anysearch_jax.host.http import redaction
from retrieval import analysis, passages
from retrieval import built as built_lib
from retrieval import filters as filters_lib
from retrieval.index import search as search_lib

# What is stored of a passage.
FIELDS = ["id", "title", "text"]
# Passages of an insertion; a build resumes with the first unfinished one.
_BATCH = 512
_LONGEST = 65_535  # Bytes of a VARCHAR.
# Milvus Lite keeps no description, but properties.
_PROPERTY = "anysearch.identity"
_NAME = re.compile(r"[A-Za-z_]\w{0,254}", re.ASCII)


def connect(
  address: str, *, token: str = "", timeout: float = 30.0
) -> pymilvus.MilvusClient:
  """Returns a client of a server, or of a file of Milvus Lite.

  Raises:
    ValueError: the address is invalid, or Milvus cannot be reached there.
  """
  if not address.endswith(".db") and not redaction.is_address(address):
    raise ValueError(
      f"milvus: found {redaction.shown(address)}, expected the address of a "
      "server, such as http://127.0.0.1:19530, or a file that ends in .db."
    )
  try:
    return pymilvus.MilvusClient(address, token=token, timeout=timeout)
  except Exception as error:
    raise ValueError(
      f"milvus: cannot open {address} ({said(error, token)}). A file needs "
      "milvus-lite (requirements-milvus.txt)."
    ) from None


def build(
  client: pymilvus.MilvusClient,
  collection: str,
  corpus: passages.Corpus,
  *,
  encoder: search_lib.Encoder | None = None,
  k1: float = 0.9,
  b: float = 0.4,
  language: str = analysis.DEFAULT,
  vectors: str = "FLAT",
  fields: Sequence[str] = (),
  on_rows: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
  """Inserts a corpus into a collection, or resumes inserting it.

  Args:
    client: see `connect`.
    collection: name of the collection; created if missing.
    corpus: the passages; row i has the primary key i.
    encoder: encoder of passages; None: BM25 only.
    k1, b: saturation and length normalisation of BM25.
    language: language of the passages, one of `analysis.LANGUAGES`.
    vectors: Milvus's index of vectors: `FLAT` is exact.
    fields: other fields of the corpus's rows, for filters.
    on_rows: called with the rows inserted so far and all rows.

  Returns:
    The identity that the collection stores.

  Raises:
    ValueError: the collection was built from other values, or a passage is too
      long.
  """
  if not _NAME.fullmatch(collection):
    raise ValueError(
      f"collection: found {collection!r}, expected letters, digits and _."
    )
  identity = built_lib.description(
    corpus,
    encoder=encoder,
    k1=k1,
    b=b,
    language=language,
    vectors=vectors,
    fields=fields,
  )
  analyze = analysis.shared(language)
  if client.has_collection(collection):
    found = described(client, collection)
    if found != identity:
      raise ValueError(
        f"collection {collection}: found one that was built from {found}, "
        f"expected {identity}; name another collection, or drop this one."
      )
  else:
    _create(client, collection, identity)
  done = rows(client, collection) // _BATCH * _BATCH
  on_rows(done, len(corpus))
  for start in range(done, len(corpus), _BATCH):
    stop = min(start + _BATCH, len(corpus))
    data = [_row(corpus, row, analyze, fields) for row in range(start, stop)]
    if encoder is not None:
      encoded = encoder.passages([*corpus.contents(start, stop)])
      for each, vector in zip(data, encoded, strict=True):
        each["dense"] = vector.tolist()
    # A part that a killed build left is written again.
    client.upsert(collection, data)
    on_rows(stop, len(corpus))
  client.load_collection(collection)
  return identity


def _row(
  corpus: passages.Corpus,
  row: int,
  analyze: Callable[[str], Sequence[str]],
  fields: Sequence[str],
) -> dict[str, Any]:
  """Returns a row of the collection, without its vector.

  Raises:
    ValueError: a text is too long.
  """
  passage = corpus[row]
  values = {
    "id": passage.id,
    "title": passage.title,
    "text": passage.text,
    "terms": " ".join(analyze(passage.contents)),
  }
  longest = max(len(value.encode()) for value in values.values())
  if longest > _LONGEST:
    raise ValueError(
      f"Passage {passage.id!r}: found a text of {longest} bytes, expected at "
      f"most {_LONGEST}."
    )
  more = {"fields": filters_lib.of_row(corpus, row, fields)} if fields else {}
  return {"row": row} | values | more


def described(client: pymilvus.MilvusClient, collection: str) -> dict[str, Any]:
  """Returns the identity that `build` stored with a collection.

  Raises:
    ValueError: there is no such collection, or another program made it.
  """
  try:
    found = client.describe_collection(collection)
    text = found["description"] or found["properties"][_PROPERTY]
    return json.loads(text)
  except (pymilvus.MilvusException, KeyError, ValueError) as error:
    raise ValueError(
      f"collection {collection}: found no description ({said(error)}); build "
      "it with launch.build_milvus."
    ) from None


def rows(client: pymilvus.MilvusClient, collection: str) -> int:
  """Returns how many passages a collection has."""
  client.load_collection(collection)
  (found,) = client.query(
    collection, output_fields=["count(*)"], consistency_level="Strong"
  )
  return found["count(*)"]


def _create(
  client: pymilvus.MilvusClient, collection: str, identity: dict[str, Any]
) -> None:
  kinds = pymilvus.DataType
  text = json.dumps(identity, sort_keys=True)
  schema = client.create_schema(auto_id=False, description=text)
  schema.add_field("row", kinds.INT64, is_primary=True)
  for name in FIELDS:
    schema.add_field(name, kinds.VARCHAR, max_length=_LONGEST)
  schema.add_field(
    "terms",
    kinds.VARCHAR,
    max_length=_LONGEST,
    enable_analyzer=True,
    analyzer_params={"tokenizer": "standard"},
  )
  schema.add_field("words", kinds.SPARSE_FLOAT_VECTOR)
  schema.add_function(
    pymilvus.Function(
      name="bm25",
      function_type=pymilvus.FunctionType.BM25,
      input_field_names=["terms"],
      output_field_names=["words"],
    )
  )
  if "fields" in identity:
    schema.add_field("fields", kinds.JSON)
  indexes = client.prepare_index_params()
  indexes.add_index(
    "words",
    index_type="SPARSE_INVERTED_INDEX",
    metric_type="BM25",
    params={"bm25_k1": identity["k1"], "bm25_b": identity["b"]},
  )
  if "encoder" in identity:
    dim = identity["encoder"]["dim"]
    schema.add_field("dense", kinds.FLOAT_VECTOR, dim=dim)
    indexes.add_index("dense", index_type=identity["vectors"], metric_type="IP")
  client.create_collection(collection, schema=schema, index_params=indexes)
  if not client.describe_collection(collection)["description"]:
    client.alter_collection_properties(collection, {_PROPERTY: text})


def said(error: Exception, token: str = "") -> str:
  """Returns an error's words in one line, without the token."""
  text = getattr(error, "message", "") or str(error) or type(error).__name__
  return redaction.Redactor(token).quote(" ".join(str(text).split()), 300)
