"""The tools that a policy may call, as values: a name, a price, a protocol.

A call is a text between two marks, and its argument is what is between them.
A call that is carried out uses up one search of the budget, whichever tool it
calls.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from anysearch_jax import types
from anysearch_jax.environment import protocol


@runtime_checkable
class PageSource(Protocol):
  """A retriever that also opens the pages of its corpora."""

  def page(self, name: str, corpus: str) -> Sequence[types.Passage]:
    """Returns the passages with this title or id, see `page_name`."""


def page_name(title: str) -> str:
  """Returns a title as pages are named: without outer quotes, in lower case."""
  return " ".join(title.split()).strip(' "').lower()


@dataclasses.dataclass(frozen=True)
class Tool:
  """A tool.

  Attributes:
    name: names the tool in requests, observations and records.
    opens, closes: the marks around the argument of a call; `closes` ends the
      turn.
    observation: returns the text that a call shows, from its passages and the
      texts that must not appear in them (`markers` and the control tokens).
    numbered: returns that text for passages with their numbers, in an
      environment that cites; None: they have none and cannot be cited.
    results: the most passages of a call; None: `episode.top_k`.
    price: of 1,000 calls in US dollars; None: the price of searches.
    markers: marks of the tool that are no tag of `protocol.TAGS`. They are
      neutralised in questions and passages.
    target: returns what the retriever is asked for, from the argument and what
      earlier calls showed; None: it is asked for the argument.
  """

  name: str
  opens: str
  closes: str
  observation: Callable[[Sequence[types.Passage], Sequence[str]], str] = (
    protocol.observation
  )
  results: int | None = None
  price: float | None = None
  markers: tuple[str, ...] = ()
  target: Callable[[str, Sequence[types.Observation]], str] | None = None
  numbered: (
    Callable[[Sequence[tuple[int, types.Passage]], Sequence[str]], str] | None
  ) = None


_NUMBERED = re.compile(
  r"(?:doc(?:ument)?|result)?\s*[#\[(]?(\d{1,3})[\])]?", re.I
)
_ADDRESS = re.compile(r"https?://", re.I)


def page_shown(argument: str, shown: Sequence[types.Observation]) -> str:
  """Returns what opens the page that a call names.

  `argument` is the title of a passage that `shown` has, or its number among
  those of the last search ("2", "Doc 2"): the result is then the passage's id,
  if that is an address of the web, or its title. Otherwise it is the argument.
  """
  searches = [each for each in reversed(shown) if each.tool == protocol.SEARCH]
  name = page_name(argument)
  for passage in (p for each in searches for p in each.passages):
    if name and page_name(passage.title) == name:
      return passage.id if _ADDRESS.match(passage.id) else argument
  number = _NUMBERED.fullmatch(argument.strip())
  place = int(number[1]) if number else 0
  if searches and 1 <= place <= len(searches[0].passages):
    passage = searches[0].passages[place - 1]
    return passage.id if _ADDRESS.match(passage.id) else passage.title
  return argument


def page(passages: Sequence[types.Passage], unwanted: Sequence[str]) -> str:
  """Returns the page block that answers a fetch: titles once, then texts.

  `passages` are the parts of one page in reading order; `unwanted` texts are
  neutralised.
  """
  titles = dict.fromkeys(" ".join(p.title.split()) for p in passages)
  texts = (" ".join(p.text.split()) for p in passages)
  content = protocol.neutralise("\n".join((*titles, *texts)), unwanted).strip()
  return f"\n\n<page>{content or 'No such page.'}</page>\n\n"


def search(
  opens: str = "<search>",
  closes: str = "</search>",
  *,
  begins: str,
  ends: str,
  layout: str = "Doc {rank}(Title: {title}) {text}",
) -> Tool:
  """Returns a search with marks of its own around the query and the passages.

  `begins` and `ends` have the spaces inside them; `layout` is of a passage, see
  `protocol.observation`.
  """
  return Tool(
    protocol.SEARCH,
    opens,
    closes,
    observation=functools.partial(
      protocol.observation, begins=begins, ends=ends, layout=layout
    ),
    markers=tuple(
      mark
      for mark in map(str.strip, (opens, closes, begins, ends))
      if mark not in protocol.tags()
    ),
  )


SEARCH = Tool(protocol.SEARCH, "<search>", "</search>")
FETCH = Tool(
  "fetch",
  "<fetch>",
  "</fetch>",
  observation=page,
  results=10,
  markers=protocol.tags(("fetch", "page")),
  target=page_shown,
)


def action(tools: Sequence[Tool]) -> Callable[[str], protocol.Action | None]:
  """Returns a function that reads the last call or `<answer>` of a turn.

  See `protocol.last_action`, which does so for `<search>` alone.
  """
  calls = tuple((tool.name, tool.opens, tool.closes) for tool in tools)
  return lambda text: protocol.last_action(text, calls)
