"""Turns a text into the terms that BM25 counts, in about thirty languages.

The chain is that of Lucene's analyzers: words in lower case, without the stop
words of the language, reduced to their stems by Snowball (English by Porter's
first stemmer and Lucene's 33 stop words). Scripts without spaces between words
are cut into pairs of neighbouring characters, as Lucene's CJKAnalyzer does, and
into single characters, so that a query of one character finds something.

People's documents have an analysis of their own, `DocumentAnalyzer`; that of
corpora stays as it is, because published numbers depend on it.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import itertools
import os
import re
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import regex
import Stemmer

from anysearch_jax.config import settings
from anysearch_jax.host import plugins

DEFAULT = "english"
# `plain` keeps runs of letters as they are; the others have no stemmer and no
# stop words.
_UNSTEMMED = ("plain", "any", "chinese", "japanese", "korean")
# Snowball lists older stemmers of English and Dutch under these names.
_OLDER_STEMMERS = ("porter", "dutch_porter")
LANGUAGES = (
  *_UNSTEMMED,
  *(name for name in Stemmer.algorithms() if name not in _OLDER_STEMMERS),
)
# Only this file of bm25s is run: importing the package computes with JAX, which
# would reserve the memory of a GPU on which another program serves a model.
_BM25S = importlib.util.find_spec("bm25s")
assert _BM25S is not None and _BM25S.origin is not None
_BM25S_STOPWORDS = plugins.run_file(
  os.path.join(os.path.dirname(_BM25S.origin), "stopwords.py")
)
_STOP_WORDS = {"english": _BM25S_STOPWORDS.STOPWORDS_EN} | {
  language: getattr(_BM25S_STOPWORDS, f"STOPWORDS_{language.upper()}")
  for language in (
    "danish",
    "dutch",
    "french",
    "german",
    "italian",
    "norwegian",
    "portuguese",
    "russian",
    "spanish",
    "swedish",
    "turkish",
  )
}
# Stop words by which a language is detected: all, but one-letter words, which
# formulas and lists have too.
_DETECTED = {
  language: frozenset(word for word in stop_words if len(word) > 1)
  for language, stop_words in _STOP_WORDS.items()
}
# How often stop words of a language must occur for each of the default's.
_CLEAR = 1.2
# A word of English may be a stop word elsewhere, as `dog` is in Danish.
_LEAST_WORDS = 3
# The least share of stop words among the words of a language.
_LEAST_SHARE = 0.05
# The least share of passages in a language of documents: of English ones, 0.1 %
# were taken for Dutch.
_LEAST_PASSAGES = 0.005
_PLAIN_WORD = re.compile(r"\w+")
# Python's own `\w` ends words of Hindi and Tamil at vowel signs.
_WORD = regex.compile(r"\w+")
# In English, what follows an apostrophe belongs to the word (don't, people's).
_ENGLISH_WORD = regex.compile(r"\w+(?:'\w+)?")
# The same in ASCII, several times faster.
_ASCII_WORD = re.compile(r"\w+", re.ASCII)
_ENGLISH_ASCII_WORD = re.compile(r"\w+(?:'\w+)?", re.ASCII)
_UNSPACED = regex.compile(
  r"([\p{Han}\p{Hiragana}\p{Katakana}ー\p{Hangul}"
  r"\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]+)"
)
# Unlike in Lucene, O’Brien equals O'Brien: people type a straight apostrophe,
# and documents have a curly one.
_EQUIVALENTS = str.maketrans("İ’", "i'")
# Names of analyses of documents begin so; their languages follow.
_DOCUMENTS = "documents:"
# Marks above and below letters, and letters that have theirs within.
_MARKS = re.compile("[\u0300-\u036f]+")
_MARKED_LETTERS = str.maketrans(
  {"ß": "ss", "ø": "o", "ł": "l", "æ": "ae", "œ": "oe", "đ": "d", "ı": "i"}
)
# The words of names such as `getUserName`, `HTTPServer` and `my_func_name`.
_NAME_WORD = regex.compile(r"\p{Lu}+(?!\p{Ll})|\p{Lu}?[^\p{Lu}_]+")
# Number of words whose terms an analyzer caches.
_CACHED_WORDS = 1 << 18


def words(text: str) -> list[str]:
  """Returns the runs of letters, digits and underscores, in lower case."""
  return _PLAIN_WORD.findall(text.lower())


def detect_language(texts: Iterable[str]) -> str:
  """Returns the language whose stop words texts have most of, else `DEFAULT`.

  These are the languages of Europe that have a list of stop words here.
  """
  counts = collections.Counter(word for text in texts for word in words(text))
  shares = {
    language: sum(counts[word] for word in stop_words)
    for language, stop_words in _DETECTED.items()
  }
  language = max(shares, key=lambda name: shares[name])
  least = max(_CLEAR * shares[DEFAULT], _LEAST_SHARE * counts.total())
  distinct = len(_DETECTED[language] & counts.keys())
  is_clear = distinct >= _LEAST_WORDS and shares[language] > least
  return language if is_clear else DEFAULT


class Analyzer:
  """Makes the terms of texts in one language; thread-safe.

  Args:
    language: one of `LANGUAGES`.

  Raises:
    ValueError: the language is unknown.
  """

  def __init__(self, language: str = DEFAULT):
    settings.require("language", language, LANGUAGES)
    self.language = language
    english = language == "english"
    self._ascii = _ENGLISH_ASCII_WORD if english else _ASCII_WORD
    self._words = _ENGLISH_WORD if english else _WORD
    self._stop_words = frozenset(_STOP_WORDS.get(language, ()))
    self._stem = str
    if language not in _UNSTEMMED:
      stemmer = Stemmer.Stemmer("porter" if english else language)
      self._stem = stemmer.stemWord
    self._cache: dict[str, tuple[str, ...]] = {}
    self._lock = threading.Lock()  # Stemmers are not thread-safe.

  def __call__(self, text: str) -> list[str]:
    """Returns the terms of a text in its order, repeated ones too."""
    if self.language == "plain":
      return words(text)
    text_terms: list[str] = []
    for word in self.words(text, lower=True):
      terms = self._cache.get(word)
      text_terms += self._cache_terms(word) if terms is None else terms
    return text_terms

  def query(self, text: str) -> list[tuple[str, ...]]:
    """Returns the terms of a query, each alone; see `DocumentAnalyzer`."""
    return [(term,) for term in self(text)]

  def words(self, text: str, *, lower: bool) -> list[str]:
    """Returns the words of a text, in lower case if `lower`."""
    pattern = self._ascii
    if not text.isascii():
      text = unicodedata.normalize("NFKC", text).translate(_EQUIVALENTS)
      pattern = self._words
    if self.language == "turkish":
      text = text.replace("I", "ı")
      pattern = self._words
    return pattern.findall(text.lower() if lower else text)

  def word_terms(self, word: str) -> tuple[str, ...]:
    """Returns the terms of a word in lower case."""
    terms = self._cache.get(word)
    return self._cache_terms(word) if terms is None else terms

  def is_stop_word(self, word: str) -> bool:
    """Returns whether a word in lower case has no term of its own."""
    return word in self._stop_words

  def _cache_terms(self, word: str) -> tuple[str, ...]:
    """Returns the terms of a word and caches them."""
    with self._lock:
      terms = tuple(self._terms(word))
      if len(self._cache) >= _CACHED_WORDS:
        self._cache.clear()
      self._cache[word] = terms
    return terms

  def _terms(self, word: str) -> Iterator[str]:
    segments = [word] if word.isascii() else _UNSPACED.split(word)
    for i, segment in enumerate(segments):
      if i % 2:  # The separator that `split` matched: a script without spaces.
        yield from segment
        yield from map("".join, itertools.pairwise(segment))
        continue
      if self.language == "english" and segment.endswith("'s"):
        segment = segment[:-2]
      if (
        segment
        and segment not in self._stop_words
        and (stem := self._stem(segment))
      ):
        yield stem


class DocumentAnalyzer:
  """Makes the terms of people's documents; thread-safe.

  Besides those of `Analyzer`, a word with marks has the terms of the word
  without them (`cafe` finds `café`), and a name in code those of its words.
  Each passage is analyzed in its own language.

  Args:
    languages: the languages of the documents, each one of `LANGUAGES`.

  Raises:
    ValueError: a language is unknown.
  """

  def __init__(self, languages: Sequence[str]):
    self._analyzers = tuple(get_analyzer(name) for name in languages)
    self._groups = functools.lru_cache(_CACHED_WORDS)(self._word_groups)

  def __call__(self, text: str) -> list[str]:
    """Returns the terms of a passage in its order, repeated ones too."""
    return [term for group in self.query(text) for term in group]

  def query(self, text: str) -> list[tuple[str, ...]]:
    """Returns the terms of a text in groups, of which the best one counts.

    A group has the terms of a word in the languages that the text may be in.
    """
    text_words = self._words(text)
    analyzers = self._likeliest(text_words)
    return [
      group for word in text_words for group in self._groups(word, analyzers)
    ]

  def _words(self, text: str) -> list[str]:
    # What follows an apostrophe belongs to an English word only.
    return self._analyzers[0].words(text, lower=False)

  def _likeliest(self, text_words: Sequence[str]) -> tuple[Analyzer, ...]:
    """Returns the analyzers of the languages that have most stop words.

    These are all of them, if no word is one.
    """
    if len(self._analyzers) == 1:
      return self._analyzers
    counts = collections.Counter(word.lower() for word in text_words)
    hits = [
      sum(counts[word] for word in _DETECTED.get(analyzer.language, ()))
      for analyzer in self._analyzers
    ]
    most_hits = max(hits)
    pairs = zip(self._analyzers, hits, strict=True)
    return tuple(analyzer for analyzer, count in pairs if count == most_hits)

  def _word_groups(
    self, word: str, analyzers: tuple[Analyzer, ...]
  ) -> tuple[tuple[str, ...], ...]:
    """Returns the groups of a word, and of the words that it is made of."""
    groups = [*_form_groups(word.lower(), analyzers)]
    name_words = [x for x in _NAME_WORD.findall(word) if x != "'"]
    if len(name_words) > 1 and not _UNSPACED.search(word):
      for name_word in name_words:
        groups += _form_groups(name_word.lower(), analyzers)
    return tuple(groups)


def _form_groups(
  word: str, analyzers: tuple[Analyzer, ...]
) -> Iterator[tuple[str, ...]]:
  """Yields the groups of a word in lower case: one, or its characters'."""
  forms = [word]
  if not word.isascii():
    decomposed = unicodedata.normalize("NFD", word.translate(_MARKED_LETTERS))
    forms.append(unicodedata.normalize("NFC", _MARKS.sub("", decomposed)))
  terms: dict[str, None] = {}
  for analyzer in analyzers:
    if not analyzer.is_stop_word(word):
      for form in forms:
        terms |= dict.fromkeys(analyzer.word_terms(form))
  if _UNSPACED.search(word):
    yield from ((term,) for term in terms)
  elif terms:
    yield tuple(terms)


def documents_analysis(languages: Iterable[str]) -> str:
  """Returns the name of the analysis of documents, for `get_analyzer`.

  Args:
    languages: of each passage, or of some; the rarest ones are left out, which
      may be mistakes.
  """
  counts = collections.Counter(languages)
  least = _LEAST_PASSAGES * counts.total()
  names = [name for name, count in counts.most_common() if count >= least]
  return _DOCUMENTS + "+".join(names)


@functools.cache
def get_analyzer(name: str) -> Any:
  """Returns the analyzer of a name that this process shares.

  Args:
    name: one of `LANGUAGES`, or what `documents_analysis` returned.
  """
  if name.startswith(_DOCUMENTS):
    return DocumentAnalyzer(name.removeprefix(_DOCUMENTS).split("+"))
  return Analyzer(name)
