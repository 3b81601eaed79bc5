"""Collections of Milvus: what they find, filter and refuse."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import commands
import numpy as np
import pytest
import retrieval_cases as cases
import source_tree

from anysearch_jax import config, types
from anysearch_jax.launch import build_index, retrievers
from anysearch_jax.retrieval import filters, passages

SOURCES = ("wiki", "news", 'a "b" c', "it's")
COUNT = 400
# Other fields of a row, as JSON may have them.
ODD = ("a\0b", "c\ud800d", 2018.0, 0.5, '\u00e9\u4e2d \\ "\n')


def prepared(folder, rows):
  """Returns a corpus of dicts without ids."""
  folder.mkdir(exist_ok=True)
  source = folder / "c.jsonl"
  lines = (json.dumps({"id": str(i)} | row) for i, row in enumerate(rows))
  source.write_text("".join(line + "\n" for line in lines))
  return passages.prepare(source, folder / "prepared")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  rows = [
    {"title": f"Title {i}", "source": SOURCES[i % 4], "year": 2000 + i % 3}
    | {"text": f"Passage n{i} about {('water', 'fire')[i % 2]}", "extra": None}
    for i in range(COUNT)
  ]
  del rows[5]["year"]
  return prepared(tmp_path_factory.mktemp("corpus"), rows)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
  """A file of Milvus Lite."""
  pytest.importorskip("milvus_lite", reason="needs the extra [milvus]")
  return str(tmp_path_factory.mktemp("milvus") / "f.db")


@pytest.fixture(scope="module")
def collection(address):
  """Opens collections by their names."""
  return lambda name: milvus().Collection(address, name)


@pytest.fixture(scope="module")
def filled(collection, corpus):
  made = collection("filled")
  milvus().build(
    made, corpus, encoder=cases.Encoder(), fields=["year", "source"]
  )
  return made


@pytest.fixture(scope="module")
def make(filled):
  """Makes retrievers of the collection of the corpus, by their ranking."""

  def of(ranking="", **values):
    values = {"encoder": cases.Encoder()} | values
    return milvus().MilvusRetriever(filled, ranking=ranking, **values)

  return of


def milvus():
  return pytest.importorskip("anysearch_jax.retrieval.milvus")


def ask(retriever, *queries, k=3):
  asked = [types.SearchRequest(query, k) for query in queries]
  return asyncio.run(retriever.search_many(asked))


def ids(retriever, query, k):
  (answer,) = ask(retriever, query, k=k)
  return [int(passage.id) for passage in answer]


# Searches.


def test_words_find_the_passage_that_has_them(make, corpus):
  retriever = make()
  (first, *_), blank, unknown, odd = ask(
    retriever, "which passage is n77", " \n", "nothing-of-this", "\ud800 n5"
  )
  p = corpus[77]
  assert first == types.Passage("77", p.title, p.text, first.score)
  assert first.score > 0
  assert blank == unknown == ()
  assert odd[0].id == "5"
  assert retriever.counters == {"queries": 4, "failures": 0}
  with pytest.raises(ValueError, match="expected 1 or more"):
    ask(retriever, "a", k=0)


def test_hybrid_search_has_the_first_of_both(make, corpus):
  # The contents' own vector is nearest, and only row 9 has its number.
  (found,) = ask(make("hybrid"), corpus[9].contents)
  assert found[0].id == "9"
  assert found[0].score == pytest.approx(2 / 61)
  assert len(found) == 3


def allowed(i, chosen):
  year = None if i == 5 else str(2000 + i % 3)
  row = {"source": SOURCES[i % 4], "year": year}
  return all(row[field] in values for field, values in chosen.items())


CHOSEN = (
  {},
  {"source": ("wiki", "it's"), "year": ("2001",)},
  {"source": ('a "b" c',)},
  {"source": ("nothing",)},
)


@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
def test_searches_find_what_a_filter_allows(make, corpus, chosen):
  found = ids(make(filters=chosen), "passage about water", 500)
  # Every passage has a word of the query.
  assert set(found) == {i for i in range(COUNT) if allowed(i, chosen)}
  hybrid = ids(make("hybrid", filters=chosen), corpus[8].contents, 30)
  assert len(hybrid) == min(30, len(found)) and set(hybrid) <= set(found)
  encoder = cases.Encoder()
  x = encoder.passages(list(corpus.contents(0, COUNT))).astype(float)
  queries = [f"query {i}" for i in range(8)]
  scores = encoder.queries(queries).astype(float) @ x.T
  answers = ask(make("dense", filters=chosen), *queries, k=7)
  for answer, each in zip(answers, scores, strict=True):
    best = [i for i in np.argsort(-each).tolist() if allowed(i, chosen)][:7]
    assert [int(p.id) for p in answer] == best
    np.testing.assert_allclose([p.score for p in answer], each[best], atol=1e-5)


def test_odd_values_of_fields_are_found(collection, tmp_path):
  corpus = prepared(tmp_path, [{"text": "water", "\u00f6dd": v} for v in ODD])
  table = collection("odd")
  milvus().build(table, corpus, fields=["\u00f6dd"])
  for text, row in (
    ('{"\u00f6dd": "a\\u0000b"}', 0),
    ('{"\u00f6dd": "c\\ud800d"}', 1),
    ('{"\u00f6dd": 2018}', 2),
    ('{"\u00f6dd": 2018.0}', 2),
    ('{"\u00f6dd": 0.5}', 3),
    (json.dumps({"\u00f6dd": ODD[-1]}), 4),
  ):
    made = milvus().MilvusRetriever(table, filters=filters.parse(text))
    assert ids(made, "water", 9)[0] == row, text


def test_an_identity_names_corpus_encoder_ranking_and_filter(make, corpus):
  made = (make(), make("dense"), make("hybrid"), make(filters=CHOSEN[1]))
  found = [retriever.identity() for retriever in made]
  assert len({each["sha256"] for each in found}) == 4
  assert found[0]["corpus"]["sha256"] == corpus.sha256
  assert found[0]["fields"] == ["source", "year"]
  assert found[1]["encoder"] == {"dim": 16, "name": "hash"}
  assert found[3]["filter"]["year"] == ["2001"]


# Builds.


def test_a_build_that_stopped_resumes(collection, corpus, monkeypatch):
  class Dying(cases.Encoder):
    def passages(self, texts):
      if self.encoded >= 150:
        raise KeyboardInterrupt
      return super().passages(texts)

  table = collection("resumed")
  monkeypatch.setattr(milvus(), "_BATCH", 75)
  with pytest.raises(KeyboardInterrupt):
    milvus().build(table, corpus, encoder=Dying())
  with pytest.raises(ValueError, match="finish it, by anysearch build_index"):
    milvus().MilvusRetriever(table)
  encoder, told = cases.Encoder(), []
  for _ in range(2):  # The second one changes nothing.
    milvus().build(
      table, corpus, encoder=encoder, on_rows=lambda *a: told.append(a)
    )
  assert [done for done, _ in told] == [150, 225, 300, 375, 400, 400]
  assert encoder.encoded == 250 and table.count() == 400


def test_other_values_of_a_build_are_refused(
  collection, filled, corpus, tmp_path
):
  other = prepared(tmp_path, [{"text": "word"}])
  for corpus_, values, sentence in (
    (other, {}, "name another"),
    (corpus, {"fields": ["id"]}, "name another"),
    (corpus, {"fields": ["gone"]}, "no passage with the field 'gone'"),
  ):
    with pytest.raises(ValueError, match=sentence):
      milvus().build(filled, corpus_, encoder=cases.Encoder(), **values)
  with pytest.raises(ValueError, match="klingon"):
    milvus().build(collection("t"), corpus, language="klingon")
  with pytest.raises(ValueError, match="expected .*letters"):
    collection("a b")


@pytest.mark.parametrize(
  ("values", "sentence"),
  [
    ({"ranking": "best"}, "expected one of .*, dense, hybrid"),
    ({"ranking": "dense", "encoder": None}, "expected the one of .* filled"),
    ({"ranking": "dense", "encoder": cases.Encoder(name="o")}, "expected the"),
    ({"filters": {"extra": ("x",)}}, "'extra', expected one of .*year"),
  ],
)
def test_invalid_settings_of_a_search_are_refused(make, values, sentence):
  with pytest.raises(ValueError, match=sentence):
    make(**values)


def test_a_table_that_is_missing_is_refused(collection):
  with pytest.raises(ValueError, match="that is finished; build it"):
    milvus().MilvusRetriever(collection("gone"))


def test_a_collection_that_is_dropped_fails_searches(collection, tmp_path):
  table = collection("moved")
  milvus().build(table, prepared(tmp_path, [{"text": "word"}]))
  retriever = milvus().MilvusRetriever(table)
  table.client.drop_collection("moved")
  found = ask(retriever, "a word", "word")
  assert all(isinstance(each, types.RetrievalError) for each in found)
  assert retriever.counters == {"queries": 2, "failures": 2}


def test_a_file_that_another_process_has_open_is_named(tmp_path):
  milvus()
  program = (
    "import sys; from anysearch_jax.retrieval import milvus\n"
    "try: milvus.Collection(sys.argv[1], 'a')\n"
    "except ValueError as error: print(error)"
  )
  address = str(tmp_path / "held.db")
  milvus().Collection(address, "a")
  found = source_tree.python("-c", program, address)
  assert "another process has it open" in found.stdout
  assert "Traceback" not in found.stderr  # Of Milvus Lite.
  (tmp_path / "none.db").write_text("no folder")
  with pytest.raises(ValueError, match="cannot open .*none.db: .*File exists"):
    milvus().Collection(str(tmp_path / "none.db"), "a")


def test_the_command_builds_what_a_run_searches(address, tmp_path):
  source = cases.write(tmp_path / "c.jsonl", 50)
  address = address.replace("f.db", "g.db")
  assert not commands.run(
    *(build_index, "--kind=milvus", f"--corpus={source}", "--cache="),
    *(f"--address={address}", f"--output={tmp_path}", "--collection=made"),
  )
  c = config.RetrievalConfig(kind="milvus", milvus=address, collection="made")
  found = retrievers.make(config.ExperimentConfig(retrieval=c), None)
  assert ids(found, "number n7", 1) == [7]
  identity = found.identity()["identity"]
  assert identity["kind"] == "milvus"
  assert len(identity["corpus"]["sha256"]) == 64
  dense = dataclasses.replace(c, ranking="dense")
  with pytest.raises(ValueError, match="found the encoder None.* None; name"):
    retrievers.make(config.ExperimentConfig(retrieval=dense), None)


# Filters.


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


@pytest.mark.parametrize(
  ("names", "sentence"),
  [
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
  corpus = prepared(tmp_path, [{"text": "a b", "source": ["wiki"]}])
  with pytest.raises(ValueError, match="'0': found .*'wiki'.* in field 'so"):
    filters.row_fields(corpus, 0, ["source"])


def test_retrievers_that_cannot_filter_refuse():
  c = config.RetrievalConfig(kind="http", filter='{"a": "b"}', url="http://h")
  with pytest.raises(ValueError, match="with kind milvus only"):
    retrievers.validate(c)
