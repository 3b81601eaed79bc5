"""Numbers the passages of an episode, and reads the numbers an answer cites.

The first search shows the passages 1, 2, 3, the second 4, 5, 6; a passage that
was shown before keeps its number. An answer cites them as `[2]`. Only numbers
that were shown are citations, and no document can write a mark: those in
passages become `(2)`.
"""

from __future__ import annotations

import itertools
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from anysearch_jax import types
from anysearch_jax.environment import protocol

# Also the forms that models write unasked: [1, 2], [1-3], [Doc 2], [^2] and
# OpenAI's own 【2†lines】. Longer numbers, such as years, are text. White space
# is bounded, which keeps the time linear.
_NUMBER = "[1-9][0-9]{0,2}"
_MARK = re.compile(
  r"([,;]?\s?)[\[【]\s?(?:(?:passage|doc(?:ument)?|source|result)s?\s?)?[#^]?"
  rf"({_NUMBER}(?:\s?(?:[,;–-]|and|&)\s?#?{_NUMBER})*)"
  r"(?:†[^\[\]【】]{0,40})?\s?[\]】]",
  re.IGNORECASE,
)
_RANGE = re.compile(rf"({_NUMBER})(?:\s?[–-]\s?#?({_NUMBER}))?")
_ROUND = str.maketrans("[]【】", "()()")


class Cited(NamedTuple):
  """An answer with its citations.

  answer: with a mark `[2]` for each citation and no other; None without one.
  citations: number and passage, in the order of their first marks.
  refused: numbers that the answer cited and no search had shown.
  """

  answer: str | None
  citations: tuple[tuple[int, types.Passage], ...] = ()
  refused: tuple[int, ...] = ()


def shown(
  observations: Iterable[types.Observation],
) -> dict[int, types.Passage]:
  """Returns the passages of an episode by their numbers, from 1."""
  passages = itertools.chain.from_iterable(o.passages for o in observations)
  return dict(enumerate({_key(p): p for p in passages}.values(), 1))


def numbered(
  passages: Iterable[types.Passage], before: Mapping[int, types.Passage]
) -> list[tuple[int, types.Passage]]:
  """Returns the passages of a search with their numbers.

  `before` are those of earlier searches, see `shown`.
  """
  numbers = {_key(passage): number for number, passage in before.items()}
  return [(numbers.setdefault(_key(p), len(numbers) + 1), p) for p in passages]


def _key(passage: types.Passage) -> tuple[str, str, str]:
  # A web page's id is its address; each search may quote another part of it.
  return passage.id, passage.title, passage.text


def observation(
  passages: Sequence[tuple[int, types.Passage]],
  control_tokens: Sequence[str] = (),
  *,
  begins: str = "<information>",
  ends: str = "</information>",
) -> str:
  """Returns the block that answers a search, with a number before a passage.

  Args:
    passages: as `numbered` returns them; may be empty.
    control_tokens: see `protocol.neutralise`.
    begins, ends: marks of the block.

  Returns:
    The block between blank lines. A passage has a line with its number, title
    and place, and then its own lines.
  """
  content = "\n".join(
    f"[{number}] {_plain_marks(head(passage))}\n{_plain_marks(_lines(passage))}"
    for number, passage in passages
  )
  content = protocol.neutralise(content, control_tokens).strip()
  return f"\n\n{begins}{content or 'No passage was found.'}{ends}\n\n"


def head(passage: types.Passage) -> str:
  """Returns title, path, page and heading of a passage in one line."""
  source = passage.source
  title = " ".join(passage.title.split()).strip(' "')
  page = f"page {source.page}" if source.page else ""
  parts = (title, path(passage), page, source.heading)
  return " | ".join(dict.fromkeys(filter(None, map(_one_line, parts))))


def path(passage: types.Passage) -> str:
  """Returns the path of a passage without folders above its documents.

  Otherwise answers would tell where on this machine they are.
  """
  given = passage.source.path.replace("\\", "/")
  pure = pathlib.PureWindowsPath(given)
  if not pure.anchor and ".." not in pure.parts:
    return given
  name = passage.id.rpartition("#")[0]  # Below the documents' own folder.
  return name if name and given.endswith(f"/{name}") else pure.name


def _one_line(text: str) -> str:
  return " ".join(text.split())


def _lines(passage: types.Passage) -> str:
  """Returns the text of a passage without empty lines."""
  lines = (line.rstrip() for line in passage.text.splitlines())
  return "\n".join(filter(None, lines))


def _plain_marks(text: str) -> str:
  """Returns a text whose marks are no citations."""
  return _MARK.sub(lambda mark: mark[0].translate(_ROUND), text)


def without(answer: str | None) -> str | None:
  """Returns an answer without its marks; None for None."""
  return None if answer is None else _MARK.sub("", answer).strip()


def read(answer: str | None, known: Mapping[int, types.Passage]) -> Cited:
  """Reads the marks of an answer.

  Args:
    answer: as the model wrote it; None without one.
    known: the passages that were shown, by their numbers.
  """
  if answer is None:
    return Cited(None)
  found: dict[int, None] = {}

  def mark(match: re.Match[str]) -> str:
    numbers = _numbers(match[2], known)
    found.update(dict.fromkeys(numbers))
    sound = "".join(f"[{number}]" for number in numbers if number in known)
    return match[1] + sound if sound else ""

  text = _MARK.sub(mark, answer).strip()
  return Cited(
    text,
    tuple((number, known[number]) for number in found if number in known),
    tuple(number for number in found if number not in known),
  )


def _numbers(text: str, known: Mapping[int, types.Passage]) -> list[int]:
  """Returns the numbers of a mark such as "1, 3-5".

  A range has its ends, and of the numbers between those that are known.
  """
  numbers: list[int] = []
  for each in _RANGE.finditer(text):
    first, last = int(each[1]), int(each[2] or each[1])
    between = (number for number in known if first < number < last)
    numbers += sorted({first, *between, last})
  return numbers
