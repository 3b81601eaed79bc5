"""Numbers the passages of an episode, and reads the numbers an answer cites.

The first search shows the passages 1, 2, 3, the second 4, 5, 6; a passage that
was shown before keeps its number. An answer cites them as `[2]`. Only numbers
that were shown are citations, and no document can write a mark: those in
passages become `(2)`.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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


def citable_passages(
  observations: Iterable[types.Observation],
) -> dict[int, types.Passage]:
  """Returns the passages that an answer can cite, by their numbers."""
  return {n: p for o in observations for n, p in zip(o.numbers, o.passages)}


def number_passages(
  passages: Iterable[types.Passage], before: Iterable[types.Observation]
) -> tuple[int, ...]:
  """Returns the numbers of passages that are found after `before`."""
  # A page's id is its address; each search may quote another part of it.
  known = {
    (p.id, p.title, p.text): n for n, p in citable_passages(before).items()
  }
  return tuple(
    known.setdefault((p.id, p.title, p.text), len(known) + 1) for p in passages
  )


def observation(
  passages: Iterable[tuple[int, types.Passage]],
  control_tokens: Sequence[str] = (),
  *,
  begins: str = "<information>",
  ends: str = "</information>",
) -> str:
  """Returns the block that answers a search, as `protocol.observation` does.

  A passage has a line with its number, title and place, and then its own lines.
  """

  def lines(passage: types.Passage) -> str:
    kept = (line.rstrip() for line in passage.text.splitlines())
    text = "\n".join((head(passage), *filter(None, kept)))
    return _MARK.sub(lambda mark: mark[0].translate(_ROUND), text)

  content = "\n".join(f"[{n}] {lines(passage)}" for n, passage in passages)
  content = protocol.neutralise(content, control_tokens).strip()
  return f"\n\n{begins}{content or 'No passage was found.'}{ends}\n\n"


def title(passage: types.Passage) -> str:
  """Returns a title without the quotes that corpora have around it."""
  return passage.title.strip(' "')


def head(passage: types.Passage) -> str:
  """Returns title, path, page and heading of a passage in one line."""
  _, page, heading = passage.source
  # The first heading of a document is often its title.
  below = heading.removeprefix(f"{title(passage)} > ")
  parts = (title(passage), path(passage), f"page {page}" if page else "", below)
  lines = (" ".join(part.split()) for part in parts)
  return " | ".join(dict.fromkeys(filter(None, lines)))


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


def passage_values(found: Iterable[types.Passage]) -> list[dict[str, Any]]:
  """Returns passages as JSON values, without their scores.

  A passage of a document has `source`, with what is known of its place.
  """
  return [
    {"id": p.id, "title": p.title, "text": p.text}
    | ({"source": known} if (known := source(p)) else {})
    for p in found
  ]


def source(passage: types.Passage) -> dict[str, Any]:
  """Returns what is known of `path`, `page` and `heading` of a passage.

  The path names no folder of this machine, see `path`.
  """
  values = passage.source._replace(path=path(passage))._asdict()
  return {name: value for name, value in values.items() if value}


def without_marks(answer: str | None) -> str | None:
  """Returns an answer without its marks; None for None."""
  return read_marks(answer, {}).answer


def read_marks(answer: str | None, known: Mapping[int, types.Passage]) -> Cited:
  """Reads the marks of an answer.

  A range such as `[1-3]` has its ends, and what is known between them; `known`
  are the passages that were shown, by their numbers.
  """
  found: dict[int, None] = {}

  def mark(match: re.Match[str]) -> str:
    sound = ""
    for each in _RANGE.finditer(match[2]):
      first, last = int(each[1]), int(each[2] or each[1])
      between = (number for number in known if first < number < last)
      for number in sorted({first, *between, last}):
        found[number] = None
        sound += f"[{number}]" if number in known else ""
    return sound and match[1] + sound

  return Cited(
    None if answer is None else _MARK.sub(mark, answer).strip(),
    tuple((number, known[number]) for number in found if number in known),
    tuple(number for number in found if number not in known),
  )
