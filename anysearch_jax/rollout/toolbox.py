"""Answers the calls of several tools, each by a retriever of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.environment import tools as tools_lib
from anysearch_jax.host import counting

# Passages among which a page is looked for.
_DEPTH = 20
_NUMBER = re.compile(r"(\d+)")


class Toolbox:
  """A `types.BatchRetriever` that passes each request to its tool's retriever.

  Args:
    tools: a retriever for each name of a tool.

  Raises:
    ValueError: an answer depends on the episode that asks; such answers cannot
      be told apart here.
  """

  def __init__(self, tools: Mapping[str, types.Retriever]):
    for name, retriever in tools.items():
      if isinstance(retriever, types.ContextualRetriever):
        raise ValueError(
          f"Found a {type(retriever).__name__} for the tool {name!r} beside "
          "others; expected a retriever whose answers depend on the request "
          "alone. Leave retrieval.simulated and retrieval.refined empty."
        )
    self._tools = dict(tools)

  @property
  def counters(self) -> Counter[str]:
    """The counters of each tool's retriever, after its name."""
    return Counter(
      {
        f"{tool}/{name}": value
        for tool, retriever in self._tools.items()
        for name, value in counting.counters(retriever).items()
      }
    )

  def identity(self, corpora: Sequence[str] = ("",)) -> dict[str, Any]:
    """Returns the identities of the tools' retrievers, with a hash of all."""
    tools = {
      name: retriever.identity(corpora)
      for name, retriever in self._tools.items()
      if hasattr(retriever, "identity")
    }
    canonical = json.dumps(tools, sort_keys=True).encode()
    return {
      "kind": "tools",
      "tools": tools,
      "sha256": hashlib.sha256(canonical).hexdigest(),
    }

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Answers one request; raises ValueError if its tool is unknown."""
    return await self._of(request.tool).search(request)

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> Sequence[Sequence[types.Passage] | Exception]:
    """Answers requests in their order; those of a tool are one batch."""
    places: dict[str, list[int]] = {}
    for place, request in enumerate(requests):
      places.setdefault(request.tool, []).append(place)
    answers = await asyncio.gather(
      *(
        _answers(self._of(name), [requests[place] for place in its])
        for name, its in places.items()
      )
    )
    found = {
      place: answer
      for its, given in zip(places.values(), answers, strict=True)
      for place, answer in zip(its, given, strict=True)
    }
    return [found[place] for place in range(len(requests))]

  def _of(self, name: str) -> types.Retriever:
    if name not in self._tools:
      raise ValueError(
        f"Found a call of the tool {name!r}; expected one of "
        f"{', '.join(self._tools)}."
      )
    return self._tools[name]


class PageRetriever:
  """Opens a page: all passages whose title, or whose id, is the argument.

  A retriever that is a `tools.PageSource` opens it. With any other, the page's
  passages are those among the first 20 that a search for its title finds. They
  are in the order of their ids, which is the reading order of numbered ones.
  Case, quotes and white space around a title do not matter.
  """

  def __init__(self, retriever: types.Retriever):
    self._retriever = retriever

  def identity(self, corpora: Sequence[str] = ("",)) -> dict[str, Any]:
    """Returns where pages are from; the passages are those of `search`."""
    del corpora
    exact = isinstance(self._retriever, tools_lib.PageSource)
    return {"kind": "pages", "depth": None if exact else _DEPTH}

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Returns at most `request.k` passages of the page, none without it."""
    if isinstance(self._retriever, tools_lib.PageSource):
      found = self._retriever.page(request.query, request.corpus)
    else:
      asked = dataclasses.replace(
        request, k=max(_DEPTH, request.k), tool=protocol.SEARCH
      )
      found = await self._retriever.search(asked)
    name = tools_lib.page_name(request.query)
    page = [
      p for p in found if name in map(tools_lib.page_name, (p.title, p.id))
    ]
    return sorted(page, key=lambda p: _natural(p.id))[: request.k]


def _natural(id_: str) -> list[tuple[int, str]]:
  """Returns a key that orders numbers in texts by value."""
  parts = _NUMBER.split(id_)  # Texts and numbers alternate.
  parts[1::2] = [number.lstrip("0") for number in parts[1::2]]
  return [(len(part) * (i % 2), part) for i, part in enumerate(parts)]


async def _answers(
  retriever: types.Retriever, requests: Sequence[types.SearchRequest]
) -> Sequence[Sequence[types.Passage] | Exception]:
  """Asks a retriever in one batch, or by concurrent calls."""
  if isinstance(retriever, types.BatchRetriever):
    try:
      return await retriever.search_many(requests)
    except types.RetrievalError as error:
      return [error] * len(requests)
  found = await asyncio.gather(
    *(retriever.search(request) for request in requests),
    return_exceptions=True,
  )
  for answer in found:
    if isinstance(answer, BaseException) and not isinstance(answer, Exception):
      raise answer
  return found  # type: ignore[return-value]  # Checked above.
