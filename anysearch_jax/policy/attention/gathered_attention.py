"""Decode attention over rows that a call gathers from their pages once.

On a CPU, gathering pages in every step costs more than the attention itself. A
decode call therefore copies the pages of its rows into one array for each
layer, keys transposed so that both products read memory in order. Each step
adds its tokens to these arrays, and the end of the call writes the new tokens
to their pages.

A token is at the same offset of the same block whether it was gathered or was
sampled in this call, and the blocks are added in order, with exact zeros for
those past a row's last token. A row's result therefore depends, to the bit,
neither on the other rows of the call nor on where earlier calls ended.

Shapes: a row has X blocks of S tokens, a table has M pages of each of the B
rows, and a call adds T tokens to a row.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from anysearch_jax.policy.attention import paged_attention
from anysearch_jax.policy.attention import pages as pages_lib

# Blocks that nested conditions visit one by one, without a loop; see `gather`
# and `_attend`.
_NESTED = 4


class Rows(NamedTuple):
  """A layer's keys and values of all rows; token t is in block t // S.

  Attributes:
    k: keys `[X, K, B, H, S]`.
    v: values `[X, K, B, S, H]`.
    new_keys: `[B, T, K, H]`, keys of the call's tokens once more: they are
      written back, and reading them from `k`, which is transposed, would touch
      a cache line for each number.
    starts: int `[B]`, positions of each row's first new token.
  """

  k: jax.Array
  v: jax.Array
  new_keys: jax.Array
  starts: jax.Array


@dataclasses.dataclass(frozen=True)
class Gathered:
  """How rows are gathered and attended to.

  Attributes:
    block: number of tokens of a block, rounded down to whole pages.
    dtype: type of the gathered keys and values.
    rounds: whether pages are float8. New tokens then are rounded at once, so
      that they are the same numbers as when a later call gathers them.
  """

  block: int = 64
  dtype: Any = jnp.float32
  rounds: bool = False

  def empty(
    self, pages: pages_lib.Pages, *, lanes: int, columns: int, steps: int
  ) -> Rows:
    """Returns memory for `gather`, which a caller keeps from call to call.

    Zeroing it in every call would cost more than the gathering itself.

    Args:
      pages: the pages of one layer.
      lanes: B, rows of a call.
      columns: M, pages of a row.
      steps: T, tokens that a call may add to each row.
    """
    heads, _, size, h = pages.k.shape
    block_pages, blocks = self._blocks(size, columns)
    span = block_pages * size
    return Rows(
      k=jnp.zeros((blocks, heads, lanes, h, span), self.dtype),
      v=jnp.zeros((blocks, heads, lanes, span, h), self.dtype),
      new_keys=jnp.zeros((lanes, steps, heads, h), self.dtype),
      starts=jnp.zeros(lanes, jnp.int32),
    )

  def gather(
    self,
    rows: Rows,
    pages: pages_lib.Pages,
    table: jax.Array,
    starts: jax.Array,
  ) -> Rows:
    """Copies the pages of some rows.

    Only the blocks up to the longest row are copied. Their number is known on
    the device alone, so a condition guards each copy, nested in the one before.
    A loop would need no nesting, but XLA may compile a loop that copies as one
    slow kernel. After the first blocks, each condition copies a quarter more,
    so that there are few of them for long rows.

    Args:
      rows: memory to copy to, of `empty` or of an earlier call.
      pages: the pages of one layer.
      table: int `[B, M]`, the pages of each row in order, padded with 0.
      starts: int `[B]`, number of tokens cached for each row. Blocks far
        beyond all rows are not copied: nothing reads them.
    """
    b, columns = table.shape
    heads, count, size, _ = pages.k.shape
    block_pages, blocks = self._blocks(size, columns)
    span = block_pages * size
    table = jnp.pad(table, ((0, 0), (0, blocks * block_pages - columns)))
    table = table.reshape(b, blocks, 1, block_pages).transpose(1, 2, 0, 3)
    # Gathering whole contiguous pages is faster than x[:, numbers].
    table += count * jnp.arange(heads)[:, None, None]
    steps = rows.new_keys.shape[1]
    used = -(-(jnp.max(starts) + steps) // span)

    def copy_from(first: int, kv):
      """Copies blocks `first` to `used`; block `first` is one of them."""
      end = min(first + max(1, first // _NESTED), blocks)
      gathered = jax.tree.map(
        lambda x: x.reshape(heads * count, -1)[table[first:end]].reshape(
          end - first, heads, b, span, *x.shape[3:]
        ),
        pages,
      )
      k, v = pages_lib.dequantised(gathered, self.dtype)
      # Not `at[first:end].set`: its empty array of indices is a constant of
      # the shard, at which XLA of JAX 0.11 crashes.
      kv = jax.tree.map(
        lambda rows, blocks: jax.lax.dynamic_update_slice_in_dim(
          rows, blocks, first, axis=0
        ),
        kv,
        (k.mT, v),
      )
      if end == blocks:
        return kv
      copy_next = functools.partial(copy_from, end)
      return jax.lax.cond(end < used, copy_next, lambda kv: kv, kv)

    k, v = copy_from(0, (rows.k, rows.v))
    return Rows(k, v, rows.new_keys, starts)

  def _blocks(self, size: int, columns: int) -> tuple[int, int]:
    """Returns the pages of a block, and the blocks of a row."""
    block_pages = max(1, min(self.block // size, columns))
    return block_pages, -(-columns // block_pages)

  def __call__(
    self,
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    rows: Rows,
    positions: jax.Array,
    real: jax.Array,
    window: int | None = None,
    sinks: jax.Array | None = None,
  ) -> tuple[jax.Array, Rows]:
    """Adds one token to each row; it attends to all tokens up to itself.

    Args:
      q: `[B, 1, N, H]`.
      k: `[B, 1, K, H]` of the new tokens. If None, `q` is fused, see
        `pages.split_fused`.
      v: as `k`.
      rows: the layer's keys and values.
      positions: int `[B, 1]` of the new tokens in their rows.
      real: bool `[B, 1]`, False for padding, whose results are meaningless.
      window: number of tokens that each sees, itself included; None: all.
      sinks: `[N]`, as in `dense_attention.attend`.

    Returns:
      `[B, 1, N, H]`, dtype of `q`, and the rows with the new tokens; scores and
      softmax are float32.
    """
    if k is None or v is None:
      q, k, v = pages_lib.split_fused(q)
    chex.assert_equal_shape([k, v])
    chex.assert_equal_shape([positions, real])
    positions = positions[:, 0]
    if self.rounds:
      k = pages_lib.round_to_float8(k)
      v = pages_lib.round_to_float8(v)
    rows = _add(rows, k[:, 0], v[:, 0], positions)
    last = jnp.max(jnp.where(real[:, 0], positions, 0))
    return _attend(q, rows, positions, last, window, sinks), rows

  def write_back(
    self,
    pages: pages_lib.Pages,
    rows: Rows,
    table: jax.Array,
    counts: jax.Array,
  ) -> pages_lib.Pages:
    """Writes the new tokens of the rows to their pages.

    Args:
      pages: the pages of one layer.
      rows: its keys and values.
      table: as in `gather`.
      counts: int `[B]`, number of new tokens of each row.
    """
    span = rows.v.shape[3]
    step = jnp.arange(rows.new_keys.shape[1])
    positions = rows.starts[:, None] + step
    row = jnp.arange(len(table))[:, None]
    v = rows.v.at[positions // span, :, row, positions % span].get(mode="clip")
    real = step < counts[:, None]
    return pages_lib.write(pages, rows.new_keys, v, table, positions, real)


def _add(rows: Rows, k: jax.Array, v: jax.Array, positions: jax.Array) -> Rows:
  """Adds keys and values `[B, K, H]` at positions `[B]`."""
  span = rows.v.shape[3]
  row = jnp.arange(len(positions))
  block = positions // span
  offset = positions % span
  k = k.astype(rows.k.dtype)
  v = v.astype(rows.v.dtype)
  new_index = positions - rows.starts
  # A finished row may be full: writes past its end are dropped.
  return Rows(
    k=rows.k.at[block, :, row, :, offset].set(k, mode="drop"),
    v=rows.v.at[block, :, row, offset].set(v, mode="drop"),
    new_keys=rows.new_keys.at[row, new_index].set(k, mode="drop"),
    starts=rows.starts,
  )


def _attend(
  q: jax.Array,
  rows: Rows,
  positions: jax.Array,
  last: jax.Array,
  window: int | None,
  sinks: jax.Array | None,
) -> jax.Array:
  """Attends to block after block with an online softmax, up to token `last`.

  The first blocks are nested conditions and not a loop: a loop would copy each
  block before it multiplies it, which costs more than the products.
  """
  b, _, n, h = q.shape
  blocks, heads, _, span, _ = rows.v.shape
  out_dtype = q.dtype
  dtype = jnp.promote_types(q.dtype, rows.v.dtype)
  q = q.astype(dtype).reshape(b, heads, n // heads, h).swapaxes(0, 1)

  def step(i, carry):
    k = jax.lax.dynamic_index_in_dim(rows.k, i, keepdims=False).astype(dtype)
    v = jax.lax.dynamic_index_in_dim(rows.v, i, keepdims=False).astype(dtype)
    scores = jnp.einsum(
      "kbgh,kbhs->kbgs", q, k, preferred_element_type=jnp.float32
    )
    key_positions = i * span + jnp.arange(span)
    mask = key_positions <= positions[:, None]
    if window is not None:
      mask &= key_positions > positions[:, None] - window
    scores = jnp.where(mask[None, :, None], scores * h**-0.5, pages_lib.MASKED)
    return paged_attention.add_block(carry, scores, v, "kbgs,kbsh->kbgh")

  used = jnp.minimum(last // span + 1, blocks)

  def add_from(i: int, carry):
    """Adds blocks `i` to `used`; block `i` is one of them."""
    if i == min(_NESTED, blocks):
      return jax.lax.fori_loop(i, used, step, carry)
    carry = step(i, carry)
    if i + 1 == blocks:
      return carry
    add_next = functools.partial(add_from, i + 1)
    return jax.lax.cond(i + 1 < used, add_next, lambda carry: carry, carry)

  shape = (heads, b, n // heads, h)
  carry = paged_attention.initial_carry(shape, sinks)
  _, row_sum, out = add_from(0, carry)
  out = (out / row_sum[..., None]).astype(out_dtype)
  return out.swapaxes(0, 1).reshape(b, 1, n, h)
