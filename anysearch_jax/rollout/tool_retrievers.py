"""The retrievers of a policy with several tools.

`Toolbox` passes each call on to the retriever of its tool. `PageRetriever`
answers a tool that opens pages by any retriever of passages.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import settings
from anysearch_jax.environment import protocol, tools
from anysearch_jax.host import counting, json_files
from anysearch_jax.rollout import searching

# Number of passages of a search among which a page is looked for.
_PAGE_SEARCH_DEPTH = 20
_NUMBER = re.compile(r"\d+")
# Digits of the longest number in an id that is ordered by its value.
_NUMBER_DIGITS = 40

_DEFAULTS = config_lib.SearchConfig()


class Toolbox:
  """Passes each request to its tool's retriever.

  The requests of a tool whose retriever is a `types.BatchRetriever` are batched
  by themselves, so that no tool waits for another.

  Args:
    tools: the retriever of each tool, by the tool's name.
    config: sizes of batches.

  Raises:
    ValueError: a retriever's answers depend on the episode that asks. Such
      answers could not be cached here.
  """

  def __init__(
    self,
    tools: Mapping[str, types.Retriever],
    config: config_lib.SearchConfig = _DEFAULTS,
  ):
    for name, retriever in tools.items():
      if isinstance(retriever, types.ContextualRetriever):
        raise ValueError(
          f"Found a {type(retriever).__name__} for the tool {name!r} beside "
          "others; expected a retriever whose answers depend on the request "
          "alone. Leave retrieval.simulated and retrieval.refined empty."
        )
    self._tools = dict(tools)
    uncached = dataclasses.replace(config, cache=0)
    # The caller caches the answers of all tools.
    self._retrievers: dict[str, types.Retriever] = {}
    for name, retriever in tools.items():
      if isinstance(retriever, types.BatchRetriever):
        retriever = searching.BatchingRetriever(retriever, uncached)
      self._retrievers[name] = retriever

  @property
  def counters(self) -> Counter[str]:
    """The counters of each tool's retriever, after its name."""
    return counting.of_parts(self._tools)

  def identity(self, corpora: Sequence[str] = ("",)) -> dict[str, Any]:
    """Returns the identities of the tools' retrievers, with a hash of all."""
    identities = {
      name: retriever.identity(corpora)
      for name, retriever in self._tools.items()
      if hasattr(retriever, "identity")
    }
    return {
      "kind": "tools",
      "tools": identities,
      "sha256": json_files.sha256(identities),
    }

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Answers one request; raises ValueError if its tool is unknown."""
    settings.require("tool", request.tool, self._retrievers)
    return await self._retrievers[request.tool].search(request)


class PageRetriever:
  """Opens a page: all passages whose title, or whose id, is the argument.

  A retriever that is a `tools.PageSource` opens the page itself. With any other
  retriever, a search for the title finds 20 passages, and those of the page are
  returned. They are in the order of their ids, so numbered passages are in
  reading order. Case, quotes and white space around a title do not matter.

  Args:
    retriever: finds passages, or opens pages.
  """

  def __init__(self, retriever: types.Retriever):
    self._retriever = retriever

  def identity(self, corpora: Sequence[str] = ("",)) -> dict[str, Any]:
    """Returns how pages are found; the passages are those of `search`."""
    is_source = isinstance(self._retriever, tools.PageSource)
    depth = None if is_source else _PAGE_SEARCH_DEPTH
    return {"kind": "pages", "depth": depth}

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Returns at most `request.k` passages of a page, if it exists."""
    if isinstance(self._retriever, tools.PageSource):
      passages = self._retriever.page(request.query, request.corpus)
    else:
      depth = max(_PAGE_SEARCH_DEPTH, request.k)
      passages = await self._retriever.search(
        dataclasses.replace(request, k=depth, tool=protocol.SEARCH)
      )
    name = tools.page_name(request.query)
    page = [
      passage
      for passage in passages
      if name in map(tools.page_name, (passage.title, passage.id))
    ]
    page.sort(key=lambda passage: _numeric_key(passage.id))
    return page[: request.k]


def _numeric_key(passage_id: str) -> str:
  """Returns a key that orders numbers in texts by value."""
  return _NUMBER.sub(
    lambda number: number[0].lstrip("0").zfill(_NUMBER_DIGITS), passage_id
  )
