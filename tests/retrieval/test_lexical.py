"""BM25 in memory."""

from __future__ import annotations

import asyncio

import hypothesis
import numpy as np
import pytest
import retrieval_cases as cases
from hypothesis import strategies as st

from anysearch_jax import types
from anysearch_jax.retrieval import lexical


def passages(*texts: str) -> list[types.Passage]:
  """Parses `title: text` lines into passages."""
  return [
    types.Passage(str(i), *text.split(": ")) for i, text in enumerate(texts)
  ]


def retriever(*texts: str) -> lexical.LexicalRetriever:
  return lexical.LexicalRetriever({"": passages(*texts)})


def ids(found) -> list[str]:
  return [passage.id for passage in found]


WORDS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5)


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(st.lists(WORDS, min_size=1, max_size=6), WORDS)
def test_scores_and_order_are_bm25s(documents, query):
  corpus = [
    types.Passage(str(i), words[0], " ".join(words[1:]))
    for i, words in enumerate(documents)
  ]
  search = lexical.LexicalRetriever({"": corpus}).lookup
  # A word of the title counts three times.
  indexed = [2 * words[:1] + words for words in documents]
  expected = cases.bm25(indexed, query, k1=1.5, b=0.75)
  found = search(" ".join(query), len(documents))
  scores = [passage.score for passage in found]
  assert scores == sorted(scores, reverse=True)
  assert {int(p.id) for p in found} == set(np.flatnonzero(expected))
  for passage in found:
    assert passage.score == pytest.approx(expected[int(passage.id)], rel=1e-5)


def test_equal_scores_keep_the_order_of_the_corpus():
  search = retriever(*["kel: born tovi"] * 9, "mar: seat tovi").lookup
  assert ids(search("kel born", 9)) == [str(i) for i in range(9)]
  assert ids(search("kel born", 2)) == ["0", "1"]


def test_a_title_outweighs_a_mention():
  texts = ("mar: mentor kel", "kel: also here there", "ral: mentor mar")
  assert ids(retriever(*texts).lookup("kel", 3)) == ["1", "0"]


def test_words_are_compared_in_lower_case_without_punctuation():
  search = retriever('"Kel": Born, in Tovi.', "mar: seat").lookup
  assert ids(search("KEL's tovi?", 3)) == ["0"]
  for query in ("", "?!", "unheard of"):
    assert search(query, 3) == ()
  for texts in ((), ("?: !",)):
    assert retriever(*texts).lookup("kel", 3) == ()


def test_passages_are_returned_unchanged_except_for_the_score():
  made = retriever("kel: born tovi", "mar: seat")
  (found,) = made.lookup("kel", 3)
  assert asyncio.run(made.search(types.SearchRequest("kel", 3))) == (found,)
  assert found == types.Passage("0", "kel", "born tovi", found.score)
  assert found.score > 0


def test_a_corpus_is_read_once_when_first_searched():
  read = []

  def corpora(name):
    read.append(name)
    return passages(f"{name}: born tovi")

  search = lexical.LexicalRetriever(corpora).lookup
  assert read == []
  assert [p.title for p in search("tovi", 1, "one")] == ["one"]
  assert [p.title for p in search("tovi", 1, "two")] == ["two"]
  search("born", 1, "one")
  assert read == ["one", "two"]


def test_invalid_requests_raise_with_a_message():
  with pytest.raises(ValueError, match="no corpus 'wiki'; there are: ''"):
    retriever("kel: born").lookup("kel", 3, "wiki")
  with pytest.raises(ValueError, match="Found k=0"):
    retriever("kel: born").lookup("kel", 0)


def test_an_identity_is_of_the_settings_and_every_passage():
  one = retriever("a: b c", "d: e")
  identity = one.identity()
  assert identity == one.identity()
  assert (identity["kind"], identity["passages"]) == ("bm25", 2)
  others = [
    retriever("a: b c", "d: f"),
    retriever("a: b c"),
    retriever("d: e", "a: b c"),
    retriever("a b: c", "d: e"),
  ]
  assert all(other.identity() != identity for other in others)
  assert one.identity(("", ""))["passages"] == 4
