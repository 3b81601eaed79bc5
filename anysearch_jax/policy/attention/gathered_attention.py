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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from anysearch_jax.policy.attention import paged_attention

# Finite, so that a block past a row's last token adds zeros and not NaN.
_MASKED = -1e30


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
  mesh: as in `paged_attention.Paged`.
  """

  block: int = 64
  mesh: jax.sharding.Mesh | None = None

  def gather(
    self,
    pages: paged_attention.Pages,
    table: jax.Array,
    starts: jax.Array,
    *,
    steps: int,
  ) -> Rows:
    """Copies the pages of some rows.

    Args:
      pages: of one layer.
      table: int `[B, M]`, the pages of each row in order, padded with 0.
      starts: int `[B]`, number of tokens cached for each row. Blocks that no
        row reaches are not copied.
      steps: number of tokens that each row may add.
    """

    def here(
      pages: paged_attention.Pages, table: jax.Array, starts: jax.Array
    ) -> Rows:
      (b, columns), (heads, count, size, h) = table.shape, pages.k.shape
      each = max(1, min(self.block // size, columns))
      span, blocks = each * size, -(-columns // each)
      table = jnp.pad(table, ((0, 0), (0, blocks * each - columns)))

      def copy(
        i: jax.Array, rows: tuple[jax.Array, jax.Array]
      ) -> tuple[jax.Array, jax.Array]:
        numbers = jax.lax.dynamic_slice_in_dim(table, i * each, each, axis=1)
        # Gathering whole contiguous pages is faster than x[:, numbers].
        numbers += count * jnp.arange(heads)[:, None, None]
        k, v = (
          x.reshape(heads * count, size * h)[numbers].reshape(heads, b, span, h)
          for x in pages
        )
        return (
          jax.lax.dynamic_update_index_in_dim(rows[0], k.swapaxes(2, 3), i, 0),
          jax.lax.dynamic_update_index_in_dim(rows[1], v, i, 0),
        )

      shape = (blocks, heads, b)
      # Nothing reads the blocks that are not copied.
      nothing = (
        jax.lax.empty((*shape, h, span), pages.k.dtype),
        jax.lax.empty((*shape, span, h), pages.v.dtype),
      )
      used = jnp.minimum(-(-(jnp.max(starts) + steps) // span), blocks)
      k, v = jax.lax.fori_loop(0, used, copy, nothing)
      return Rows(k, v, jnp.zeros((b, steps, heads, h), k.dtype), starts)

    return self._local(here, ("pages", "rows", "rows"), ("gathered",))(
      pages, table, starts
    )

  def __call__(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Rows,
    positions: jax.Array,
    real: jax.Array,
  ) -> tuple[jax.Array, Rows]:
    """Adds one token to each row; it attends to all tokens up to itself.

    Args:
      q: `[B, 1, N, H]`.
      k: `[B, 1, K, H]` of the new tokens. v: as `k`.
      rows: the layer's.
      positions: int `[B, 1]` of the new tokens in their rows.
      real: bool `[B, 1]`, False for padding, whose results are meaningless.

    Returns:
      `[B, 1, N, H]`, dtype of `q`, and the rows with the new tokens; scores and
      softmax are float32.
    """
    chex.assert_equal_shape([k, v])
    chex.assert_equal_shape([positions, real])

    def here(q, k, v, rows, positions, real):
      at, real = positions[:, 0], real[:, 0]
      rows = _add(rows, k[:, 0], v[:, 0], at)
      return _attend(q, rows, at, jnp.max(jnp.where(real, at, 0))), rows

    return self._local(
      here,
      ("heads", "heads", "heads", "gathered", "rows", "rows"),
      ("heads", "gathered"),
    )(q, k, v, rows, positions, real)

  def write_back(
    self,
    pages: paged_attention.Pages,
    rows: Rows,
    table: jax.Array,
    counts: jax.Array,
  ) -> paged_attention.Pages:
    """Writes the new tokens of the rows to their pages.

    Args:
      pages: the layer's.
      rows: the layer's.
      table: as in `gather`.
      counts: int `[B]`, number of new tokens of each row.
    """

    def here(pages, rows, table, counts):
      span, step = rows.v.shape[3], jnp.arange(rows.new.shape[1])
      positions = rows.starts[:, None] + step
      row = jnp.arange(len(table))[:, None]
      v = rows.v.at[positions // span, :, row, positions % span].get(
        mode="clip"
      )
      real = step < counts[:, None]
      return paged_attention.write(pages, rows.new, v, table, positions, real)

    return self._local(here, ("pages", "gathered", "rows", "rows"), ("pages",))(
      pages, rows, table, counts
    )

  def _local(
    self, f: Callable[..., Any], inputs: Sequence[str], outputs: Sequence[str]
  ) -> Callable[..., Any]:
    """Returns `f` applied to each device's rows, pages and heads.

    Args:
      f: the computation on one device.
      inputs: kinds of the arguments: `rows` `[B, ...]`, `heads` `[B, 1, N, H]`,
        `pages` or `gathered`.
      outputs: kinds of the results.
    """
    if self.mesh is None or self.mesh.size == 1:
      return f
    data, tensor = paged_attention.cut(self.mesh)
    named = {"data": data, "tensor": tensor, None: None}

    def spec(axes: tuple[str | None, ...]) -> jax.P:
      return jax.P(*(named[axis] for axis in axes))

    blocks, rows = spec((None, "tensor", "data")), spec(("data",))
    heads = spec(("data", None, "tensor"))
    gathered: list[Any] = [blocks, blocks, heads, rows]
    kinds: dict[str, Any] = {
      "rows": rows,
      "heads": heads,
      "pages": spec(("tensor", "data")),
      "gathered": Rows(*gathered),
    }
    found = tuple(kinds[kind] for kind in outputs)
    return jax.shard_map(
      f,
      mesh=self.mesh,
      in_specs=tuple(kinds[kind] for kind in inputs),
      out_specs=found if len(found) > 1 else found[0],
      check_vma=False,
    )


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
  q: jax.Array, rows: Rows, at: jax.Array, last: jax.Array
) -> jax.Array:
  """Attends to block after block with an online softmax, up to token `last`.

  The loop keeps a running maximum, sum and output (all float32) and rescales
  them at each block (https://arxiv.org/abs/1805.02867).
  """
  b, _, n, h = q.shape
  blocks, heads, _, span, _ = rows.v.shape
  dtype = q.dtype
  q = q.reshape(b, heads, n // heads, h).swapaxes(0, 1)

  def step(i, carry):
    most, total, out = carry
    k, v = (
      jax.lax.dynamic_index_in_dim(x, i, keepdims=False).astype(dtype)
      for x in (rows.k, rows.v)
    )
    scores = jnp.einsum(
      "kbgh,kbhs->kbgs", q, k, preferred_element_type=jnp.float32
    )
    seen = i * span + jnp.arange(span) <= at[:, None]
    scores = jnp.where(seen[None, :, None], scores * h**-0.5, _MASKED)
    larger = jnp.maximum(most, jnp.max(scores, -1))
    p = jnp.exp(scores - larger[..., None])
    shrink = jnp.exp(most - larger)
    new = jnp.einsum(
      "kbgs,kbsh->kbgh",
      p.astype(dtype),
      v,
      preferred_element_type=jnp.float32,
    )
    total = total * shrink + jnp.sum(p, -1)
    return larger, total, out * shrink[..., None] + new

  out = jnp.zeros((heads, b, n // heads, h), jnp.float32)
  most = jnp.full(out.shape[:-1], _MASKED)
  used = jnp.minimum(last // span + 1, blocks)
  _, total, out = jax.lax.fori_loop(
    0, used, step, (most, jnp.zeros_like(most), out)
  )
  out = (out / total[..., None]).astype(dtype)
  return out.swapaxes(0, 1).reshape(b, 1, n, h)
