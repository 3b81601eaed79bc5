"""A program to compile ahead of time, with arguments that hold no data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# A kind that stands in memory only while its program runs; the others stay.
BATCH = "batch"


class Program(NamedTuple):
  """One jitted function of a run.

  Attributes:
    name: what it does, as `train step` or `decode`.
    fn: jitted, with donation and shardings in place.
    args: abstract arguments (`jax.ShapeDtypeStruct` with their shardings).
    kwargs: static arguments.
    tokens: that a call processes or samples.
    trips: how often its loop runs whose bound only the device knows
      (micro-batches of an optimizer step, tokens of a decode call).
    blocks: of cached keys that a row's attention goes through in a loop of
      that kind, inside the other one where a call has two.
    kinds: which abstract arrays are `masters`, `critic`, `moments`,
      `reference`, `KV cache`, `engine weights`, `batch`, ... . A kind of the
      same name in another program is the same arrays; all but `batch` stay
      between calls.
    reads: abstract arrays that each trip reads from memory at least; None: all
      arguments.
  """

  name: str
  fn: Any
  args: tuple[Any, ...]
  kwargs: Mapping[str, Any]
  tokens: int
  trips: int
  kinds: Mapping[str, Any]
  reads: Any = None
  blocks: int = 0

  @property
  def loops(self) -> dict[str, int]:
    """How often loops of unknown bounds run, as `flops.count` wants it."""
    if self.blocks and self.trips == 1:
      return {"trips": self.blocks}
    return {"trips": self.trips, "inner": max(self.blocks, 1)}
