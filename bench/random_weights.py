"""Random weights of a policy's shape, made where they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, table
from anysearch_jax.policy import parameters as weights


def policy(
  a: architecture_lib.Architecture, *, dtype: Any = jnp.float32
) -> decoder.Params:
  """Returns weights for all rows of the table, adapters included."""
  return make(table.rows(a), dtype=dtype)


def make(
  rows: Sequence[weights.Weight], *, dtype: Any, where: Any = None
) -> decoder.Params:
  """Returns random weights; scales of norms are 1 and in float32.

  Args:
    rows: of the table.
    dtype: of the weights.
    where: their shardings; None leaves the placement to JAX.
  """

  def fresh() -> decoder.Params:
    keys = jax.random.split(jax.random.key(0), len(rows))
    named = dict(zip((row.path for row in rows), keys, strict=True))
    return weights.tree(
      rows,
      lambda row: (
        jnp.ones(row.shape, jnp.float32)
        if row.init is None
        else row.init * jax.random.normal(named[row.path], row.shape, dtype)
      ),
    )

  return jax.jit(fresh, out_shardings=where)()
