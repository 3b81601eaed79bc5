"""The output items of OpenAI's Responses API."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterable
from typing import Any

from anysearch_jax import types

Item = dict[str, Any]


class Items:
  """The output items of one response, in order; they grow as it is made.

  Attributes:
    all: the items.
    reasoning: the item of the reasoning that still grows, if any.

  Args:
    name: unique to the response; the items' ids contain it.
  """

  def __init__(self, name: str):
    self.all: list[Item] = []
    self.reasoning: Item | None = None
    self._name = name
    self._cited: dict[str, types.Passage] = {}

  def reason(self, text: str) -> Item:
    """Adds text to the reasoning, which it begins if none grows."""
    if self.reasoning is None:
      part = {"type": "reasoning_text", "text": ""}
      self.reasoning = self._add(
        "rs", "reasoning", "in_progress", summary=[], content=[part]
      )
    self.reasoning["content"][0]["text"] += text
    return self.reasoning

  def end_reasoning(self) -> None:
    """Ends the reasoning, if one grows."""
    if self.reasoning is not None:
      self.reasoning["status"] = "completed"
      self.reasoning = None

  def search(self, query: str) -> Item:
    """Adds a search."""
    action = {"type": "search", "query": query, "queries": [query]}
    return self._add("ws", "web_search_call", "searching", action=action)

  def found(self, passages: Iterable[types.Passage]) -> Item:
    """Adds what the last search showed."""
    item = self.all[-1]
    sources = [(source(passage), passage) for passage in passages]
    item["status"] = "completed"
    item["action"]["sources"] = [
      {"type": "url", "url": url} for url, _ in sources
    ]
    # OpenAI's own item has no texts; clients ignore what they do not know.
    item["results"] = shown(passage for _, passage in sources)
    self._cited.update(sources)
    return item

  def end_searches(self) -> list[tuple[int, Item]]:
    """Fails searches without an answer; returns their indices and items."""
    open_now = [
      (index, item)
      for index, item in enumerate(self.all)
      if item["status"] == "searching"
    ]
    for _, item in open_now:
      item["status"] = "failed"
    return open_now

  def message(self, text: str) -> Item:
    """Adds the answer, with a citation of each passage that was shown."""
    part = {
      "type": "output_text",
      "text": text,
      "annotations": citations(text, self._cited),
      "logprobs": [],
    }
    return self._add(
      "msg", "message", "completed", role="assistant", content=[part]
    )

  def _add(self, prefix: str, kind: str, status: str, **values: Any) -> Item:
    name = f"{prefix}_{self._name}{len(self.all):02x}"
    item = {"id": name, "type": kind, "status": status, **values}
    self.all.append(item)
    return item


def shown(passages: Iterable[types.Passage]) -> list[dict[str, str]]:
  """Returns passages as JSON values."""
  return [{"id": p.id, "title": p.title, "text": p.text} for p in passages]


def source(passage: types.Passage) -> str:
  """Returns the URL of a passage: its id, if that is one, or a URN."""
  if passage.id.startswith(("http://", "https://")):
    return passage.id
  return f"urn:passage:{urllib.parse.quote(passage.id, safe='/')}"


def citations(answer: str, cited: dict[str, types.Passage]) -> list[Item]:
  """Returns a citation of each passage that was shown, the first first.

  They say what the policy has read, not that a passage proves the answer.

  Args:
    answer: is what they annotate.
    cited: the passages by their URLs.
  """
  return [
    {
      "type": "url_citation",
      "url": url,
      "title": passage.title,
      "start_index": 0,
      "end_index": len(answer),
    }
    for url, passage in cited.items()
  ]
