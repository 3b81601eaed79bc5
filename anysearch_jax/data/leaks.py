"""Normalises questions to find held-out ones in training data."""

from __future__ import annotations

import re
import unicodedata

from anysearch_jax.environment import scoring

# Quotation marks and minus signs that are not punctuation in Unicode.
_ASCII = str.maketrans({**dict.fromkeys("´ʹʻʼʽ˴", "'"), "−": "-", "﹣": "-"})
_ACCENTS = re.compile("[\u0300-\u036f]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def key(question: str) -> str:
  """Returns a key that is equal for questions that differ only in spelling.

  The key ignores case, punctuation, articles, white space, accents and
  compatibility forms of characters: `Beyoncé’s “Halo” – who?` becomes
  `beyonceshalowho`. It is used for comparison only; stored questions keep
  their text.
  """
  text = unicodedata.normalize("NFKC", question.translate(_ASCII))
  text = scoring.normalize_answer(text).casefold()
  text = "".join(c for c in text if not _silent(c))
  text = unicodedata.normalize("NFKD", _ARTICLES.sub(" ", text))
  # White space is removed, so that "well-known" equals "well known".
  return "".join(_ACCENTS.sub("", text).split())


def _silent(character: str) -> bool:
  """Whether a character is punctuation or invisible, such as a soft hyphen."""
  kind = unicodedata.category(character)
  return kind.startswith("P") or kind == "Cf"
