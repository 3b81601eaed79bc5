"""A collection of Milvus as a retriever: of a server, or in a file.

The address of a file (`passages.db`) opens Milvus Lite in this process, the
address of a server (`http://host:19530`) a server or cluster of any size. A
collection holds ids, titles and texts, a BM25 index of the contents' terms (as
`analysis` makes them, so that a file and a server find the same), and, if an
encoder made it, vectors. Its description says what it was built from.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pymilvus

from anysearch_jax import types
from anysearch_jax.host import redaction
from retrieval import analysis, passages
from retrieval import built as built_lib
from retrieval import filters as filters_lib
from retrieval import requests as requests_lib
from retrieval.index import search as search_lib

Answer = tuple[types.Passage, ...]
# Saturation and length normalisation, those of the index of words.
_K1, _B = 1.2, 0.75

RANKINGS = ("bm25", "dense", "hybrid")
# What is stored of a passage.
_FIELDS = ["id", "title", "text"]
# Passages of an insertion; a build resumes with the first unfinished one.
_BATCH = 512
_LONGEST = 65_535  # Bytes of a VARCHAR.
# Milvus Lite keeps no description, but properties.
_PROPERTY = "anysearch.identity"
_NAME = re.compile(r"[A-Za-z_]\w{0,254}", re.ASCII)
# The constant of reciprocal rank fusion, and how many rows are fused.
_CONSTANT, _DEPTH = 60, 100


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
      "milvus-lite (the extra [milvus])."
    ) from None


def build(
  client: pymilvus.MilvusClient,
  collection: str,
  corpus: passages.Corpus,
  *,
  encoder: search_lib.Encoder | None = None,
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
  identity = {"k1": _K1, "b": _B} | built_lib.description(
    corpus, encoder=encoder, language=language, vectors=vectors, fields=fields
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
      "it with launch.build_index --kind=milvus."
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


class MilvusRetriever(requests_lib.OneByBatch):
  """Searches a collection on other threads; usable from any event loop.

  Args:
    client: see `connect`.
    collection: a collection that `build` finished.
    ranking: `bm25`; `dense`, by the encoder's vectors; or `hybrid`, both fused
      by reciprocal rank.
    encoder: the encoder that built the collection; None for `bm25`.
    corpus: name of the corpus; a request must name this corpus or none.
    filters: values that fields of the passages may have, see `filters.parse`.
    token: removed from error messages.
    timeout: seconds that a search may take.

  Raises:
    ValueError: the ranking is unknown, the collection is unfinished or has no
      vectors, or the encoder is missing or another one.

  `counters` has the `queries` and the `failures`.
  """

  def __init__(
    self,
    client: pymilvus.MilvusClient,
    collection: str,
    *,
    ranking: str = "bm25",
    encoder: search_lib.Encoder | None = None,
    corpus: str = "",
    filters: filters_lib.Filters | None = None,
    token: str = "",
    timeout: float = 30.0,
  ):
    built_lib.check_ranking(ranking, RANKINGS)
    self._client, self._collection = client, collection
    self._ranking, self._encoder = ranking, encoder
    self._corpus, self._token, self._timeout = corpus, token, timeout
    self._built = described(client, collection)
    self._filters = filters or {}
    where = f"collection {collection}"
    filters_lib.check(self._filters, self._built, where)
    self._analyze = analysis.shared(self._built["language"])
    found = rows(client, collection)
    expected = self._built["corpus"]["passages"]
    if found != expected:
      raise ValueError(
        f"{where}: found {found} of {expected} passages; run "
        "launch.build_index --kind=milvus again to finish it."
      )
    built_lib.check_encoder(ranking, encoder, self._built, where)
    self.counters: Counter[str] = Counter()

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    """Returns answers in the order of the requests, by one search for each `k`.

    A blank query has no passages.

    Returns:
      For each request its passages, or a `RetrievalError`.

    Raises:
      ValueError: a request is invalid, see `requests.check`.
    """
    requests_lib.check(requests, self._corpus)
    self.counters["queries"] += len(requests)
    found: list[Answer | Exception] = [()] * len(requests)
    for k in sorted({request.k for request in requests}):
      slots = [
        i for i, r in enumerate(requests) if r.k == k and r.query.strip()
      ]
      queries = [requests[i].query for i in slots]
      if not queries:
        continue
      try:
        answers = await asyncio.to_thread(self._search, queries, k)
      except pymilvus.MilvusException as error:
        self.counters["failures"] += 1
        failure = types.RetrievalError(
          f"Milvus, collection {self._collection}: {self._said(error)}"
        )
        answers = [failure] * len(queries)
      for i, answer in zip(slots, answers, strict=True):
        found[i] = answer
    return found

  def identity(self) -> dict[str, Any]:
    """Returns JSON values that identify the answers."""
    return built_lib.identity(
      "milvus", self._ranking, self._built, self._filters
    )

  def close(self) -> None:
    """Closes the connection."""
    self._client.close()

  def _said(self, error: Exception) -> str:
    return said(error, self._token)

  def _search(self, queries: list[str], k: int) -> list[Answer | Exception]:
    # Lone surrogates cannot be sent.
    texts = [q.encode(errors="replace").decode() for q in queries]
    terms = [" ".join(self._analyze(text)) for text in texts]
    vectors = None
    if self._encoder is not None and self._ranking != "bm25":
      vectors = self._encoder.queries(texts).tolist()
    condition = _condition(self._filters)
    options = {"output_fields": _FIELDS, "timeout": self._timeout}
    if self._ranking == "hybrid":
      found = self._client.hybrid_search(
        self._collection,
        [
          pymilvus.AnnSearchRequest(
            data, field, {}, limit=k + _DEPTH, expr=condition or None
          )
          for data, field in ((terms, "words"), (vectors, "dense"))
        ],
        pymilvus.RRFRanker(_CONSTANT),
        limit=k,
        **options,
      )
    else:
      found = self._client.search(
        self._collection,
        data=terms if vectors is None else vectors,
        anns_field="words" if vectors is None else "dense",
        filter=condition,
        limit=k,
        **options,
      )
    return [tuple(map(self._passage, hits)) for hits in found]

  def _passage(self, hit: Any) -> types.Passage:
    values, score = hit["entity"], float(hit["distance"])
    # Milvus Lite returns BM25's scores with a minus.
    score = abs(score) if self._ranking == "bm25" else score
    return types.Passage(values["id"], values["title"], values["text"], score)


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
