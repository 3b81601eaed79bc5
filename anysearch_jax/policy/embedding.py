"""The embedding lookup over a mesh.

Each device looks up its shard of the vocabulary and of the width for the tokens
of its fsdp neighbours, then the devices exchange the results. The collectives
therefore move hidden states, not the table: a token needs one row of it. The
gradient of the table is summed in float32.

The gradient is written out: JAX 0.12 cannot add the gradient of a `shard_map`
into a ref for an argument that is replicated over a mesh axis, as the table is
(https://docs.jax.dev/en/latest/array_refs.html), and here one sum over the
devices that share a shard is enough.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anysearch_jax.policy import cpu_bfloat16, sharding


def lookup(
  embed: jax.Array,
  tokens: jax.Array,
  *,
  dtype: Any,
  layout: sharding.Layout | None = None,
) -> jax.Array:
  """Returns hidden states `[B, T, D]`, sharded as they are between blocks.

  Args:
    embed: `[V, D]`.
    tokens: int `[B, T]`.
    dtype: of the hidden states.
    layout: how both are sharded; None means one device.
  """
  if layout is None:
    return cpu_bfloat16.rows(embed, tokens).astype(dtype)
  table = _Table(
    shape=embed.shape,
    dtype=embed.dtype,
    hidden_dtype=dtype,
    layout=layout,
  )
  return _sharded_lookup(table, embed, tokens)


class _Table(NamedTuple):
  """What a sharded lookup knows before it has arrays.

  Attributes:
    shape: of the whole table, `(V, D)`.
    dtype: of the table.
    hidden_dtype: of the hidden states.
    layout: how the table, tokens and hidden states are sharded.
  """

  shape: Sequence[int]
  dtype: Any
  hidden_dtype: Any
  layout: sharding.Layout

  @property
  def spec(self) -> jax.P:
    """The partition of the table: the axes of V, the axes of D."""
    return self.layout.table(self.shape)

  @property
  def hidden_spec(self) -> jax.P:
    """The partition of hidden states `[B, T, D]` between blocks."""
    return jax.P(sharding.BATCH, self.layout.rules["between"], None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sharded_lookup(
  table: _Table, embed: jax.Array, tokens: jax.Array
) -> jax.Array:
  return table.layout.shard_map(
    functools.partial(_look_up_shard, table),
    in_specs=(table.spec, table.layout.tokens),
    out_specs=table.hidden_spec,
  )(embed, tokens)


def _forward(
  table: _Table, embed: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
  return _sharded_lookup(table, embed, tokens), tokens


def _backward(
  table: _Table, tokens: jax.Array, hidden_grad: jax.Array
) -> tuple[jax.Array, None]:
  embed_grad = table.layout.shard_map(
    functools.partial(_sum_shard_gradient, table),
    in_specs=(table.hidden_spec, table.layout.tokens),
    out_specs=table.spec,
  )(hidden_grad, tokens)
  return embed_grad.astype(table.dtype), None


_sharded_lookup.defvjp(_forward, _backward)


def _look_up_shard(
  table: _Table, embed: jax.Array, tokens: jax.Array
) -> jax.Array:
  """Looks up tokens in a device's shard `embed`, and exchanges the results."""
  vocab, model = table.spec
  layout = table.layout
  row, in_shard = _rows_of_shard(table, embed.shape[0], tokens)
  # [fsdp x b, T, D / fsdp], complete after a sum over the vocabulary's shards.
  # One device has the row and the others have zeros, so the sum is exact.
  hidden = jnp.where(in_shard[..., None], embed[row], 0)
  hidden = hidden.astype(table.hidden_dtype)
  if vocab is not None and layout.sequence_parallel:
    hidden = jax.lax.psum_scatter(
      hidden, vocab, scatter_dimension=1, tiled=True
    )
  elif vocab is not None:
    hidden = jax.lax.psum(hidden, vocab)
  elif layout.sequence_parallel:
    length = hidden.shape[1] // layout.mesh.shape["tensor"]
    start = jax.lax.axis_index("tensor") * length
    hidden = jax.lax.dynamic_slice_in_dim(hidden, start, length, axis=1)
  # Exchange within fsdp: a device has a slice of D for the rows of all, and
  # gets all of D for its own rows.
  if model is not None:
    hidden = jax.lax.all_to_all(
      hidden, model, split_axis=0, concat_axis=2, tiled=True
    )
  return hidden


def _sum_shard_gradient(
  table: _Table, hidden_grad: jax.Array, tokens: jax.Array
) -> jax.Array:
  """Undoes the exchange of `_look_up_shard`, then sums gradients by row."""
  vocab, model = table.spec
  layout = table.layout
  if model is not None:
    hidden_grad = jax.lax.all_to_all(
      hidden_grad, model, split_axis=2, concat_axis=0, tiled=True
    )
  if layout.sequence_parallel:
    hidden_grad = jax.lax.all_gather(hidden_grad, "tensor", axis=1, tiled=True)
  vocab_shards = layout.mesh.shape[vocab] if vocab else 1
  shard_rows = table.shape[0] // vocab_shards
  row, in_shard = _rows_of_shard(table, shard_rows, tokens)
  row_grad = jnp.where(in_shard[..., None], hidden_grad.astype(jnp.float32), 0)
  embed_grad = jnp.zeros((shard_rows, row_grad.shape[-1]), jnp.float32)
  embed_grad = embed_grad.at[row].add(row_grad)
  # The all-to-all brought the rows of `model` already; sum over other axes.
  return jax.lax.psum(embed_grad, layout.token_axes_without(model))


def _rows_of_shard(
  table: _Table, shard_rows: int, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the tokens' rows in this device's shard, and which are in it.

  If fsdp shards the width, these are the tokens of all devices that hold the
  same rows of the table.

  Args:
    table: the table.
    shard_rows: rows of the vocabulary in a shard.
    tokens: int `[b, T]`, this device's.

  Returns:
    int and bool `[b, T]`, or `[fsdp x b, T]`; the row of a token that is in
    another shard is 0.
  """
  vocab, model = table.spec
  if model is not None:
    tokens = jax.lax.all_gather(tokens, model, axis=0, tiled=True)
  first_row = 0 if vocab is None else jax.lax.axis_index(vocab) * shard_rows
  row = tokens - first_row
  in_shard = (row >= 0) & (row < shard_rows)
  return jnp.where(in_shard, row, 0), in_shard
