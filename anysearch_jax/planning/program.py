"""A program to compile ahead of time, with arguments that hold no data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anysearch_jax.policy import decoder
from anysearch_jax.policy import parameters as weights

# The kind that is in memory only while its program runs; the others remain.
BATCH = "batch"


class Program(NamedTuple):
  """One jitted function of a run.

  Attributes:
    name: such as `train step` or `decode`.
    fn: the jitted function, with donation and shardings.
    args: abstract arguments (`jax.ShapeDtypeStruct` with their shardings).
    kwargs: static arguments.
    tokens: number of tokens that a call processes or samples.
    trips: iterations of its loop whose bound only the device knows
      (micro-batches of an optimizer step, tokens of a decode call).
    blocks: iterations of attention's loop over blocks of cached keys, which is
      inside the other loop if a call has both; 0 without such a loop.
    kinds: abstract arrays by kind: `masters`, `critic`, `moments`, `reference`,
      `KV cache`, `engine weights`, `batch`, ... . The same kind in two programs
      is the same arrays; all but `batch` remain between calls, unless another
      program has them freed or offloaded.
    segment: tokens of the segments that its rows are packed with; None if rows
      are not packed.
    freed: kinds of other programs that are in no memory while it runs.
    offloaded: kinds of other programs that are in host memory meanwhile.
    reads: abstract arrays that each trip reads from memory at least; None means
      all arguments.
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
  segment: int | None = None
  freed: frozenset[str] = frozenset()
  offloaded: frozenset[str] = frozenset()

  @property
  def loops(self) -> dict[str, int]:
    """Iterations of loops of unknown bounds, as arguments of `flops.count`."""
    if self.blocks and self.trips == 1:
      return {"trips": self.blocks}
    return {"trips": self.trips, "inner": max(self.blocks, 1)}


def cast(
  rows: Sequence[weights.Weight], shardings: dict, dtype: Any
) -> decoder.Params:
  """Returns abstract weights in `dtype`, except float32 scales of norms."""

  def leaf(row: weights.Weight) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
      row.shape,
      jnp.float32 if row.init is None else dtype,
      sharding=weights.get(shardings, row.path),
    )

  return weights.tree(rows, leaf)


def placed(shapes: Any, shardings: Any) -> Any:
  """Returns a tree of abstract arrays with these shardings."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )
