"""Terms of texts as Lucene 9.9 makes them, and of documents."""

from __future__ import annotations

import pytest

from anysearch_jax.retrieval import analysis

# What org.apache.lucene.analysis.en.EnglishAnalyzer makes of them.
ENGLISH = {
  "The dogs aren't running to Paris": ["dog", "aren't", "run", "pari"],
  "who told the story of the prodigal son": (
    ["who", "told", "stori", "prodig", "son"]
  ),
  "people's John’s wi-fi foo_bar": ["peopl", "john", "wi", "fi", "foo_bar"],
  "Generalizations, relational; conditional!": ["gener", "relat", "condit"],
}


@pytest.mark.parametrize("text", ENGLISH)
def test_english_terms_are_those_of_lucene(text):
  assert analysis.Analyzer("english")(text) == ENGLISH[text]


def test_both_apostrophes_make_the_same_terms():
  # Lucene keeps them apart, and a question from a phone finds no O'Brien.
  made = analysis.Analyzer("english")("O'Brien O’Brien don’t")
  assert made == ["o'brien", "o'brien", "don't"]


# The pairs are those of org.apache.lucene.analysis.cjk.CJKAnalyzer.
PAIRS = {
  "北京大学位于北京": ["北京", "京大", "大学", "学位", "位于", "于北", "北京"],
  "ｶﾀｶﾅ": ["カタ", "タカ", "カナ"],
  "東京都": ["東京", "京都"],
  "한국어 조선말": ["한국", "국어", "조선", "선말"],
}


@pytest.mark.parametrize("text", PAIRS)
@pytest.mark.parametrize("language", ["english", "any", "chinese", "german"])
def test_scripts_without_spaces_are_cut_into_pairs_and_characters(
  text, language
):
  terms = analysis.Analyzer(language)(text)
  assert [t for t in terms if len(t) == 2] == PAIRS[text]
  assert {t for t in terms if len(t) == 1} == set("".join(PAIRS[text]))
  assert {len(t) for t in terms} == {1, 2}


@pytest.mark.parametrize(
  ("language", "text", "terms"),
  [
    ("english", "iPhone手机 2号", ["iphon", "手", "机", "手机", "2", "号"]),
    ("french", "l'homme qui mangeait", ["homm", "mang"]),
    ("german", "Die Häuser der Stadt", ["haus", "stadt"]),
    ("russian", "в городах", ["город"]),
    ("turkish", "İSTANBUL IŞIK", ["istanbul", "ışık"]),
    # Vowel signs are parts of words.
    ("any", "हिन्दी भाषा", ["हिन्दी", "भाषा"]),
    ("any", "Cafe\u0301 ＡＢＣ", ["café", "abc"]),
    ("plain", "The dogs' 北京", ["the", "dogs", "北京"]),
    ("english", "the of 's ?!", []),
    ("english", "", []),
    ("english", "\ud800 \0", []),
  ],
)
def test_terms_of_a_language(language, text, terms):
  analyzer = analysis.Analyzer(language)
  assert analyzer(text) == terms
  assert analyzer(text) == terms  # From memory.


@pytest.mark.parametrize(
  ("language", "text"),
  [
    ("german", "Der Mieter gibt die Wohnung zurück und zahlt die Miete."),
    (
      "french",
      "Le locataire rend les clés et le propriétaire paie la caution.",
    ),
    (
      "dutch",
      "De huurder geeft de sleutels terug en betaalt het deel van de huur.",
    ),
    ("english", "The tenant returns the keys and pays the rest."),
    ("english", "def main(): return lease"),
    ("english", "契約は三月三十一日に終わります。"),
    ("english", ""),
  ],
)
def test_a_language_is_detected_by_its_stop_words(language, text):
  assert analysis.detect_language([text]) == language


@pytest.mark.parametrize(
  ("text", "terms"),
  [
    ("the café", ["café", "cafe"]),
    ("Łódź straße", ["łódź", "lodz", "straße", "strass"]),
    ("my_func_name", ["my_func_nam", "my", "func", "name"]),
    ("getUserNames", ["getusernam", "get", "user", "name"]),
    ("HTTPServer2", ["httpserver2", "http", "server2"]),
    (
      "don't O'Brien 北京",
      ["don't", "o'brien", "o", "brien", "北", "京", "北京"],
    ),
    ("__init__ I USA Emma's", ["__init__", "i", "usa", "emma"]),
  ],
)
def test_documents_have_terms_without_marks_and_of_names_in_code(text, terms):
  assert analysis.get_analyzer("documents:english")(text) == terms


def test_each_passage_of_documents_is_analyzed_in_its_language():
  name = analysis.documents_analysis(["english"] * 200 + ["german", "dutch"])
  assert name == "documents:english"  # The others may be mistakes.
  name = analysis.documents_analysis(["english"] * 99 + ["german"])
  assert name == "documents:english+german"
  analyzer = analysis.get_analyzer(name)
  assert analyzer("Die Mietverträge der Häuser") == ["mietvertrag", "haus"]
  assert analyzer("The war of the houses") == ["war", "hous"]
  assert analyzer.query("Mietverträge Häuser") == [
    ("mietverträg", "mietvertrag"),
    ("häuser", "hauser", "haus"),
  ]
