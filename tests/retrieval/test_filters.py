"""Which passages a run may find: filters of Milvus and PostgreSQL."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import postgres_server
import pytest
import retrieval_cases as cases

from anysearch_jax import config, types
from launch import retrieval_settings
from retrieval import filters, passages

SOURCES = ("wiki", "news", 'a "b" c', "it's")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  folder = tmp_path_factory.mktemp("filtered")
  rows = [
    {
      "id": str(i),
      "title": f"Title {i}",
      "text": f"Passage n{i} about {('water', 'fire')[i % 2]}",
      "source": SOURCES[i % 4],
      "year": 2000 + i % 3,
      "extra": None,
    }
    for i in range(400)
  ]
  del rows[5]["year"]
  source = folder / "c.jsonl"
  source.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return passages.prepare(source, folder / "prepared")


@pytest.fixture(scope="module")
def postgres(corpus):
  pytest.importorskip("psycopg_pool", reason="needs the extra [postgres]")
  pytest.importorskip("pgvector", reason="needs the extra [postgres]")
  from retrieval import postgres as lib

  vectors = postgres_server.programs()[1]
  encoder = cases.Encoder() if vectors else None
  running = postgres_server.running()
  address = next(running).address()
  pool = lib.connect(address)
  for kind in ("flat", "hnsw"):
    lib.build(
      pool,
      kind,
      corpus,
      encoder=encoder,
      vectors=kind,
      fields=["year", "source"],
    )
  with pool.connection() as connection:
    connection.execute("ALTER ROLE admin SET enable_seqscan = off")
  pool.close()
  pool = lib.connect(address)

  def make(ranking, kind="flat", **values):
    ranking = ranking.replace("bm25", "words")
    if ranking != "words" and not vectors:
      pytest.skip("needs pgvector on the server")
    used = None if ranking == "words" else encoder
    return lib.PostgresRetriever(
      pool, kind, ranking=ranking, encoder=used, **values
    )

  def of(corpus):
    lib.build(pool, "odd", corpus, fields=["\u00f6dd"])
    return lambda **values: lib.PostgresRetriever(pool, "odd", **values)

  make.of = of
  yield make
  pool.close()
  running.close()


@pytest.fixture(params=["postgres", "milvus"])
def odd_fields(request, tmp_path):
  values = ("a\0b", "c\ud800d", 2018.0, 0.5, '\u00e9\u4e2d \\ "\n')
  source = tmp_path / "c.jsonl"
  source.write_text(
    "".join(
      json.dumps({"id": str(i), "text": "water", "\u00f6dd": value}) + "\n"
      for i, value in enumerate(values)
    )
  )
  corpus = passages.prepare(source, tmp_path / "prepared")
  return request.getfixturevalue(request.param).of(corpus)


@pytest.fixture(scope="module")
def milvus(corpus, tmp_path_factory):
  pytest.importorskip("milvus_lite", reason="needs the extra [milvus]")
  lib = pytest.importorskip("retrieval.milvus")
  encoder = cases.Encoder()
  client = lib.connect(str(tmp_path_factory.mktemp("milvus") / "f.db"))
  lib.build(client, "f", corpus, encoder=encoder, fields=["year", "source"])

  def make(ranking, **values):
    return lib.MilvusRetriever(
      client, "f", ranking=ranking, encoder=encoder, **values
    )

  def of(corpus):
    lib.build(client, "odd", corpus, fields=["\u00f6dd"])
    return lambda **values: lib.MilvusRetriever(client, "odd", **values)

  make.of = of
  yield make
  client.close()


@pytest.fixture
def make(request):
  return request.getfixturevalue(request.param)


both = pytest.mark.parametrize("make", ["postgres", "milvus"], indirect=True)


def search(retriever, query, k):
  asked = [types.SearchRequest(query, k)]
  (answer,) = asyncio.run(retriever.search_many(asked))
  if isinstance(answer, Exception):
    raise answer
  return [int(passage.id) for passage in answer]


def allowed(i, chosen):
  year = None if i == 5 else str(2000 + i % 3)
  row = {"source": SOURCES[i % 4], "year": year}
  return all(row[field] in values for field, values in chosen.items())


CHOSEN = (
  {"source": ("news",)},
  {"source": ("wiki", "it's"), "year": ("2001",)},
  {"source": ('a "b" c',)},
  {"year": ("2002",)},
  {"source": ("nothing",)},
)


@both
@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
def test_words_find_what_is_allowed(make, chosen):
  found = search(make("bm25", filters=chosen), "passage about water", 500)
  # Every passage has a word of the query.
  assert set(found) == {i for i in range(400) if allowed(i, chosen)}


@both
@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
def test_vectors_find_the_nearest_that_are_allowed(make, corpus, chosen):
  encoder = cases.Encoder()
  x = encoder.passages(list(corpus.contents(0, len(corpus)))).astype(float)
  scores = x @ encoder.queries(["a query"])[0].astype(float)
  order = [int(i) for i in np.argsort(-scores) if allowed(int(i), chosen)]
  assert search(make("dense", filters=chosen), "a query", 7) == order[:7]


def test_a_graph_finds_enough_that_is_allowed(postgres):
  # One of 12 is allowed, so 40 candidates would leave about 3.
  chosen = {"source": ("wiki",), "year": ("2000",)}
  made = postgres("dense", "hnsw", filters=chosen)
  found = search(made, "a query", 20)
  assert len(found) == 20
  assert all(allowed(i, chosen) for i in found)


@both
def test_both_rankings_are_filtered(make, corpus):
  chosen = {"year": ("2001",)}
  found = search(make("hybrid", filters=chosen), corpus[7].contents, 30)
  assert found[0] == 7
  assert len(found) == 30
  assert all(allowed(i, chosen) for i in found)


@both
def test_a_filter_is_part_of_the_identity(make):
  one = make("bm25", filters={"year": ("2001",)}).identity()
  assert one["filter"] == {"year": ["2001"]}
  assert one["fields"] == ["source", "year"]
  assert one["sha256"] != make("bm25").identity()["sha256"]


@both
def test_an_unknown_field_is_refused(make):
  with pytest.raises(ValueError, match="'extra', expected one of .*year"):
    make("bm25", filters={"extra": ("x",)})


def test_the_text_of_a_filter():
  parse = filters.parse
  assert parse("") == {}
  assert parse('{"year": 2018}') == {"year": ("2018",)}
  assert parse('{"a": ["x", 1], "b": "y"}') == {"a": ("x", "1"), "b": ("y",)}
  for text in (
    *("year=2018", "[]", "{}", '{"a": []}', '{"a": null}', '{"a": [true]}'),
    *('{"a": {"b": 1}}', '{"a": [["x"]]}', "[" * 100_000),
  ):
    with pytest.raises(ValueError, match="retrieval.filter: found"):
      parse(text)


def test_odd_values_of_fields_are_found(odd_fields):
  # As JSON may have them, and a table of numbers with gaps makes its floats.
  for text, row in (
    ('{"\u00f6dd": "a\\u0000b"}', 0),
    ('{"\u00f6dd": "c\\ud800d"}', 1),
    ('{"\u00f6dd": 2018}', 2),
    ('{"\u00f6dd": 2018.0}', 2),
    ('{"\u00f6dd": 0.5}', 3),
    (json.dumps({"\u00f6dd": '\u00e9\u4e2d \\ "\n'}), 4),
  ):
    made = odd_fields(filters=filters.parse(text))
    assert search(made, "water", 9)[0] == row, text


@pytest.mark.parametrize(
  ("names", "sentence"),
  [
    (["source", "gone"], "no passage with the field 'gone'"),
    # Every row has it, without a value.
    (["extra"], "no passage with the field 'extra'"),
    (["year", "year"], "found 'year,year', expected different names"),
    ([""], "expected different names"),
  ],
)
def test_fields_that_no_row_has_are_refused(corpus, names, sentence):
  with pytest.raises(ValueError, match=sentence):
    filters.check_fields(corpus, names)


def test_a_field_that_is_no_text_stops_the_build(tmp_path):
  source = tmp_path / "c.jsonl"
  source.write_text('{"id": "x", "text": "a b", "source": ["wiki"]}\n')
  corpus = passages.prepare(source, tmp_path / "prepared")
  with pytest.raises(ValueError, match="'x': found .*'wiki'.* in field 'so"):
    filters.of_row(corpus, 0, ["source"])


@pytest.mark.parametrize("kind", ["lexical", "index", "http"])
def test_retrievers_that_cannot_filter_refuse(kind):
  values = {"index": {"index": "i"}, "http": {"url": "http://h"}}.get(kind, {})
  c = config.RetrievalConfig(kind=kind, filter='{"a": "b"}', **values)
  with pytest.raises(ValueError, match="with kind milvus or postgres only"):
    retrieval_settings.validate(c)
