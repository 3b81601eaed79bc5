"""Paged attention on NVIDIA GPUs: one Triton kernel for prefill and decode.

JAX deprecated this backend of Pallas in 0.11. It serves the GPUs and pages that
`mosaic_attention` does not.

A program takes a tile of queries of one row and kv head, and goes over the
row's pages block by block with an online softmax, so that no scores are ever in
main memory (https://arxiv.org/abs/2205.14135). A tile has the query heads that
share the kv head, in prefill those of many tokens. Scores, sums and partial
results are float32.

In decode there are too few tiles to occupy a GPU. The blocks of each row are
therefore split between programs, whose partial results are joined at the end
(https://pytorch.org/blog/flash-decoding/).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from anysearch_jax.policy.attention import paged_attention
from anysearch_jax.policy.attention import pages as pages_lib

# Rows of a tile: tensor cores need 16. The larger a tile, the less often keys
# are read; but its numbers must fit the registers.
_TILES = (128, 64, 32, 16)
_NUMBERS = 64 * 128
# Tokens whose keys and values are on a multiprocessor at a time, at least.
_SPAN = 64
# Programs that occupy a GPU, about 16 for each multiprocessor.
_PROGRAMS = 2048
_MAX_SPLITS = 16


def attend(
  q: jax.Array,
  pages: pages_lib.Pages,
  table: jax.Array,
  positions: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Attends from new tokens to the pages of their rows.

  Arguments as in `tpu_attention.attend`, with positions in any order.
  """
  b, t, n, h = q.shape
  heads, _, size, _ = pages.k.shape
  each, group = max(1, _SPAN // size), n // heads
  table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % each)))
  # Rows of a kv head's tiles: its query heads, token after token.
  rows = t * group
  tile = _tile(rows, h)
  pad = -rows % tile
  q = q.reshape(b, t, heads, group, h).swapaxes(1, 2).reshape(b, heads, rows, h)
  q = jnp.pad(q, ((0, 0), (0, 0), (0, pad), (0, 0)))
  last = jnp.pad(jnp.repeat(positions, group, axis=1), ((0, 0), (0, pad)))
  tiles = (rows + pad) // tile
  # Decode has a token for each row, or some more that it guessed.
  decode = t == 1 or rows <= 32
  splits = _PROGRAMS // (b * heads * tiles) if decode else 1
  splits = max(1, min(_MAX_SPLITS, splits))
  pools = [x for x in pages if x is not None]
  whole = pl.BlockSpec(
    (None, None, tile, h), lambda x, k, i: (i, k, x // splits, 0)
  )
  outputs: Any = jax.ShapeDtypeStruct(q.shape, q.dtype)
  output_specs: Any = whole
  if splits > 1:
    parts = (b, heads, splits, rows + pad)
    outputs = [
      jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*parts, h), parts)
    ]
    output_specs = [_part(splits, tile, *rest) for rest in ((h,), ())]
  found = pl.pallas_call(
    functools.partial(
      _kernel, pools=len(pools), each=each, splits=splits, rows=rows
    ),
    # Neighbours read the same keys, which stay in the cache.
    grid=(tiles * splits, heads, b),
    in_specs=[
      whole,
      pl.BlockSpec((None, tile), lambda x, k, i: (i, x // splits)),
      pl.BlockSpec((None, table.shape[1]), lambda x, k, i: (i, 0)),
      *map(_pool, pools),
    ],
    out_shape=outputs,
    out_specs=output_specs,
    interpret=interpret,
    compiler_params=triton.CompilerParams(
      num_warps=8 if tile == _TILES[0] else 4, num_stages=2
    ),
    name="paged_attention",
  )(q, last, table, *pools)
  if splits > 1:
    out, log_sums = (x[:, :, :, :rows] for x in found)
    found = paged_attention.joined(out, log_sums).astype(q.dtype)
  found = found[:, :, :rows].reshape(b, heads, t, group, h)
  return found.swapaxes(1, 2).reshape(b, t, n, h)


def _tile(rows: int, h: int) -> int:
  """Returns the largest tile that fits and pads at most a quarter of `rows`."""
  return next(
    (
      tile
      for tile in _TILES
      if tile * h <= _NUMBERS and (rows % tile == 0 or 4 * tile <= rows)
    ),
    _TILES[-1],
  )


def _pool(x: jax.Array) -> pl.BlockSpec:
  """Returns a kv head's part of `[K, P, ...]`."""
  zeros = (0,) * (x.ndim - 1)
  return pl.BlockSpec((None, *x.shape[1:]), lambda _, k, i: (k, *zeros))


def _part(splits: int, tile: int, *rest: int) -> pl.BlockSpec:
  """Returns where a program writes in `[B, K, splits, R, *rest]`."""
  zeros = (0,) * len(rest)
  return pl.BlockSpec(
    (None, None, None, tile, *rest),
    lambda x, k, i: (i, k, x % splits, x // splits, *zeros),
  )


def _kernel(
  q_ref: Any,
  last_ref: Any,
  table_ref: Any,
  k_ref: Any,
  v_ref: Any,
  *refs: Any,
  pools: int,
  each: int,
  splits: int,
  rows: int,
) -> None:
  """Attends from a tile to one part of its row's blocks.

  Args:
    q_ref: `[R, H]`. last_ref: `[R]`, the last token that each query sees.
    table_ref: `[M]`.
    k_ref: `[P, S, H]`. v_ref: as `k_ref`.
    refs: of float8 pages the scales of keys and of values, `[P, S]`; the output
      `[R, H]`; with several splits, the logarithms of the sums of weights,
      `[R]`, to the base 2.
    pools: 2, or 4 with scales.
    each: pages of a block.
    splits: parts that the blocks are divided into.
    rows: of all tiles of a kv head; those beyond are padding.
  """
  scale_refs, (out_ref, *sums) = refs[: pools - 2], refs[pools - 2 :]
  tile, h = q_ref.shape
  span = each * k_ref.shape[1]
  q, last = q_ref[...], last_ref[...]
  # Powers of 2 are an instruction, powers of e are not.
  scale = h**-0.5 * math.log2(math.e)
  blocks = jnp.max(last) // span + 1
  share = (blocks + splits - 1) // splits
  first = pl.program_id(0) % splits * share

  def step(i, carry):
    most, total, out = carry
    numbers = table_ref[pl.ds(i * each, each)]
    k, v = (x[numbers].reshape(span, h).astype(q.dtype) for x in (k_ref, v_ref))
    scales = [
      x[numbers].reshape(span).astype(jnp.float32)[None] for x in scale_refs
    ]
    scores = triton.dot(q, k.T) * scale
    if scales:
      scores *= scales[0]
    at = i * span + jnp.arange(span)
    scores = jnp.where(at[None, :] <= last[:, None], scores, pages_lib.MASKED)
    larger = jnp.maximum(most, jnp.max(scores, axis=1))
    p = jnp.exp2(scores - larger[:, None])
    shrink = jnp.exp2(most - larger)
    total = total * shrink + jnp.sum(p, axis=1)
    if scales:
      p *= scales[1]
    new = triton.dot(p.astype(q.dtype), v)
    return larger, total, out * shrink[:, None] + new

  nothing = jnp.zeros(tile, jnp.float32)
  most, total, out = jax.lax.fori_loop(
    first,
    jnp.minimum(first + share, blocks),
    step,
    (nothing + pages_lib.MASKED, nothing, jnp.zeros((tile, h), jnp.float32)),
  )
  real = pl.program_id(0) // splits * tile + jnp.arange(tile) < rows
  whole = jnp.broadcast_to(real[:, None], (tile, h))
  # A part without blocks has neither weights nor results.
  total = jnp.maximum(total, 1e-30)
  out = (out / total[:, None]).astype(out_ref.dtype)
  triton.store(out_ref.at[...], out, mask=whole)
  if sums:
    triton.store(sums[0].at[...], most + jnp.log2(total), mask=real)
