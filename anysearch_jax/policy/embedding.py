"""Token embeddings from a table that is sharded over a mesh.

Each device looks up its shard of the vocabulary and of the width for the tokens
of its fsdp neighbours, then the devices exchange the results. The collectives
therefore move hidden states, not the table: a token needs one row of it. The
gradient of the table is summed in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

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

  `embed` is `[V, D]`, `tokens` int `[B, T]`, and no layout means one device.
  """
  if layout is None:
    return embed[tokens].astype(dtype)
  return _lookup(_How(dtype, embed.shape, embed.dtype, layout), embed, tokens)


class _How(NamedTuple):
  dtype: Any
  shape: Sequence[int]
  table_dtype: Any
  layout: sharding.Layout

  @property
  def table(self) -> jax.P:
    return self.layout.table(self.shape)

  @property
  def hidden(self) -> jax.P:
    return jax.P(sharding.BATCH, self.layout.rules["between"], None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(how: _How, embed, tokens):
  return how.layout.local(
    functools.partial(_local, how),
    in_specs=(how.table, how.layout.tokens),
    out_specs=how.hidden,
  )(embed, tokens)


def _forward(how: _How, embed, tokens):
  return _lookup(how, embed, tokens), tokens


def _backward(how: _How, tokens, g):
  d_embed = how.layout.local(
    functools.partial(_local_backward, how),
    in_specs=(how.hidden, how.layout.tokens),
    out_specs=how.table,
  )(g, tokens)
  return d_embed.astype(how.table_dtype), None


_lookup.defvjp(_forward, _backward)


def _local(how: _How, embed, tokens):
  vocab, model = how.table
  index, mine = _rows(how, embed.shape[0], tokens)
  # x: [fsdp x b, T, D / fsdp], complete after a sum over the vocabulary shards.
  x = jnp.where(mine[..., None], embed[index], 0).astype(how.dtype)
  # One device has the row and the others have zeros, so the sum is exact.
  if vocab is not None and how.layout.sequence_parallel:
    x = jax.lax.psum_scatter(x, vocab, scatter_dimension=1, tiled=True)
  elif vocab is not None:
    x = jax.lax.psum(x, vocab)
  elif how.layout.sequence_parallel:
    length = x.shape[1] // how.layout.mesh.shape["tensor"]
    start = jax.lax.axis_index("tensor") * length
    x = jax.lax.dynamic_slice_in_dim(x, start, length, axis=1)
  # Exchange within fsdp: from all rows of a part of D to all of D for own rows.
  if model is not None:
    x = jax.lax.all_to_all(x, model, split_axis=0, concat_axis=2, tiled=True)
  return x


def _local_backward(how: _How, g, tokens):
  """Undoes the exchange of `_local`, then adds up gradients by table row."""
  vocab, model = how.table
  if model is not None:
    g = jax.lax.all_to_all(g, model, split_axis=2, concat_axis=0, tiled=True)
  if how.layout.sequence_parallel:
    g = jax.lax.all_gather(g, "tensor", axis=1, tiled=True)
  size = how.shape[0] // (how.layout.mesh.shape[vocab] if vocab else 1)
  index, mine = _rows(how, size, tokens)
  g = jnp.where(mine[..., None], g.astype(jnp.float32), 0)
  d_embed = jnp.zeros((size, g.shape[-1]), jnp.float32).at[index].add(g)
  # The all-to-all already brought the rows of `model`; sum over the other axes.
  return jax.lax.psum(d_embed, how.layout.other_tokens(model))


def _rows(how: _How, size: int, tokens) -> tuple[jax.Array, jax.Array]:
  """Returns the tokens' rows in this device's shard, and which are in it.

  If fsdp shards the width, these are the tokens of all devices that hold the
  same rows of the table.
  """
  vocab, model = how.table
  if model is not None:
    tokens = jax.lax.all_gather(tokens, model, axis=0, tiled=True)
  first = 0 if vocab is None else jax.lax.axis_index(vocab) * size
  index = tokens - first
  mine = (index >= 0) & (index < size)
  return jnp.where(mine, index, 0), mine
