"""The tools that a policy may call, as values: a name, a price, a protocol.

A call is a text that begins and ends with the tool's marks; the text between
them is its argument. Every call that is carried out uses up one search of the
budget, whichever tool it calls.
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
    """Returns the passages of a page, in reading order.

    Args:
      name: the page's title, compared as `page_name`, or an id.
      corpus: the corpus; "" if there is only one.
    """


def page_name(title: str) -> str:
  """Returns a title as pages are compared: lower case, without outer quotes."""
  return " ".join(title.split()).strip(' "').lower()


@dataclasses.dataclass(frozen=True)
class Tool:
  """A tool that a policy can call.

  Attributes:
    name: name of the tool in requests, observations and records.
    opens, closes: the marks around the argument of a call; `closes` ends the
      turn.
    observation: returns the text that a call shows, from its passages and the
      texts that must not appear in them (`markers` and the control tokens).
    results: largest number of passages of a call; None: `episode.top_k`.
    price: US dollars of 1,000 calls; None: the price of searches.
    markers: marks of the tool that are no tag of `protocol.TAGS`. They are
      neutralised in questions and passages.
    target: returns the retriever's query, from the argument and the
      observations of earlier calls; None: the query is the argument.
    numbered: returns the text of a call from numbered passages, in an
      environment with citations; None: its passages cannot be cited.
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


def page_shown(argument: str, observations: Sequence[types.Observation]) -> str:
  """Returns the query that opens the page that a call names.

  Args:
    argument: the title of a passage that a search showed, or its position in
      the last search ("2", "Doc 2").
    observations: the calls of the episode so far.

  Returns:
    The passage's id if it is a web address, otherwise its title; `argument` if
    no passage was shown under this title or position.
  """
  searches = [
    call for call in reversed(observations) if call.tool == protocol.SEARCH
  ]
  name = page_name(argument)
  for call in searches:
    for passage in call.passages:
      if name and page_name(passage.title) == name:
        return passage.id if _ADDRESS.match(passage.id) else argument
  number = _NUMBERED.fullmatch(argument.strip())
  position = int(number[1]) if number else 0
  if searches and 1 <= position <= len(searches[0].passages):
    passage = searches[0].passages[position - 1]
    return passage.id if _ADDRESS.match(passage.id) else passage.title
  return argument


def page(passages: Sequence[types.Passage], unwanted: Sequence[str]) -> str:
  """Returns the page block that answers a fetch: each title once, then texts.

  Args:
    passages: the parts of one page, in reading order.
    unwanted: texts that are neutralised.
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
  """Returns a search tool with other marks.

  Args:
    opens, closes: marks around the query.
    begins, ends: marks around the passages, with the spaces inside of them.
    layout: format string of a passage, see `protocol.observation`.
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
