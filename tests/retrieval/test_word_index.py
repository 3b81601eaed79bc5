"""The index of words ranks by BM25, by rows where scores are equal."""

from __future__ import annotations

import json
import os
import pathlib

import numpy as np
import pytest
import retrieval_cases as cases
import tantivy

from anysearch_jax.retrieval import analysis, passages
from anysearch_jax.retrieval.index import search, vectors, word_index

SHARED = pathlib.Path(
  os.environ.get(
    "ANYSEARCH_DATA", pathlib.Path(__file__).parents[3] / "shared" / "data"
  )
)
TEXTS = [
  '"Iron"\nIron is a metal; iron rusts.',
  '"Gold"\nGold does not rust.',
  '"Tea"\nTea is a drink.',
  '"Tea"\nTea is a drink.',
]


@pytest.fixture
def words(tmp_path):
  word_index.write(tmp_path / "words", TEXTS, language="plain")
  return word_index.WordIndex(tmp_path / "words")


def scores_by_formula(query, texts=TEXTS):
  """Returns Tantivy's BM25, k1 + 1 times Lucene's; of up to 40 words."""
  documents = [analysis.words(text) for text in texts]
  return 2.2 * cases.bm25(documents, analysis.words(query))


@pytest.mark.parametrize(
  "query", ["iron", "Does GOLD rust?", "tea", "a drink of iron", "is is tea"]
)
def test_words_rank_as_bm25_does(words, query):
  expected = scores_by_formula(query)
  rows = [i for i in np.argsort(-expected, kind="stable") if expected[i] > 0]
  for k in (1, 2, 3, 10):
    (hits,) = words.search([query], k)
    assert hits.rows.tolist() == rows[:k]
    assert (hits.rows.dtype, hits.scores.dtype) == (np.int64, np.float32)
    np.testing.assert_allclose(hits.scores, expected[rows[:k]], rtol=1e-5)


@pytest.fixture(scope="module")
def segments(tmp_path_factory):
  """Texts with many equal ones, and their index in several segments."""
  rng = np.random.default_rng(0)
  texts = [
    " ".join(f"w{n}" for n in rng.zipf(1.5, rng.integers(1, 40)) if n < 3000)
    for _ in range(1_500)
  ]
  texts = [*texts, "twin words", *texts[:500], *["twin words"] * 1000]
  folder = tmp_path_factory.mktemp("segments")
  word_index.write(folder, texts, language="plain")
  index = tantivy.Index.open(str(folder))
  # A build whose texts do not fit into memory leaves segments in any order.
  writer = index.writer(15_000_000, num_threads=1)
  writer.delete_all_documents()
  for some in np.array_split(rng.permutation(len(texts)), 5):
    for row in some.tolist():
      document = tantivy.Document()
      document.add_text("terms", " ".join(analysis.words(texts[row])))
      document.add_unsigned("row", row)
      writer.add_document(document)
    writer.commit()
  writer.wait_merging_threads()
  index.reload()
  assert index.searcher().num_segments == 5
  info = json.loads((folder / "words.json").read_text())
  (folder / "words.json").write_text(json.dumps(info | {"sha256": {}}))
  return texts, folder


def test_equal_scores_are_in_the_order_of_rows(segments):
  texts, folder = segments
  index = word_index.WordIndex(folder)
  for query in ("twin", "w1", "w7 w2 w7", "w30 words", "w900 w3 w1"):
    expected = scores_by_formula(query, texts)
    for k in (1, 5, 1300):
      (hits,) = index.search([query], k)
      assert len(hits.rows) == min(k, int((expected > 0).sum()))
      np.testing.assert_allclose(hits.scores, expected[hits.rows], rtol=1e-5)
      np.testing.assert_allclose(
        hits.scores, np.sort(expected)[::-1][: len(hits.rows)], rtol=1e-5
      )
      order = np.lexsort((hits.rows, -hits.scores))
      assert order.tolist() == list(range(len(order)))
  assert index.search(["twin"], 3)[0].rows.tolist() == [1500, 2001, 2002]


def test_query_without_a_common_word_has_no_hit(words):
  for hits in words.search(["", "   ", "silver", "?!", "\ud800", "\0"], 3):
    assert hits.rows.tolist() == []


@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    ({"sha256": {"meta.json": "0"}}, "meta.json differs from what was written"),
    ({"sample": {"running": ["runn"]}}, "stemmer .* is another version"),
    ({"count": 5}, "found 4 rows"),
    ({"language": None}, "language"),
  ],
)
def test_damaged_words_are_refused(words, tmp_path, change, sentence):
  path = tmp_path / "words" / "words.json"
  info = json.loads(path.read_text()) | change
  kept = {k: v for k, v in info.items() if v is not None}
  path.write_text(json.dumps(kept))
  with pytest.raises(vectors.DamagedError, match=f"{sentence}.*build it again"):
    word_index.WordIndex(path.parent)


def test_passages_without_a_word_are_refused(tmp_path):
  with pytest.raises(ValueError, match="Found no word"):
    word_index.write(tmp_path, ["?", "!"])
  # What a failed or killed builder left is written anew.
  word_index.write(tmp_path, ["words"])
  assert word_index.WordIndex(tmp_path).count == 1


# Mean share of the gold passages among the first 2 and 5 that Lucene 9.9 finds
# with its EnglishAnalyzer and BM25Similarity(.9, .4).
LUCENE = {
  "hotpotqa_dev": (0.575, 0.749),
  "2wikimultihopqa_dev": (0.568, 0.709),
  "musique_dev": (0.351, 0.451),
}


@pytest.mark.skipif(
  not SHARED.is_dir(), reason=f"no folder {SHARED}; set ANYSEARCH_DATA to it"
)
def test_recall_on_multi_hop_questions_is_that_of_lucene(tmp_path):
  corpus = passages.prepare(SHARED / "corpus.jsonl.gz", tmp_path / "corpus")
  word_index.write(tmp_path / "words", corpus.contents(0, len(corpus)))
  index = search.SearchIndex(
    corpus, word_index.WordIndex(tmp_path / "words"), identity={}
  )
  for name in LUCENE:
    lines = (SHARED / "questions" / f"{name}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    golds = [set(map(str, row["metadata"]["gold_doc_ids"])) for row in rows]
    answers = index.search([row["question"] for row in rows], 5)
    found = [
      np.mean(
        [
          len({p.id for p in answer[:k]} & gold) / len(gold)
          for answer, gold in zip(answers, golds, strict=True)
          if gold
        ]
      )
      for k in (2, 5)
    ]
    # k1 and b differ: 1.2 and .75.
    np.testing.assert_allclose(found, LUCENE[name], atol=0.04)
