"""Texts of others on a terminal, which obeys what they may contain."""

from __future__ import annotations

import unicodedata

_REPLACEMENT = "\ufffd"
# Control characters and halves of surrogate pairs.
_CATEGORIES = ("Cc", "Cs")
# They reorder the text around them: https://www.unicode.org/reports/tr9/
_BIDIRECTIONAL = frozenset(
  "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)


def printable(text: str, *, keeps_lines: bool = False) -> str:
  """Replaces what a terminal would obey by U+FFFD.

  Args:
    text: any text, such as the name of a file or a server's error.
    keeps_lines: whether line ends and tabs stay.
  """
  allowed = "\n\t" if keeps_lines else ""
  if text.isprintable():
    return text
  return "".join(
    _REPLACEMENT
    if _is_obeyed(character) and character not in allowed
    else character
    for character in text
  )


def _is_obeyed(character: str) -> bool:
  category = unicodedata.category(character)
  return category in _CATEGORIES or character in _BIDIRECTIONAL
