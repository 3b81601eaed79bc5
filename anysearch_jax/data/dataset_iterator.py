"""The position of a run in its training questions, as a value.

Each epoch is a permutation that depends on (key, epoch) only. A position in the
infinite stream is therefore three numbers, from which a run resumes exactly.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from anysearch_jax import types


class Indexed(Sequence[types.Question], abc.ABC):
  """A sequence without slices: an item is made when it is asked for."""

  @abc.abstractmethod
  def item(self, index: int) -> types.Question:
    """Returns the question at an index in [0, len)."""

  def __getitem__(self, index: int) -> types.Question:  # type: ignore[override]
    if not -len(self) <= index < len(self):
      raise IndexError(f"Found {index}, expected one of {len(self)}.")
    return self.item(index % len(self))


class Cursor(NamedTuple):
  """The position of the next question.

  Attributes:
    epoch: number of completed passes over all questions.
    key: key of the permutations.
    position: index in the epoch's permutation, less than the number of
      questions.
  """

  epoch: int
  key: int
  position: int


def at(taken: int, *, key: int, of: int) -> Cursor:
  """Returns the cursor after `taken` questions of a stream over `of`."""
  epoch, position = divmod(taken, of)
  return Cursor(epoch, key, position)


def take(cursor: Cursor, n: int, *, of: int) -> tuple[np.ndarray, Cursor]:
  """Takes the next questions.

  Args:
    cursor: position of the first one.
    n: number of questions to take, may exceed `of`.
    of: number of distinct questions.

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


class Stream(Indexed):
  """The first `count` questions of an infinite stream over `rows`.

  Args:
    rows: the questions, at least one.
    count: length of the stream, may exceed their number.
    key: key of the permutations, >= 0.
  """

  def __init__(self, rows: Sequence[types.Question], *, count: int, key: int):
    self.rows = rows
    self._count = count
    self._key = key

  def __len__(self) -> int:
    return self._count

  def item(self, index: int) -> types.Question:
    """Returns the question at an index in [0, len)."""
    (row,), _ = take(self.cursor(index), 1, of=len(self.rows))
    return self.rows[int(row)]

  def cursor(self, taken: int) -> Cursor:
    """Returns the stream's position after `taken` questions."""
    return at(taken, key=self._key, of=len(self.rows))


def distinct(
  questions: Sequence[types.Question],
) -> Iterator[types.Question]:
  """Yields every question that a run will take; of a stream, each only once."""
  if not isinstance(questions, Stream):
    yield from questions
    return
  count, of = len(questions), len(questions.rows)
  # An epoch takes every question once, so the first epoch has all of them.
  for row in take(questions.cursor(0), min(count, of), of=of)[0]:
    yield questions.rows[int(row)]


def progress(questions: Sequence[types.Question], taken: int) -> dict[str, Any]:
  """Returns a run's position in its questions, as plain values.

  Args:
    questions: a `Stream`, or a list that is repeated in its order.
    taken: number of questions taken.
  """
  if isinstance(questions, Stream):
    return {**questions.cursor(taken)._asdict(), "of": len(questions.rows)}
  epoch, position = divmod(taken, len(questions))
  return {"epoch": epoch, "position": position, "of": len(questions)}


@functools.lru_cache(maxsize=4)
def _permutation(epoch: int, key: int, of: int) -> np.ndarray:
  entropy = np.random.SeedSequence((key, epoch))
  return np.random.Generator(np.random.PCG64(entropy)).permutation(of)
