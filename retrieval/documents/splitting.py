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
# Estimated bytes of UTF-8 in a token: about four characters of English, or one
# and a half of Chinese.
_BYTES_PER_TOKEN = 4
# The splitter's time grows with the square of a word's length, and base64 data
# is one word, so words get a line break after each thousand characters.
_LONG_WORD = re.compile(r"\S{1000}")
# It grows with the square of a text's length too, so a text is split in blocks
# of this many characters, which end where a paragraph, a line or a word does.
_BLOCK = 1 << 16
# A code fence, within which `#` begins no heading; `# heading`; an underlined
# heading.
_MARKS = re.compile(
  r"^ {0,3}(?:(```+|~~~+)|(#{1,6})[ \t]+(\S[^\n]*)$"
  r"|([^\s#>|+*=-][^\n]*)\n {0,3}(={3,}|-{3,})[ \t]*$)",
  re.M,
)
_WORD = re.compile(r"\w")
# The first line of a code block that is longer than a passage.
_FENCE = re.compile(r"\s*(```|~~~)\S*\s*")
_FRONT = re.compile(r"\A---[ \t]*\n(.*?\n)---[ \t]*\n", re.S)
_FRONT_TITLE = re.compile(r"^title:([^\n]*)$", re.M)


class Splitter:
  """Splits texts into passages.

  Args:
    tokens: the most tokens of a passage.
    overlap: the most tokens that a passage repeats from the one before it.
    tokenizer: a `tokenizers.Tokenizer` without truncation that counts the
      tokens; None estimates them from the bytes.
  """

  def __init__(self, tokens: int, overlap: int, tokenizer: Any = None):
    self._tokens = tokens
    self._overlap = overlap
    self._splitters = tokenizer and {
      kind: kind.from_huggingface_tokenizer(tokenizer, tokens, overlap)
      for kind in (_TEXT, _MARKDOWN)
    }

  def __call__(
    self, text: str, *, is_markdown: bool
  ) -> Iterator[tuple[str, str]]:
    """Yields the passages of a text, each after the headings above it.

    Passages without any word are left out, and those of headings alone that
    the next passage is below.

    Args:
      text: any text.
      is_markdown: whether `#` begins a heading.
    """
    text = _LONG_WORD.sub(r"\g<0>\n", text)
    kind: Any = _MARKDOWN if is_markdown else _TEXT
    # Offsets of headings in the text, each with the headings above it.
    offsets: list[int] = []
    heading_paths = [""]
    if is_markdown:
      open_headings: list[tuple[int, str]] = []
      for offset, level, words in _headings(text):
        open_headings = [x for x in open_headings if x[0] < level]
        open_headings.append((level, words))
        offsets.append(offset)
        heading_paths.append(" > ".join(words for _, words in open_headings))
    if self._splitters:
      splitter = self._splitters[kind]
    else:
      # Characters of a token.
      characters = _BYTES_PER_TOKEN * len(text) / max(len(text.encode()), 1)
      splitter = kind(
        int(self._tokens * characters), int(self._overlap * characters)
      )
    # Passages of headings alone, each with the paths of its headings.
    waiting: list[tuple[list[str], str]] = []
    for start, block in _blocks(text):
      for offset, passage in splitter.chunk_indices(block):
        if not _WORD.search(passage) or _FENCE.fullmatch(passage):
          continue
        begin = start + offset
        place = bisect.bisect_right(offsets, begin)
        path = heading_paths[place]
        if is_markdown and not _WORD.search(_MARKS.sub("", passage)):
          end = bisect.bisect_left(offsets, begin + len(passage))
          waiting.append((heading_paths[place : end + 1], passage))
          continue
        for paths, headings in waiting:
          if not all(f"{path} > ".startswith(f"{x} > ") for x in paths):
            yield paths[-1], headings
        waiting = []
        yield path, passage
    for paths, headings in waiting:
      yield paths[-1], headings


def _blocks(text: str) -> Iterator[tuple[int, str]]:
  """Yields the blocks of a text with their offsets."""
  start = 0
  while len(text) - start > _BLOCK:
    limit = start + _BLOCK
    end = limit
    for mark in ("\n\n", "\n", " "):
      place = text.rfind(mark, start + _BLOCK // 2, limit)
      if place > 0:
        end = place + len(mark)
        break
    yield start, text[start:end]
    start = end
  yield start, text[start:]


def title(text: str) -> str:
  """Returns the title in the front matter of Markdown, or its first heading."""
  front = _FRONT.match(text)
  if front and (title_line := _FRONT_TITLE.search(front[1])):
    return title_line[1].strip(" \t\"'")
  return next((words for _, _, words in _headings(text)), "")


def _headings(text: str) -> Iterator[tuple[int, int, str]]:
  """Yields the offset, the level (from 1) and the words of each heading."""
  fence = ""
  front = _FRONT.match(text)
  for match in _MARKS.finditer(text, front.end() if front else 0):
    mark, hashes, words, line, underline = match.groups()
    if mark:
      if not fence:
        fence = mark
      elif mark.startswith(fence):
        fence = ""
    elif not fence:
      if hashes:
        level = len(hashes)
      else:
        level = 1 if underline[0] == "=" else 2
      yield match.start(), level, (words or line).strip(" \t#¶")
