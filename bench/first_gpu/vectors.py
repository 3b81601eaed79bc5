"""Exact search over the paper's corpus, or as much of it as fits."""

from __future__ import annotations

import functools

from bench import device_search
from bench.first_gpu import notes as notes_lib
from bench.first_gpu import shapes

_DIM = 768


def search(notes: notes_lib.Notes) -> None:
  """Compares searches of random vectors with the bandwidth of a copy."""
  all_vectors = 4000 if notes.rehearse else device_search.WIKI_18
  for share in (1, 4):
    vectors = all_vectors // share
    notes.case(
      f"{vectors} vectors",
      functools.partial(_measure, vectors, rehearse=notes.rehearse),
    )


def _measure(vectors: int, *, rehearse: bool) -> dict[str, object]:
  # The vectors, the copy that is timed beside them, and scores of a block.
  shapes.need(2 * vectors * _DIM + 2**33)
  return device_search.measure(
    vectors=vectors,
    dim=_DIM,
    k=3,
    queries=(1, 8) if rehearse else (1, 8, 32, 128),
    block=1024 if rehearse else 32768,
    calls=2 if rehearse else 7,
  )
