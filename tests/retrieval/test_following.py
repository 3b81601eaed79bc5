"""An index that follows its documents while questions are answered."""

from __future__ import annotations

import asyncio
import threading

from waits import wait_for

from anysearch_jax import types
from anysearch_jax.retrieval.documents import folder, following
from anysearch_jax.retrieval.index import opening, search

REQUEST = types.SearchRequest("lease", 3)


def test_an_update_blocks_no_search_and_deleted_text_is_never_quoted(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(following, "_LOOK_SECONDS", 0.0)
  monkeypatch.setattr(following, "_WAIT_SECONDS", 0.05)
  notes = tmp_path / "notes"
  notes.mkdir()
  (notes / "old.md").write_text("The lease ends in 2024.")
  (notes / "kept.md").write_text("The lease is signed.")
  index = tmp_path / "index"
  paths = [str(notes)]
  folder.update(paths, index)
  go = threading.Event()
  problems = []
  failing = [OSError("the disk is full"), OSError("the disk is full"), None]

  def update():
    go.wait()
    if error := failing.pop(0):
      raise error
    folder.update(paths, index)

  retriever = following.FollowingRetriever(
    index,
    lambda: search.LocalRetriever(opening.open_index(index)),
    is_current=lambda: folder.is_current(paths, index, folder.Settings()),
    update=update,
    tell=problems.append,
  )

  def texts():
    return {p.text for p in asyncio.run(retriever.search(REQUEST))}

  assert texts() == {"The lease ends in 2024.", "The lease is signed."}
  (notes / "old.md").unlink()
  (notes / "new.md").write_text("The lease ends in 2031.")
  assert texts() == {"The lease is signed."}
  go.set()
  wait_for(
    lambda: texts() == {"The lease is signed.", "The lease ends in 2031."}
  )
  assert problems == ["the index stays as it was: the disk is full"]
