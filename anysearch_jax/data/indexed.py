"""A sequence of questions that builds an item when it is accessed."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import overload

from anysearch_jax import types


class Indexed(Sequence[types.Question], abc.ABC):
  """Has the indices and slices of a list; slices are lists."""

  @abc.abstractmethod
  def item(self, index: int) -> types.Question:
    """Returns the question at an index in [0, len)."""

  @overload
  def __getitem__(self, index: int) -> types.Question: ...

  @overload
  def __getitem__(self, index: slice) -> list[types.Question]: ...

  def __getitem__(
    self, index: int | slice
  ) -> types.Question | list[types.Question]:
    if isinstance(index, slice):
      return [self.item(i) for i in range(*index.indices(len(self)))]
    if not -len(self) <= index < len(self):
      raise IndexError(f"Found {index}, expected one of {len(self)}.")
    return self.item(index % len(self))
