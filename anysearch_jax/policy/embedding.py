"""Token embeddings from a table that is sharded over a mesh.

Each device looks up its shard of the vocabulary and of the width for the tokens
of its fsdp neighbours, then the devices exchange the results. The collectives
therefore move hidden states, not the table: a token needs one row of it. The
gradient of the table is summed in the table's type, float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from anysearch_jax.policy import sharding


def lookup(
  embed: jax.Array,
  tokens: jax.Array,
  *,
  dtype: Any,
  layout: sharding.Layout | None,
) -> jax.Array:
  """Returns hidden states `[B, T, D]`, sharded as they are between blocks.

  Args:
    embed: `[V, D]`.
    tokens: int `[B, T]`.
    dtype: of the hidden states.
    layout: how both are sharded; None means one device.
  """
  if layout is None:
    return embed[tokens].astype(dtype)
  table = layout.table(embed.shape)
  vocab, model = table

  def local(embed: jax.Array, tokens: jax.Array) -> jax.Array:
    """Looks up tokens in a device's shard, and exchanges the results."""
    if model is not None:
      tokens = jax.lax.all_gather(tokens, model, axis=0, tiled=True)
    size = embed.shape[0]
    index = (
      tokens if vocab is None else tokens - jax.lax.axis_index(vocab) * size
    )
    in_shard = (index >= 0) & (index < size)
    # x: [fsdp x b, T, D / fsdp], complete after a sum over the vocabulary
    # shards. One device has the row and the others have zeros, so it is exact.
    x = embed[jnp.where(in_shard, index, 0)]
    x = jnp.where(in_shard[..., None], x, 0)
    x = x.astype(dtype)
    if vocab is not None and layout.sequence_parallel:
      x = jax.lax.psum_scatter(x, vocab, scatter_dimension=1, tiled=True)
    elif vocab is not None:
      x = jax.lax.psum(x, vocab)
    elif layout.sequence_parallel:
      length = x.shape[1] // layout.mesh.shape["tensor"]
      start = jax.lax.axis_index("tensor") * length
      x = jax.lax.dynamic_slice_in_dim(x, start, length, axis=1)
    # Exchange within fsdp: a device has a slice of D for the rows of all, and
    # gets all of D for its own rows.
    if model is not None:
      x = jax.lax.all_to_all(x, model, split_axis=0, concat_axis=2, tiled=True)
    return x

  return layout.shard_map(
    local,
    in_specs=(table, layout.tokens),
    out_specs=jax.P(sharding.BATCH, layout.rules["between"], None),
  )(embed, tokens)
