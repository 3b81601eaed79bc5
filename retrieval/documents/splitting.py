"""Splits a document into passages at headings, paragraphs and sentences.

semantic-text-splitter (Rust) finds the largest units that fit: of Markdown its
sections and blocks, of any text paragraphs, sentences, words.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import semantic_text_splitter

# Bytes of UTF-8 that a token has: of English about four characters, of Chinese
# about one and a half.
_BYTES = 4
# Time grows with the square of a word's length; data in texts has long ones.
_LONG_WORD = re.compile(r"\S{1000}")
# A fence of code, in which `#` begins no heading; `# heading`; and a heading
# that is underlined.
_MARKS = re.compile(
  r"^ {0,3}(?:(```+|~~~+)|(#{1,6})[ \t]+(.+?)[ \t]*#*[ \t]*$"
  r"|([^\s#>|+*=-][^\n]*)\n {0,3}(={3,}|-{3,})[ \t]*$)",
  re.M,
)
_FRONT = re.compile(r"\A---[ \t]*\n(.*?\n)---[ \t]*\n", re.S)
_FRONT_TITLE = re.compile(r"^title:[ \t]*(.+?)[ \t]*$", re.M)


class Heading(NamedTuple):
  """A heading: its offset in the text, its level from 1, and its words."""

  at: int
  level: int
  words: str


class Piece(NamedTuple):
  """A passage: the headings above it, joined by " > ", and its text."""

  heading: str
  text: str


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
    self._tokenizer = tokenizer

  def __call__(self, text: str, *, is_markdown: bool) -> Iterator[Piece]:
    """Yields the passages of a text in order, without those of headings alone.

    Args:
      text: any text.
      is_markdown: whether `#` begins a heading.
    """
    text = _LONG_WORD.sub(r"\g<0>\n", text)
    found = headings(text) if is_markdown else []
    starts = [heading.at for heading in found]
    chains = _chains(found)
    for at, words in self._splitter(text, is_markdown).chunk_indices(text):
      last = bisect.bisect_right(starts, at)
      if is_markdown and not _body(words):
        continue
      yield Piece(chains[last - 1] if last else "", words)

  def _splitter(self, text: str, is_markdown: bool) -> Any:
    kind = (
      semantic_text_splitter.MarkdownSplitter
      if is_markdown
      else semantic_text_splitter.TextSplitter
    )
    if self._tokenizer is not None:
      return kind.from_huggingface_tokenizer(
        self._tokenizer, self._tokens, self._overlap
      )
    size = len(text.encode(errors="replace"))
    characters = _BYTES * len(text) / max(size, 1)
    return kind(
      max(int(self._tokens * characters), 1), int(self._overlap * characters)
    )


def headings(text: str) -> list[Heading]:
  """Returns the headings of Markdown in their order."""
  found: list[Heading] = []
  fence = ""
  front = _FRONT.match(text)
  for match in _MARKS.finditer(text, front.end() if front else 0):
    mark, hashes, words, line, under = match.groups()
    if mark:
      if not fence:
        fence = mark
      elif mark.startswith(fence):
        fence = ""
    elif not fence:
      level = len(hashes) if hashes else 1 if under[0] == "=" else 2
      found.append(Heading(match.start(), level, (words or line).strip()))
  return found


def title(text: str) -> str:
  """Returns the title in the front matter of Markdown, or its first heading."""
  if front := _FRONT.match(text):
    if named := _FRONT_TITLE.search(front[1]):
      return named[1].strip("\"'")
  first = headings(text)[:1]
  return first[0].words if first else ""


def _chains(found: list[Heading]) -> list[str]:
  """Returns, for each heading, it and those above it, outermost first."""
  out, above = [], []
  for heading in found:
    above = [each for each in above if each.level < heading.level] + [heading]
    out.append(" > ".join(each.words for each in above))
  return out


def _body(text: str) -> str:
  """Returns what remains of Markdown without its headings."""
  return _MARKS.sub(lambda m: m[0] if m[1] else "", text).strip()
