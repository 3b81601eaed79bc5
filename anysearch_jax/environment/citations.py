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

# Besides `[2]`, models write [1, 2], [1-3], [Doc 2], [^2] and OpenAI's
# 【2†lines】 on their own. Longer numbers, such as years, are text. White space
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

  Attributes:
    answer: the answer, with a mark `[2]` for each citation and no other mark;
      None if it is missing.
    citations: number and passage, in the order of their first marks.
    refused: cited numbers that no search had shown.
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
  passages: Iterable[types.Passage], earlier: Iterable[types.Observation]
) -> tuple[int, ...]:
  """Returns the numbers of passages that a search found.

  Args:
    passages: the passages of the search.
    earlier: the observations of the episode so far. A passage that was shown
      before keeps its number; new ones get the next numbers.
  """
  # A page's id is its address; each search may quote another part of it.
  numbers = {
    (p.id, p.title, p.text): n for n, p in citable_passages(earlier).items()
  }
  return tuple(
    numbers.setdefault((p.id, p.title, p.text), len(numbers) + 1)
    for p in passages
  )


def observation(
  passages: Iterable[tuple[int, types.Passage]],
  control_tokens: Sequence[str] = (),
  *,
  begins: str = "<information>",
  ends: str = "</information>",
) -> str:
  """Returns the block that answers a search, with numbered passages.

  A passage has a line with its number, title and place, and then its own lines.

  Args:
    passages: number and passage of each hit, in rank order; may be empty.
    control_tokens: as for `protocol.neutralise`.
    begins, ends: marks of the block, which is between blank lines.
  """

  def lines(passage: types.Passage) -> str:
    passage_lines = (line.rstrip() for line in passage.text.splitlines())
    text = "\n".join((head(passage), *filter(None, passage_lines)))
    return _MARK.sub(lambda mark: mark[0].translate(_ROUND), text)

  content = "\n".join(f"[{n}] {lines(passage)}" for n, passage in passages)
  content = protocol.neutralise(content, control_tokens).strip()
  return f"\n\n{begins}{content or 'No passage was found.'}{ends}\n\n"


def title(passage: types.Passage) -> str:
  """Returns a passage's title without the quotes that corpora put around it."""
  return passage.title.strip(' "')


def head(passage: types.Passage) -> str:
  """Returns the title, path, page and heading of a passage in one line."""
  _, page, heading = passage.source
  # The first heading of a document is often its title.
  below = heading.removeprefix(f"{title(passage)} > ")
  parts = (title(passage), path(passage), f"page {page}" if page else "", below)
  lines = (" ".join(part.split()) for part in parts)
  return " | ".join(dict.fromkeys(filter(None, lines)))


def path(passage: types.Passage) -> str:
  """Returns a passage's path inside the folder of documents.

  The folders above would tell readers of an answer about this machine.
  """
  stated_path = passage.source.path.replace("\\", "/")
  pure = pathlib.PureWindowsPath(stated_path)
  if not pure.anchor and ".." not in pure.parts:
    return stated_path
  # An id is the path inside the folder of documents, "#", and a number.
  name = passage.id.rpartition("#")[0]
  return name if name and stated_path.endswith(f"/{name}") else pure.name


def passage_values(
  passages: Iterable[types.Passage], *, exact: bool = False
) -> list[dict[str, Any]]:
  """Returns passages as JSON values, without their scores.

  A passage of a document also has `source`, its place.

  Args:
    passages: the passages.
    exact: whether titles keep the quotes that corpora put around them.
  """
  values = []
  for passage in passages:
    value: dict[str, Any] = {
      "id": passage.id,
      "title": passage.title if exact else title(passage),
      "text": passage.text,
    }
    if source_value := source(passage):
      value["source"] = source_value
    values.append(value)
  return values


def source(passage: types.Passage) -> dict[str, Any]:
  """Returns the `path`, `page` and `heading` of a passage, as far as known.

  The path names no folder of this machine, see `path`.
  """
  values = passage.source._replace(path=path(passage))._asdict()
  return {name: value for name, value in values.items() if value}


def without_marks(answer: str | None) -> str | None:
  """Returns an answer without its citations; a missing answer remains None."""
  return read_marks(answer, {}).answer


def read_marks(
  answer: str | None, passages: Mapping[int, types.Passage]
) -> Cited:
  """Reads the citations of an answer.

  A range such as `[1-3]` cites its ends, and the shown passages between them.

  Args:
    answer: the answer as the policy wrote it; None if it is missing.
    passages: the passages that were shown, by their numbers.
  """
  cited_numbers: dict[int, None] = {}

  def replace_mark(match: re.Match[str]) -> str:
    marks = ""
    for number_or_range in _RANGE.finditer(match[2]):
      first = int(number_or_range[1])
      last = int(number_or_range[2] or first)
      between = (number for number in passages if first < number < last)
      for number in sorted({first, *between, last}):
        cited_numbers[number] = None
        marks += f"[{number}]" if number in passages else ""
    return marks and match[1] + marks

  return Cited(
    None if answer is None else _MARK.sub(replace_mark, answer).strip(),
    tuple((n, passages[n]) for n in cited_numbers if n in passages),
    tuple(n for n in cited_numbers if n not in passages),
  )
