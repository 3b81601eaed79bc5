"""Turns a text into the terms that BM25 counts, in about thirty languages.

The chain is that of Lucene's analyzers: words in lower case, without the stop
words of the language, reduced to their stems by Snowball (English by Porter's
first stemmer and Lucene's 33 stop words). Scripts without spaces between words
are cut into pairs of neighbouring characters, as Lucene's CJKAnalyzer does, and
into single characters, so that a query of one character finds something.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import threading
import unicodedata
from collections.abc import Iterator

import regex
import Stemmer

from anysearch_jax.config import settings
from anysearch_jax.host import plugins

DEFAULT = "english"
# `plain`: runs of letters as they are; the others: no stems and no stop words.
_OTHERS = ("plain", "any", "chinese", "japanese", "korean")
# Snowball names the first stemmer of English and an older one of Dutch so.
_NO_LANGUAGE = ("porter", "dutch_porter")
LANGUAGES = (
  *_OTHERS,
  *(name for name in Stemmer.algorithms() if name not in _NO_LANGUAGE),
)
# The package would compute with JAX at its import, and so take the memory of a
# GPU from a model that another program serves there.
_BM25S = importlib.util.find_spec("bm25s")
assert _BM25S is not None and _BM25S.origin is not None
_STOPWORDS = plugins.run_file(
  os.path.join(os.path.dirname(_BM25S.origin), "stopwords.py")
)
_STOPS = {"english": _STOPWORDS.STOPWORDS_EN} | {
  language: getattr(_STOPWORDS, f"STOPWORDS_{language.upper()}")
  for language in (
    *("danish", "dutch", "french", "german", "italian", "norwegian"),
    *("portuguese", "russian", "spanish", "swedish", "turkish"),
  )
}
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
# Unlike in Lucene, O’Brien is O'Brien: people type one and documents have the
# other.
_SAME = str.maketrans("İ’", "i'")
# Words whose terms are kept, so that each is stemmed once.
_KEPT = 1 << 18


def words(text: str) -> list[str]:
  """Returns the runs of letters, digits and underscores, in lower case."""
  return _PLAIN_WORD.findall(text.lower())


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
    self._stops = frozenset(_STOPS.get(language, ()))
    self._stem = str
    if language not in _OTHERS:
      stemmer = Stemmer.Stemmer("porter" if english else language)
      self._stem = stemmer.stemWord
    self._kept: dict[str, tuple[str, ...]] = {}
    self._lock = threading.Lock()  # Stemmers are not thread-safe.

  def __call__(self, text: str) -> list[str]:
    """Returns the terms of a text in its order, repeated ones too."""
    if self.language == "plain":
      return words(text)
    pattern = self._ascii
    if not text.isascii():
      text = unicodedata.normalize("NFKC", text).translate(_SAME)
      pattern = self._words
    if self.language == "turkish":
      text = text.replace("I", "ı")
      pattern = self._words
    out: list[str] = []
    for word in pattern.findall(text.lower()):
      terms = self._kept.get(word)
      out += self._add(word) if terms is None else terms
    return out

  def _add(self, word: str) -> tuple[str, ...]:
    """Returns the terms of a word and keeps them."""
    with self._lock:
      terms = tuple(self._terms(word))
      if len(self._kept) >= _KEPT:
        self._kept.clear()
      self._kept[word] = terms
    return terms

  def _terms(self, word: str) -> Iterator[str]:
    parts = [word] if word.isascii() else _UNSPACED.split(word)
    for i, part in enumerate(parts):
      if i % 2:  # Of a script without spaces.
        yield from part
        yield from (part[at : at + 2] for at in range(len(part) - 1))
        continue
      if self.language == "english" and part.endswith("'s"):
        part = part[:-2]
      if part and part not in self._stops and (stem := self._stem(part)):
        yield stem


@functools.cache
def shared(language: str) -> Analyzer:
  """Returns the process's analyzer of a language; see `Analyzer`."""
  return Analyzer(language)
