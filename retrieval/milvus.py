"""A collection of Milvus: of a server, or in a file.

The address of a file (`passages.db`) opens Milvus Lite in this process, the
address of a server (`http://host:19530`) a server or cluster of any size. A
collection holds ids, titles and texts, a BM25 index of the contents' terms (as
`analysis` makes them, so that a file and a server find the same), and, if an
encoder made it, vectors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pymilvus

from anysearch_jax import types
from anysearch_jax.host import redaction
from retrieval import analysis
from retrieval import built as built_lib
from retrieval import filters as filters_lib

# What is stored of a passage.
_FIELDS = ["id", "title", "text"]
_LONGEST = 65_535  # Bytes of a VARCHAR.
# Milvus Lite keeps no description, but properties.
_PROPERTY = "anysearch.identity"
_NAME = re.compile(r"[A-Za-z_]\w{0,254}", re.ASCII)
# The constant of reciprocal rank fusion, and how many rows are fused.
_CONSTANT, _DEPTH = 60, 100


def connect(
  address: str, *, key: str = "", timeout: float = 30.0
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
    return pymilvus.MilvusClient(address, token=key, timeout=timeout)
  except Exception as error:
    raise ValueError(
      f"milvus: cannot open {address} ({built_lib.said(error, key)}). A file "
      "needs milvus-lite (the extra [milvus])."
    ) from None


class Table(built_lib.Table):
  """A `built.Table` of Milvus.

  Args:
    client: see `connect`.
    name: the collection's.
    key: the server's token.
    timeout: seconds that a search may take.
  """

  kind, noun, rankings = "milvus", "collection", ("bm25", "dense", "hybrid")
  errors, in_batches = (pymilvus.MilvusException,), True
  batch = 512
  # Saturation and length normalisation, those of the index of words.
  basis = {"k1": 1.2, "b": 0.75}

  def __init__(
    self,
    client: pymilvus.MilvusClient,
    name: str,
    *,
    key: str = "",
    timeout: float = 30.0,
  ):
    if not _NAME.fullmatch(name):
      raise ValueError(
        f"collection: found {name!r}, expected letters, digits and _."
      )
    self._client, self.name, self.key = client, name, key
    self._timeout = timeout

  def noted(self) -> dict[str, Any]:
    if not self._client.has_collection(self.name):
      return {}
    found = self._client.describe_collection(self.name)
    try:
      return json.loads(found["description"] or found["properties"][_PROPERTY])
    except (KeyError, ValueError):
      raise ValueError(
        f"{self}: found one that launch.build_index did not make; name another "
        "one by --table, or drop it."
      ) from None

  def count(self) -> int:
    self._client.load_collection(self.name)
    (found,) = self._client.query(
      self.name, output_fields=["count(*)"], consistency_level="Strong"
    )
    return found["count(*)"]

  def is_finished(self, built: built_lib.Built) -> bool:
    return self.count() == built["corpus"]["passages"]

  def create(self, built: built_lib.Built) -> None:
    analysis.shared(built["language"])  # Refuses unknown ones.
    client, kinds = self._client, pymilvus.DataType
    text = json.dumps(built, sort_keys=True)
    schema = client.create_schema(auto_id=False, description=text)
    schema.add_field("row", kinds.INT64, is_primary=True)
    for name in _FIELDS:
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
    if "fields" in built:
      schema.add_field("fields", kinds.JSON)
    indexes = client.prepare_index_params()
    indexes.add_index(
      "words",
      index_type="SPARSE_INVERTED_INDEX",
      metric_type="BM25",
      params={"bm25_k1": built["k1"], "bm25_b": built["b"]},
    )
    if "encoder" in built:
      dim, how = built["encoder"]["dim"], built["vectors"].upper()
      schema.add_field("dense", kinds.FLOAT_VECTOR, dim=dim)
      indexes.add_index("dense", index_type=how, metric_type="IP")
    client.create_collection(self.name, schema=schema, index_params=indexes)
    if not client.describe_collection(self.name)["description"]:
      client.alter_collection_properties(self.name, {_PROPERTY: text})

  def insert(
    self, built: built_lib.Built, rows: Sequence[built_lib.Row]
  ) -> None:
    analyze, data = analysis.shared(built["language"]), []
    for row, passage, fields, vector in rows:
      values: dict[str, Any] = {n: getattr(passage, n) for n in _FIELDS}
      values["terms"] = " ".join(analyze(passage.contents))
      longest = max(len(value.encode()) for value in values.values())
      if longest > _LONGEST:
        raise ValueError(
          f"Passage {passage.id!r}: found a text of {longest} bytes, expected "
          f"at most {_LONGEST}."
        )
      if "fields" in built:
        values["fields"] = fields
      if "encoder" in built:
        values["dense"] = vector.tolist()
      data.append({"row": row} | values)
    # A part that a killed build left is written again.
    self._client.upsert(self.name, data)

  def finish(self, built: built_lib.Built) -> None:
    self._client.load_collection(self.name)

  def find(
    self, built: built_lib.Built, asked: built_lib.Asked
  ) -> list[built_lib.Answer]:
    analyze = analysis.shared(built["language"])
    data: dict[str, list[Any]] = {
      "words": [" ".join(analyze(text)) for text in asked.texts]
    }
    if asked.ranking != "bm25":
      data["dense"] = [vector.tolist() for vector in asked.vectors]
    condition = _condition(asked.filters)
    options = {
      "output_fields": _FIELDS,
      "timeout": self._timeout,
      "limit": asked.k,
    }
    if asked.ranking == "hybrid":
      most = asked.k + _DEPTH
      found = self._client.hybrid_search(
        self.name,
        [
          pymilvus.AnnSearchRequest(
            some, field, {}, limit=most, expr=condition or None
          )
          for field, some in data.items()
        ],
        pymilvus.RRFRanker(_CONSTANT),
        **options,
      )
    else:
      field, some = data.popitem()
      found = self._client.search(
        self.name, data=some, anns_field=field, filter=condition, **options
      )
    # Milvus Lite returns BM25's scores with a minus.
    sign = -1 if asked.ranking == "bm25" else 1
    return [
      tuple(
        types.Passage(
          **{name: hit["entity"][name] for name in _FIELDS},
          score=float(max(hit["distance"], sign * hit["distance"])),
        )
        for hit in hits
      )
      for hits in found
    ]

  def close(self) -> None:
    self._client.close()


def _condition(filters: filters_lib.Filters) -> str:
  """Returns filters in Milvus's language; Milvus Lite has no `in` for JSON."""
  either = (
    " or ".join(
      f"fields[{_quoted(field)}] == {_quoted(value)}" for value in allowed
    )
    for field, allowed in filters.items()
  )
  return " and ".join(f"({each})" for each in either)


def _quoted(text: str) -> str:
  """Returns a literal; Milvus Lite reads no escapes of other characters."""
  return json.dumps(text, ensure_ascii=False)
