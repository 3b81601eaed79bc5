"""Searches documents while they change; see `FollowingRetriever`."""

from __future__ import annotations

import asyncio
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from anysearch_jax import types
from anysearch_jax.host import loop
from anysearch_jax.retrieval.documents import folder
from anysearch_jax.retrieval.index import building
from anysearch_jax.rollout import searching

# Seconds between two looks at the folder.
_LOOK_SECONDS = 1.0
# Seconds that a search waits for an update; then the old index answers, of
# which files that changed are left out.
_WAIT_SECONDS = 5.0


class FollowingRetriever:
  """A `types.Retriever` that never quotes text that was deleted.

  Before a search, at most once a second, a thread compares the documents with
  the index, updates it and opens the new build. Passages of files that changed
  since their build are left out, whether or not the update succeeds.

  Args:
    index: folder of the index of documents.
    open_retriever: opens the newest build of the index.
    is_current: returns whether no document changed since that build.
    update: brings the index up to date.
    tell: called with a sentence if that fails; the old index then stays.
  """

  def __init__(
    self,
    index: str | os.PathLike,
    open_retriever: Callable[[], types.Retriever],
    *,
    is_current: Callable[[], bool],
    update: Callable[[], None],
    tell: Callable[[str], None],
  ):
    self._index = index
    self._open_retriever = open_retriever
    self._is_current = is_current
    self._update = update
    self._tell = tell
    self._attached: tuple[Any, ...] = ()
    self._last_problem = ""
    self._looked = time.monotonic()
    self._looking: asyncio.Task[None] | None = None
    self._build = pathlib.Path()
    self._open()

  def attach(self, engine: types.Engine, codec: types.TextCodec) -> None:
    """Passes the policy's engine on; see `types.EngineUser`."""
    self._attached = (engine, codec)
    searching.attach(self._opened[0], engine, codec)

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Answers one query; see `types.Retriever`."""
    if not loop.is_loop_thread():
      return await loop.wait(self.search(request))
    if self._looking is None and self._is_due():
      self._looking = asyncio.create_task(self._look())
    if self._looking is not None:
      # Neither the limit nor a client that leaves ends the update.
      await asyncio.wait([self._looking], timeout=_WAIT_SECONDS)
    retriever, stamps = self._opened
    passages = await retriever.search(request)

    def unchanged() -> list[types.Passage]:
      return [
        passage
        for passage in passages
        if folder.stamp(passage.source.path) == stamps.get(passage.source.path)
      ]

    return await asyncio.to_thread(unchanged)

  def _is_due(self) -> bool:
    return time.monotonic() - self._looked >= _LOOK_SECONDS

  async def _look(self) -> None:
    """Follows the documents on a thread."""
    try:
      await asyncio.to_thread(self._follow)
      self._last_problem = ""
    # Whatever is wrong with the documents, questions are answered.
    except Exception as error:
      if self._last_problem != str(error):
        self._tell(f"the index stays as it was: {error}")
      self._last_problem = str(error)
    finally:
      self._looked = time.monotonic()
      self._looking = None

  def _follow(self) -> None:
    if not self._is_current():
      self._update()
    if building.newest_build(self._index) != self._build:
      self._open()

  def _open(self) -> None:
    """Opens the newest build, with the stamps of the files in it."""
    build = building.newest_build(self._index)
    # Before the index: if another process replaces the build in between, its
    # passages do not fit the stamps and are left out until the next look.
    stamps = folder.stamps(build)
    retriever = self._open_retriever()
    if self._attached:
      searching.attach(retriever, *self._attached)
    self._opened = (retriever, stamps)
    self._build = build
