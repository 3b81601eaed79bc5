"""The tools that a policy may call, as values: a name, a price, a protocol.

A call is a text between two marks, and its argument is what is between them.
A call that is carried out uses up one search of the budget, whichever tool it
calls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from anysearch_jax import types
from anysearch_jax.environment import protocol


@runtime_checkable
class PageSource(Protocol):
  """A retriever that also opens the pages of its corpora."""

  def page(self, name: str, corpus: str) -> Sequence[types.Passage]:
    """Returns the passages with this title or id, see `page_name`."""
    ...


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
    results: the most passages of a call; None: `episode.top_k`.
    price: of 1,000 calls in US dollars; None: the price of searches.
    markers: marks of the tool that are no tag of `protocol.TAGS`. They are
      neutralised in questions and passages.
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


def page(passages: Sequence[types.Passage], unwanted: Sequence[str]) -> str:
  """Returns the page block that answers a fetch: titles once, then texts.

  Args:
    passages: the parts of one page in reading order; may be empty.
    unwanted: texts to neutralise, see `protocol.neutralise`.
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
  """Returns a search with marks of its own.

  Args:
    opens, closes: marks around the query.
    begins, ends: marks around the passages.
    layout: of a passage, see `protocol.observation`.
  """
  known = {f"<{slash}{tag}>" for tag in protocol.TAGS for slash in ("", "/")}
  return Tool(
    protocol.SEARCH,
    opens,
    closes,
    observation=functools.partial(
      protocol.observation, begins=begins, ends=ends, layout=layout
    ),
    markers=tuple(x for x in (opens, closes, begins, ends) if x not in known),
  )


SEARCH = Tool(protocol.SEARCH, "<search>", "</search>")
FETCH = Tool(
  "fetch",
  "<fetch>",
  "</fetch>",
  observation=page,
  results=10,
  markers=("<fetch>", "</fetch>", "<page>", "</page>"),
)


def action(
  tools: Sequence[Tool],
) -> Callable[[str], protocol.Action | None]:
  """Returns a function that reads the last call or `<answer>` of a turn.

  See `protocol.last_action`, which does so for `<search>` alone.
  """
  calls = tuple((tool.name, tool.opens, tool.closes) for tool in tools)
  return lambda text: protocol.last_action(text, calls)
