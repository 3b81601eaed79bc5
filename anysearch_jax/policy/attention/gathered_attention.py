"""Decode attention over rows that a call gathers from their pages once.

On a CPU, gathering pages in every step costs more than the attention itself. A
decode call therefore copies the pages of its rows into one array for each
layer, keys transposed so that both products read memory in order. Each step
adds its tokens to these arrays, and the end of the call writes the new tokens
to their pages.

A token is at the same place of the same block whether it was gathered or was
sampled in this call, and the blocks are added in order, with exact zeros for
those past a row's last token. A row's result therefore depends, to the bit,
neither on the other rows of the call nor on where earlier calls ended.
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

# Blocks that are visited one by one without a loop; see `gather` and `_attend`.
_NESTED = 4


class Rows(NamedTuple):
  """A layer's keys and values, in X blocks of S tokens.

  Token t of row b is in block t // S. k: `[X, K, B, H, S]`. v: with the last
  two axes swapped. new: `[B, T, K, H]`, keys of the call's tokens once more:
  they are written back, and reading them from `k` would touch a cache line for
  each number. starts: int `[B]`, positions of each row's first new token.
  """

  k: jax.Array
  v: jax.Array
  new: jax.Array
  starts: jax.Array


@dataclasses.dataclass(frozen=True)
class Gathered:
  """How rows are gathered and attended to.

  block: number of tokens of a block, rounded down to whole pages.
  dtype: of the gathered keys and values.
  rounds: whether pages are float8. New tokens then are rounded at once, so that
    they are the same numbers as when a later call gathers them.
  """

  block: int = 64
  dtype: Any = jnp.float32
  rounds: bool = False

  def empty(
    self, pages: pages_lib.Pages, *, lanes: int, columns: int, steps: int
  ) -> Rows:
    """Returns memory for `gather`, which a caller keeps from call to call.

    Zeroing it in every call would cost more than gathering what is needed. It
    has B `lanes` of M `columns` of a layer's pages each, and room for the T
    tokens, `steps`, that a call may add to each.
    """
    heads, _, size, h = pages.k.shape
    each, blocks = self._blocks(size, columns)
    shape = (blocks, heads, lanes)
    return Rows(
      jnp.zeros((*shape, h, each * size), self.dtype),
      jnp.zeros((*shape, each * size, h), self.dtype),
      jnp.zeros((lanes, steps, heads, h), self.dtype),
      jnp.zeros(lanes, jnp.int32),
    )

  def gather(
    self,
    rows: Rows,
    pages: pages_lib.Pages,
    table: jax.Array,
    starts: jax.Array,
  ) -> Rows:
    """Copies the pages of some rows.

    Conditions are nested here, because XLA may compile a loop that copies as
    one slow kernel. After the first blocks, each condition copies a quarter
    more, so that there are few of them for long rows.

    Args:
      rows: memory to copy to, of `empty` or of an earlier call.
      pages: of one layer.
      table: int `[B, M]`, the pages of each row in order, padded with 0.
      starts: int `[B]`, number of tokens cached for each row. Blocks far
        beyond all rows are not copied: nothing reads them.
    """
    (b, columns), (heads, count, size, _) = table.shape, pages.k.shape
    each, blocks = self._blocks(size, columns)
    span, steps = each * size, rows.new.shape[1]
    table = jnp.pad(table, ((0, 0), (0, blocks * each - columns)))
    table = table.reshape(b, blocks, 1, each).transpose(1, 2, 0, 3)
    # Gathering whole contiguous pages is faster than x[:, numbers].
    table += count * jnp.arange(heads)[:, None, None]
    used = -(-(jnp.max(starts) + steps) // span)

    def following(first: int, kv):
      """Copies blocks `first` to `used`; block `first` is one of them."""
      end = min(first + max(1, first // _NESTED), blocks)
      part = jax.tree.map(
        lambda x: x.reshape(heads * count, -1)[table[first:end]].reshape(
          end - first, heads, b, span, *x.shape[3:]
        ),
        pages,
      )
      k, v = pages_lib.dequantised(part, self.dtype)
      # Not `at[first:end].set`: its empty array of indices is a constant of
      # the shard, at which XLA of JAX 0.11 crashes.
      kv = jax.tree.map(
        lambda rows, part: jax.lax.dynamic_update_slice_in_dim(
          rows, part, first, axis=0
        ),
        kv,
        (k.mT, v),
      )
      if end == blocks:
        return kv
      rest = functools.partial(following, end)
      return jax.lax.cond(end < used, rest, lambda kv: kv, kv)

    k, v = following(0, (rows.k, rows.v))
    return Rows(k, v, rows.new, starts)

  def _blocks(self, size: int, columns: int) -> tuple[int, int]:
    """Returns the pages of a block, and the blocks of a row."""
    each = max(1, min(self.block // size, columns))
    return each, -(-columns // each)

  def __call__(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Rows,
    positions: jax.Array,
    real: jax.Array,
    window: int | None = None,
    sinks: jax.Array | None = None,
  ) -> tuple[jax.Array, Rows]:
    """Adds one token to each row; it attends to all tokens up to itself.

    Args:
      q: `[B, 1, N, H]`.
      k: `[B, 1, K, H]` of the new tokens. v: as `k`.
      rows: the layer's.
      positions: int `[B, 1]` of the new tokens in their rows.
      real: bool `[B, 1]`, False for padding, whose results are meaningless.
      window: how many tokens each sees, itself included; None: all.
      sinks: `[N]`, as in `dense_attention.attend`.

    Returns:
      `[B, 1, N, H]`, dtype of `q`, and the rows with the new tokens; scores and
      softmax are float32.
    """
    chex.assert_equal_shape([k, v])
    chex.assert_equal_shape([positions, real])
    at, real = positions[:, 0], real[:, 0]
    if self.rounds:
      k, v = pages_lib.round_to_float8(k), pages_lib.round_to_float8(v)
    rows = _add(rows, k[:, 0], v[:, 0], at)
    last = jnp.max(jnp.where(real, at, 0))
    return _attend(q, rows, at, last, window, sinks), rows

  def write_back(
    self,
    pages: pages_lib.Pages,
    rows: Rows,
    table: jax.Array,
    counts: jax.Array,
  ) -> pages_lib.Pages:
    """Writes the new tokens of the rows to their pages.

    `table` is as in `gather`; `counts`, int `[B]`, are the new tokens of each.
    """
    span, step = rows.v.shape[3], jnp.arange(rows.new.shape[1])
    positions = rows.starts[:, None] + step
    row = jnp.arange(len(table))[:, None]
    v = rows.v.at[positions // span, :, row, positions % span].get(mode="clip")
    real = step < counts[:, None]
    return pages_lib.write(pages, rows.new, v, table, positions, real)


def _add(rows: Rows, k: jax.Array, v: jax.Array, at: jax.Array) -> Rows:
  """Adds keys and values `[B, K, H]` at positions `[B]`."""
  span, row = rows.v.shape[3], jnp.arange(len(at))
  block, offset = at // span, at % span
  # A finished row may be full: what it would write is dropped.
  return Rows(
    rows.k.at[block, :, row, :, offset].set(
      k.astype(rows.k.dtype), mode="drop"
    ),
    rows.v.at[block, :, row, offset].set(v.astype(rows.v.dtype), mode="drop"),
    rows.new.at[row, at - rows.starts].set(k.astype(rows.k.dtype), mode="drop"),
    rows.starts,
  )


def _attend(
  q: jax.Array,
  rows: Rows,
  at: jax.Array,
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
  dtype = q.dtype
  q = q.reshape(b, heads, n // heads, h).swapaxes(0, 1)

  def step(i, carry):
    k, v = (
      jax.lax.dynamic_index_in_dim(x, i, keepdims=False).astype(dtype)
      for x in (rows.k, rows.v)
    )
    scores = jnp.einsum(
      "kbgh,kbhs->kbgs", q, k, preferred_element_type=jnp.float32
    )
    place = i * span + jnp.arange(span)
    seen = place <= at[:, None]
    if window is not None:
      seen &= place > at[:, None] - window
    scores = jnp.where(seen[None, :, None], scores * h**-0.5, pages_lib.MASKED)
    return paged_attention.add_block(carry, scores, v, "kbgs,kbsh->kbgh")

  used = jnp.minimum(last // span + 1, blocks)

  def following(i: int, carry):
    """Adds blocks `i` to `used`; block i is one of them."""
    if i == min(_NESTED, blocks):
      return jax.lax.fori_loop(i, used, step, carry)
    carry = step(i, carry)
    if i + 1 == blocks:
      return carry
    rest = functools.partial(following, i + 1)
    return jax.lax.cond(i + 1 < used, rest, lambda carry: carry, carry)

  shape = (heads, b, n // heads, h)
  _, total, out = following(0, paged_attention.initial_carry(shape, sinks))
  out = (out / total[..., None]).astype(dtype)
  return out.swapaxes(0, 1).reshape(b, 1, n, h)
