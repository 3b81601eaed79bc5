"""Abstract arrays: shapes, types and shardings without values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anysearch_jax.policy import decoder
from anysearch_jax.policy import parameters as weights


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
