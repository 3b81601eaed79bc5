"""A collection of Milvus: of a server, or in a file.

The address of a file (`passages.db`) opens Milvus Lite in this process, the
address of a server (`http://host:19530`) a server or cluster of any size. A
collection holds ids, titles and texts, a BM25 index of the contents' terms (as
`analysis` makes them, so that a file and a server find the same), and, if an
encoder made it, vectors. Its description has the JSON values from which it was
built, and a run checks those that it needs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pymilvus

from anysearch_jax import types
from anysearch_jax.config import settings
from anysearch_jax.host import json_files, listing, redaction
from anysearch_jax.retrieval import analysis, passages
from anysearch_jax.retrieval import filters as filters_lib
from anysearch_jax.retrieval import requests as requests_lib
from anysearch_jax.retrieval.index import search as search_lib

RANKINGS = ("bm25", "dense", "hybrid")

# What is stored of a passage.
_FIELDS = ["id", "title", "text"]
_LONGEST = 65_535  # Bytes of a VARCHAR.
_BATCH = 512  # Passages of an insertion.
# Milvus Lite keeps no description, but properties.
_PROPERTY = "anysearch.identity"
_NAME = re.compile(r"[A-Za-z_]\w{0,254}", re.ASCII)
# Saturation and length normalisation, those of the index of words.
_BASIS = {"k1": 1.2, "b": 0.75}
# The constant of reciprocal rank fusion, and the rows beyond k of each ranking
# that are fused.
_FUSION_CONSTANT = 60
_FUSION_DEPTH = 100
_TIMEOUT = 30.0  # Seconds of a search.
_LITE = logging.getLogger("milvus_lite.server_manager")


class Collection:
  """A collection of passages, which may not exist yet.

  Args:
    address: address of a server, or a file of Milvus Lite (`NAME.db`).
    name: name of the collection.
    key: token of the server; messages never contain it.

  Raises:
    ValueError: the address or the name is invalid, or Milvus cannot be reached.
  """

  def __init__(self, address: str, name: str, *, key: str = ""):
    if not address.endswith(".db") and not redaction.is_address(address):
      raise ValueError(
        f"milvus: found {redaction.shown(address)}, expected the address of a "
        "server, such as http://127.0.0.1:19530, or a file that ends in .db."
      )
    if not _NAME.fullmatch(name):
      raise ValueError(
        f"collection: found {name!r}, expected letters, digits and _."
      )
    self.client = _open_client(address, key)
    self.name = name
    self._key = key

  def __str__(self) -> str:
    return f"collection {self.name}"

  def description(self) -> dict[str, Any]:
    """Returns the description; {} if the collection is missing.

    Raises:
      ValueError: another program made the collection.
    """
    if not self.client.has_collection(self.name):
      return {}
    collection = self.client.describe_collection(self.name)
    try:
      return json.loads(
        collection["description"] or collection["properties"][_PROPERTY]
      )
    except (KeyError, ValueError):
      raise ValueError(
        f"{self}: found one that anysearch build_index did not make; name "
        "another one by --collection, or drop it."
      ) from None

  def described(self) -> dict[str, Any]:
    """Returns the description of a finished collection.

    Raises:
      ValueError: the collection is missing, unfinished, or another program's.
    """
    built = self.description()
    if not built or self.count() != built["corpus"]["passages"]:
      raise ValueError(
        f"{self}: found none that is finished; build it, or finish it, by "
        "anysearch build_index --kind=milvus."
      )
    return built

  def count(self) -> int:
    """Returns the number of passages."""
    self.client.load_collection(self.name)
    (counts,) = self.client.query(
      self.name, output_fields=["count(*)"], consistency_level="Strong"
    )
    return counts["count(*)"]

  def failure(self, error: Exception) -> str:
    """Returns what the client raised, in one line and without the key."""
    return f"milvus, {self}: {_error_text(error, self._key)}"

  def create(self, built: Mapping[str, Any]) -> None:
    """Creates the empty collection and notes its description."""
    client = self.client
    kinds = pymilvus.DataType
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
      dim = built["encoder"]["dim"]
      schema.add_field("dense", kinds.FLOAT_VECTOR, dim=dim)
      index_type = built["vectors"].upper()
      indexes.add_index("dense", index_type=index_type, metric_type="IP")
    client.create_collection(self.name, schema=schema, index_params=indexes)
    if not client.describe_collection(self.name)["description"]:
      client.alter_collection_properties(self.name, {_PROPERTY: text})

  def insert(
    self,
    built: Mapping[str, Any],
    corpus: passages.Corpus,
    rows: range,
    encoder: search_lib.Encoder | None,
  ) -> None:
    """Inserts rows with the fields that the description names.

    Args:
      built: the description of the collection.
      corpus: the passages.
      rows: the rows to insert.
      encoder: makes the vectors; None for words only.

    Raises:
      ValueError: a text is too long, or a field has another kind of value.
    """
    analyze = analysis.get_analyzer(built["language"])
    data = []
    inserted = [corpus[row] for row in rows]
    for row, passage in zip(rows, inserted, strict=True):
      values: dict[str, Any] = {n: getattr(passage, n) for n in _FIELDS}
      values["terms"] = " ".join(analyze(passage.contents))
      longest = max(len(value.encode()) for value in values.values())
      if longest > _LONGEST:
        raise ValueError(
          f"Passage {passage.id!r}: found a text of {longest} bytes, expected "
          f"at most {_LONGEST}."
        )
      if "fields" in built:
        values["fields"] = filters_lib.row_fields(corpus, row, built["fields"])
      data.append({"row": row} | values)
    if encoder is not None:
      encoded = encoder.passages([passage.contents for passage in inserted])
      for values, vector in zip(data, encoded.tolist(), strict=True):
        values["dense"] = vector
    # A killed build may have written some of these rows, so they are replaced.
    self.client.upsert(self.name, data)


def build(
  collection: Collection,
  corpus: passages.Corpus,
  *,
  encoder: search_lib.Encoder | None = None,
  language: str = analysis.DEFAULT,
  vectors: str = "flat",
  fields: Sequence[str] = (),
  on_rows: Callable[[int, int], None] = lambda done, total: None,
) -> None:
  """Fills a collection, or resumes filling it.

  Args:
    collection: created if missing.
    corpus: the passages; row i has the primary key i.
    encoder: encoder of passages; None: words only.
    language: language of the passages, one of `analysis.LANGUAGES`.
    vectors: how Milvus indexes vectors: `flat` is exact; `hnsw` is a graph, and
      there are others.
    fields: other fields of the corpus's rows, for filters.
    on_rows: called with the rows inserted so far and all rows.

  Raises:
    ValueError: a setting is invalid, the collection was built from other
      values, or Milvus cannot have it.
  """
  filters_lib.check_fields(corpus, fields)
  analysis.get_analyzer(language)  # Refuses unknown ones.
  built: dict[str, Any] = {
    **_BASIS,
    "corpus": {"sha256": corpus.sha256, "passages": len(corpus)},
    "language": language,
  }
  if encoder is not None:
    built |= {"encoder": _encoder_identity(encoder), "vectors": vectors}
  if fields:
    built |= {"fields": sorted(fields)}
  try:
    existing = collection.description()
    if not existing:
      collection.create(built)
    elif existing != built:
      raise ValueError(
        f"{collection}: found one that was built from {existing}, expected "
        f"{built}; name another one by --collection, or drop this one."
      )
    if (done := collection.count()) < len(corpus):
      done -= done % _BATCH
    on_rows(done, len(corpus))
    for start in range(done, len(corpus), _BATCH):
      rows = range(start, min(start + _BATCH, len(corpus)))
      collection.insert(built, corpus, rows, encoder)
      on_rows(rows.stop, len(corpus))
  except pymilvus.MilvusException as error:
    raise ValueError(
      f"{collection.failure(error)} Build it again to resume."
    ) from None


class MilvusRetriever(requests_lib.OneByBatch):
  """Searches a finished collection on threads; usable from any event loop.

  Args:
    collection: a collection that `build` finished.
    ranking: one of `RANKINGS`: by words; by vectors; both fused by reciprocal
      rank. "": by words.
    encoder: the encoder that built the collection; None for words.
    filters: values that fields of the passages may have, see `filters.parse`.

  Raises:
    ValueError: the collection is not finished, the ranking or a field is
      unknown, there are no vectors, or another encoder made them.

  `counters` has the `queries` and the `failures`.
  """

  def __init__(
    self,
    collection: Collection,
    *,
    ranking: str = "",
    encoder: search_lib.Encoder | None = None,
    filters: filters_lib.Filters | None = None,
  ):
    self._ranking = ranking or "bm25"
    self._filters = filters or {}
    settings.require("ranking", self._ranking, RANKINGS)
    self._collection = collection
    self._built = collection.described()
    fields = self._built.get("fields", ())
    if unknown := sorted(self._filters.keys() - set(fields)):
      raise ValueError(
        f"retrieval.filter: found the field {unknown[0]!r}, expected one of "
        f"{collection} ({listing.first_names(fields) or 'none'}); build it "
        "with --fields."
      )
    self._encoder = None if self._ranking == "bm25" else encoder
    if self._ranking != "bm25":
      expected = self._built.get("encoder")
      actual = _encoder_identity(encoder) if encoder else None
      if expected is None or actual != expected:
        raise ValueError(
          f"ranking {ranking}: found the encoder {actual}, expected the one of "
          f"{collection}, {expected}; name its folder in retrieval.encoder."
        )
    self.counters: Counter[str] = Counter()

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[search_lib.Answer | Exception]:
    """Returns passages, none for a blank query, or each `RetrievalError`."""
    searches = [request for request in requests if request.query.strip()]
    answers = iter(
      await requests_lib.ask_by_k(
        searches, lambda texts, k: asyncio.to_thread(self._answers, texts, k)
      )
    )
    replies = [next(answers) if r.query.strip() else () for r in requests]
    self.counters["queries"] += len(replies)
    self.counters["failures"] += sum(isinstance(x, Exception) for x in replies)
    return replies

  def _answers(
    self, texts: Sequence[str], k: int
  ) -> Sequence[search_lib.Answer | Exception]:
    analyze = analysis.get_analyzer(self._built["language"])
    # Lone surrogates cannot be sent.
    texts = [text.encode(errors="replace").decode() for text in texts]
    data: dict[str, list[Any]] = {
      "words": [" ".join(analyze(text)) for text in texts]
    }
    if self._encoder is not None:
      data["dense"] = self._encoder.queries(texts).tolist()
    collection = self._collection
    condition = _condition(self._filters)
    client = collection.client
    name = collection.name
    options = {"output_fields": _FIELDS, "timeout": _TIMEOUT, "limit": k}
    try:
      if self._ranking == "hybrid":
        options_of_ranking: dict[str, Any] = {
          "limit": k + _FUSION_DEPTH,
          "expr": condition or None,
        }
        ann_requests = [
          pymilvus.AnnSearchRequest(values, field, {}, **options_of_ranking)
          for field, values in data.items()
        ]
        ranker = pymilvus.RRFRanker(_FUSION_CONSTANT)
        results = client.hybrid_search(name, ann_requests, ranker, **options)
      else:
        field, values = data.popitem()
        results = client.search(
          name, data=values, anns_field=field, filter=condition, **options
        )
    except pymilvus.MilvusException as error:
      failure = collection.failure(error)
      return [types.RetrievalError(failure)] * len(texts)
    # Milvus Lite returns BM25's scores with a minus.
    sign = -1 if self._ranking == "bm25" else 1

    def passage(hit: Any) -> types.Passage:
      score = float(max(hit["distance"], sign * hit["distance"]))
      fields = {name: hit["entity"][name] for name in _FIELDS}
      return types.Passage(**fields, score=score)

    return [tuple(map(passage, hits)) for hits in results]

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the answers, with their hash."""
    values: dict[str, Any] = {"kind": "milvus", "ranking": self._ranking}
    values |= self._built
    if self._filters:
      values |= {"filter": {k: list(v) for k, v in self._filters.items()}}
    return values | {"sha256": json_files.sha256(values)}


