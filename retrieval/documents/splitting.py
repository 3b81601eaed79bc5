"""Splits a text into passages at headings, paragraphs and sentences.

semantic-text-splitter (Rust) finds the largest units that fit: of Markdown its
sections and blocks, of any text paragraphs, sentences and words.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from typing import Any

import semantic_text_splitter

_TEXT = semantic_text_splitter.TextSplitter
_MARKDOWN = semantic_text_splitter.MarkdownSplitter
# Bytes of UTF-8 that a token has: of English about four characters, of Chinese
# about one and a half.
_BYTES = 4
# Time grows with the square of a word's length; data in texts has long ones.
_LONG_WORD = re.compile(r"\S{1000}")
# A fence of code, in which `#` begins no heading; `# heading`; and a heading
# that is underlined.
_MARKS = re.compile(
  r"^ {0,3}(?:(```+|~~~+)|(#{1,6})[ \t]+(\S[^\n]*)$"
  r"|([^\s#>|+*=-][^\n]*)\n {0,3}(={3,}|-{3,})[ \t]*$)",
  re.M,
)
_FRONT = re.compile(r"\A---[ \t]*\n(.*?\n)---[ \t]*\n", re.S)
_FRONT_TITLE = re.compile(r"^title:([^\n]*)$", re.M)


class Splitter:
  """Splits texts.

  Args:
    tokens: the most tokens of a passage.
    overlap: the most tokens that a passage repeats of the one before it.
    tokenizer: counts the tokens, a `tokenizers.Tokenizer` that cuts nothing;
      None: they are estimated from characters.
  """

  def __init__(self, tokens: int, overlap: int, tokenizer: Any = None):
    self._tokens, self._overlap = tokens, overlap
    self._by_tokens = tokenizer and {
      kind: kind.from_huggingface_tokenizer(tokenizer, tokens, overlap)
      for kind in (_TEXT, _MARKDOWN)
    }

  def __call__(
    self, text: str, *, is_markdown: bool
  ) -> Iterator[tuple[str, str]]:
    """Yields the passages of a text, each after the headings above it.

    Passages of headings alone, or without any word, are left out.

    Args:
      text: any text.
      is_markdown: whether `#` begins a heading.
    """
    text = _LONG_WORD.sub(r"\g<0>\n", text)
    of_kind: Any = _MARKDOWN if is_markdown else _TEXT
    chains: list[tuple[int, str]] = []
    if is_markdown:
      above: list[tuple[int, str]] = []
      for at, level, words in _headings(text):
        above = [each for each in above if each[0] < level] + [(level, words)]
        chains.append((at, " > ".join(words for _, words in above)))
    if self._by_tokens:
      splitter = self._by_tokens[of_kind]
    else:
      each = _BYTES * len(text) / max(len(text.encode()), 1)
      splitter = of_kind(int(self._tokens * each), int(self._overlap * each))
    for at, words in splitter.chunk_indices(text):
      last = bisect.bisect_right(chains, at, key=lambda chain: chain[0])
      rest = _MARKS.sub("", words) if is_markdown else words
      if re.search(r"\w", rest):
        yield chains[last - 1][1] if last else "", words


def title(text: str) -> str:
  """Returns the title in the front matter of Markdown, or its first heading."""
  front = _FRONT.match(text)
  if front and (named := _FRONT_TITLE.search(front[1])):
    return named[1].strip(" \t\"'")
  return next((words for _, _, words in _headings(text)), "")


def _headings(text: str) -> Iterator[tuple[int, int, str]]:
  """Yields offset, level from 1, and words of the headings of Markdown."""
  fence = ""
  front = _FRONT.match(text)
  for match in _MARKS.finditer(text, front.end() if front else 0):
    mark, hashes, words, line, under = match.groups()
    if mark:
      fence = mark if not fence else "" if mark.startswith(fence) else fence
    elif not fence:
      level = len(hashes) if hashes else 1 if under[0] == "=" else 2
      yield match.start(), level, (words or line).strip(" \t#¶")
