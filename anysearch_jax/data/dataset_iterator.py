"""Where a run stands in its training questions, as a value.

Each epoch is a permutation of its own, a function of (key, epoch). So a place
in the endless stream is three numbers, and whoever has them goes on exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from anysearch_jax import types


class Cursor(NamedTuple):
  """The next question to take.

  epoch: how often all of them were taken. key: of the permutations. position:
  in the epoch's permutation, less than the number of questions.
  """

  epoch: int
  key: int
  position: int


def at(taken: int, *, key: int, of: int) -> Cursor:
  """The cursor after `taken` questions of `of`."""
  epoch, position = divmod(taken, of)
  return Cursor(epoch, key, position)


def take(cursor: Cursor, n: int, *, of: int) -> tuple[np.ndarray, Cursor]:
  """Takes the next questions.

  Args:
    cursor: where to begin.
    n: how many, may exceed `of`.
    of: the number of questions.

  Returns:
    int64 `[n]`, their indices in [0, of), and the cursor after them.
  """
  start = cursor.epoch * of + cursor.position
  parts = [np.zeros(0, np.int64)]
  for epoch in range(cursor.epoch, (start + n - 1) // of + 1):
    first = max(start - epoch * of, 0)
    parts.append(_permutation(epoch, cursor.key, of)[first:][:n])
    n -= len(parts[-1])
  taken = np.concatenate(parts)
  return taken, at(start + len(taken), key=cursor.key, of=of)


class Stream(Sequence):
  """The first `count` questions of an endless stream over `rows`.

  Args:
    rows: the questions, at least one.
    count: may exceed them.
    key: of the permutations, >= 0.
  """

  def __init__(self, rows: Sequence[types.Question], *, count: int, key: int):
    self.rows = rows
    self._count = count
    self._key = key

  def __len__(self) -> int:
    return self._count

  def __getitem__(self, index: int) -> types.Question:
    if not -self._count <= index < self._count:
      raise IndexError(f"Found {index}, expected one of {self._count}.")
    place = self.cursor(index % self._count)
    (row,), _ = take(place, 1, of=len(self.rows))
    return self.rows[int(row)]

  def cursor(self, taken: int) -> Cursor:
    """Where the stream stands after `taken` questions."""
    return at(taken, key=self._key, of=len(self.rows))


def distinct(
  questions: Sequence[types.Question],
) -> Iterator[types.Question]:
  """Every question that a run will take; of a stream, each only once."""
  if not isinstance(questions, Stream):
    yield from questions
    return
  count, of = len(questions), len(questions.rows)
  # An epoch asks every question once, so the first one has all of them.
  for row in take(questions.cursor(0), min(count, of), of=of)[0]:
    yield questions.rows[int(row)]


def progress(questions: Sequence[types.Question], taken: int) -> dict[str, Any]:
  """Where a run stands in its questions, as plain values.

  Args:
    questions: a `Stream`, or a list that is gone round as it stands.
    taken: how many were taken.
  """
  if isinstance(questions, Stream):
    return {**questions.cursor(taken)._asdict(), "of": len(questions.rows)}
  epoch, position = divmod(taken, len(questions))
  return {"epoch": epoch, "position": position, "of": len(questions)}


@functools.lru_cache(maxsize=4)
def _permutation(epoch: int, key: int, of: int) -> np.ndarray:
  entropy = np.random.SeedSequence((key, epoch))
  return np.random.Generator(np.random.PCG64(entropy)).permutation(of)