class _Reason(logging.Filter):
  """Keeps why Milvus Lite cannot open a file, which it only logs."""

  error: BaseException | None = None

  def filter(self, record: logging.LogRecord) -> bool:
    self.error = (record.exc_info or (None, None))[1] or self.error
    return record.exc_info is None


def _open_client(address: str, key: str) -> pymilvus.MilvusClient:
  """Returns a client of a server, or of a file of Milvus Lite."""
  reason = _Reason()
  _LITE.addFilter(reason)
  try:
    return pymilvus.MilvusClient(address, token=key, timeout=_TIMEOUT)
  except Exception as error:
    message = _error_text(reason.error or error, key)
    if isinstance(getattr(reason.error, "__cause__", None), BlockingIOError):
      message = (
        "another process has it open, and a file serves one at a time; end "
        "that process, or start a Milvus server for several."
      )
    raise ValueError(f"milvus: cannot open {address}: {message}") from None
  finally:
    _LITE.removeFilter(reason)


def _error_text(error: BaseException, key: str) -> str:
  """Returns an error's words in one line, without the key."""
  text = getattr(error, "message", "") or str(error) or type(error).__name__
  return redaction.Redactor(key).quote(" ".join(str(text).split()), 300)


def _encoder_identity(encoder: search_lib.Encoder) -> dict[str, Any]:
  """Returns what identifies an encoder, wherever its folder is."""
  values = {k: v for k, v in encoder.identity().items() if k != "folder"}
  return {"dim": encoder.dim} | values


def _condition(filters: filters_lib.Filters) -> str:
  """Returns filters in Milvus's language; Milvus Lite has no `in` for JSON."""
  conditions = (
    " or ".join(
      f"fields[{_quoted(field)}] == {_quoted(value)}" for value in allowed
    )
    for field, allowed in filters.items()
  )
  return " and ".join(f"({condition})" for condition in conditions)


def _quoted(text: str) -> str:
  """Returns a literal; Milvus Lite reads no escapes of other characters."""
  return json.dumps(text, ensure_ascii=False)
