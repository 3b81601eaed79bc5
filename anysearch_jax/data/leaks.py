"""Which training questions ask what is held out, however they are written."""

from __future__ import annotations

import re
import unicodedata

from anysearch_jax.environment import scoring

# Signs for a quotation mark or a minus that Unicode does not call punctuation.
_ASCII = str.maketrans({**dict.fromkeys("´ʹʻʼʽ˴", "'"), "−": "-", "﹣": "-"})
_ACCENTS = re.compile("[\u0300-\u036f]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def key(question: str) -> str:
  """The same text for questions that only differ in how they are written.

  Case, punctuation, articles, white space, accents and the forms of characters
  do not count: `Beyoncé’s “Halo” – who?` is `beyonceshalowho`. This is for
  comparing only; questions are stored as they are.
  """
  text = unicodedata.normalize("NFKC", question.translate(_ASCII))
  text = scoring.normalize_answer(text).casefold()
  text = "".join(c for c in text if not _silent(c))
  text = unicodedata.normalize("NFKD", _ARTICLES.sub(" ", text))
  # Dashes join words or part them: "well-known" is "well known".
  return "".join(_ACCENTS.sub("", text).split())


def _silent(character: str) -> bool:
  """Punctuation and what is not seen, as a soft hyphen."""
  kind = unicodedata.category(character)
  return kind.startswith("P") or kind == "Cf"
