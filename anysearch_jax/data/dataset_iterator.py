"""The position of a run in its training questions, as a value.

Each epoch is a permutation that depends on (key, epoch) only. A position in the
infinite stream is therefore a number, from which a run resumes exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from anysearch_jax import types


class Stream(Sequence[types.Question]):
  """The first questions of an infinite stream over `rows`.

  Args:
    rows: the different questions, at least one.
    count: length of the stream; it may exceed the number of rows.
    key: seeds the permutations of all epochs, >= 0.
  """

  def __init__(self, rows: Sequence[types.Question], *, count: int, key: int):
    self.rows = rows
    self._count = count
    self.key = key

  def __len__(self) -> int:
    return self._count

  def __getitem__(self, index: int) -> types.Question:  # type: ignore[override]
    epoch, position = divmod(range(self._count)[index], len(self.rows))
    return self.rows[
      int(_permutation(epoch, self.key, len(self.rows))[position])
    ]


def distinct(questions: Sequence[types.Question]) -> Iterator[types.Question]:
  """Yields every question that a run takes; from a stream, each only once."""
  if isinstance(questions, Stream):
    # An epoch takes every question once, so the first epoch has all of them.
    first = min(len(questions), len(questions.rows))
    return map(questions.__getitem__, range(first))
  return iter(questions)


def progress(
  questions: Sequence[types.Question], consumed: int
) -> dict[str, Any]:
  """Returns a run's position in its questions, as plain values.

  Args:
    questions: a `Stream`, or a list that is repeated in its order.
    consumed: number of questions that the run has taken.

  Returns:
    `epoch`, the number of whole passes; `key`, that of a stream; `position` in
    the epoch; and `of`, the number of different questions.
  """
  if not isinstance(questions, Stream):
    epoch, position = divmod(consumed, len(questions))
    return {"epoch": epoch, "position": position, "of": len(questions)}
  epoch, position = divmod(consumed, len(questions.rows))
  return {
    "epoch": epoch,
    "key": questions.key,
    "position": position,
    "of": len(questions.rows),
  }


@functools.lru_cache(maxsize=4)
def _permutation(epoch: int, key: int, size: int) -> np.ndarray:
  entropy = np.random.SeedSequence((key, epoch))
  return np.random.Generator(np.random.PCG64(entropy)).permutation(size)
