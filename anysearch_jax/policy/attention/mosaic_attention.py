"""Paged attention on Hopper GPUs: one Mosaic kernel for prefill and decode.

Why Mosaic: JAX will remove Pallas's Triton backend, and jax-triton needs a
compiler of its own and Python 3.12. Mosaic comes with JAX, is interpreted on a
CPU and compiles without a device, so that tests check numbers and registers. It
has TMA and wgmma, which make a block's loads free for the warpgroup that waits
for the block before. https://docs.jax.dev/en/latest/pallas/gpu/reference.html

A program takes a tile of queries: some tokens of one row, with all query heads
that share a kv head. It goes over the row's pages block by block with an online
softmax (https://arxiv.org/abs/2205.14135), so that no scores are ever in main
memory. TMA copies page after page to shared memory while the block before is
computed. Queries and results are copied token by token, so that neither is
padded or transposed in main memory.

In decode a tile has one token, and a GPU more multiprocessors than there are
tiles. The blocks of a row are then split between programs, and their results
are combined at the end (https://pytorch.org/blog/flash-decoding/).

Shapes: P pages of S tokens; a row's table has M pages; G query heads share a kv
head. The others are in the legend of `types`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu

from anysearch_jax.policy.attention import pages as pages_lib

# Rows of a warpgroup's matrix products: wgmma has no fewer.
_ROWS = 64
# Blocks in shared memory: one is computed while the next one is copied. In
# decode with heads of 128, two programs then fit into a multiprocessor.
_SLOTS = 2
# Programs that occupy a GPU: 8 for each of the 132 multiprocessors of an H100.
_PROGRAMS = 1056
# Parts that a row's blocks are split into, at most: combining them costs too.
_MAX_SPLITS = 16
_COMPILER = gpu.CompilerParams(
  approx_math=True, lowering_semantics=gpu.LoweringSemantics.Warpgroup
)


class _Shape(NamedTuple):
  """How the work is divided.

  Attributes:
    tokens: new tokens of a warpgroup.
    warpgroups: warpgroups of a program, which share its blocks of keys.
    splits: parts that a row's keys are split into, each for a program.
    span: tokens of a block.
  """

  tokens: int
  warpgroups: int
  splits: int
  span: int


class _Stream(NamedTuple):
  """Keys or values on their way from pages to shared memory.

  Attributes:
    pool: the pages `[K, P, S, H]` in main memory.
    buffer: blocks in shared memory, `[slots, span, H]`.
    loaded: a barrier for each slot, which the copies of a block arrive at.
    used: a barrier that warpgroups arrive at when they have read a block.
  """

  pool: Any
  buffer: Any
  loaded: Any
  used: Any


def attend(
  q: jax.Array,
  pages: pages_lib.Pages,
  table: jax.Array,
  positions: jax.Array,
  *,
  interpret: Any = None,
) -> jax.Array:
  """Attends from new tokens to the pages of their rows.

  Args:
    q: `[B, T, N, H]`; at most 64 query heads share a kv head.
    pages: the pages of one layer, with the new tokens.
    table: int `[B, M]`, the pages of each row.
    positions: int `[B, T]` of the new tokens in their rows, in any order; each
      attends to the tokens up to its own.
    interpret: Mosaic's parameters of interpretation; None compiles the kernel.

  Returns:
    `[B, T, N, H]`, dtype of `q`.

  Raises:
    ValueError: too many query heads share a kv head.
  """
  b, t, n, h = q.shape
  heads, _, size, _ = pages.k.shape
  group = n // heads
  if group > _ROWS:
    raise ValueError(
      f"attention: found {group} query heads to a kv head, expected at most "
      f"{_ROWS}; set engine.attention=xla."
    )
  # A token's query heads are `group` rows of a product.
  tokens = min(t, _ROWS // group)
  # Two warpgroups share each block that is copied.
  warpgroups = 2 if t > tokens else 1
  tiles = -(-t // (warpgroups * tokens))
  splits = _PROGRAMS // (b * heads) if t == 1 else 1
  splits = max(1, min(_MAX_SPLITS, splits))
  span = max(64 * warpgroups, size)
  shape = _Shape(tokens=tokens, warpgroups=warpgroups, splits=splits, span=span)
  block_pages = span // size
  table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % block_pages)))
  # The last token that each query sees. Queries beyond the row's tokens repeat
  # the last one.
  padding = tiles * warpgroups * tokens - t
  last = jnp.pad(positions, ((0, 0), (0, padding)), mode="edge")
  ends = jnp.max(last.reshape(b, tiles, -1), axis=2)
  # One number for each row of a warpgroup's products.
  last = jnp.repeat(last.reshape(b, -1, tokens), group, axis=2)
  last = jnp.pad(last, ((0, 0), (0, 0), (0, _ROWS - last.shape[2])))
  outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
  if splits > 1:
    outputs = [
      jax.ShapeDtypeStruct((b, heads, splits, group, h), jnp.float32),
      jax.ShapeDtypeStruct((b, heads, splits, _ROWS), jnp.float32),
    ]
  buffer = gpu.SMEM((_SLOTS, span, h), q.dtype)
  loaded = gpu.Barrier(num_arrivals=block_pages, num_barriers=_SLOTS)
  used = gpu.Barrier(num_arrivals=warpgroups)
  results = gpu.kernel(
    functools.partial(_kernel, shape=shape, interpret=interpret is not None),
    out_type=outputs,
    scratch_types=[
      gpu.SMEM((warpgroups, _ROWS, h), q.dtype),
      # Arrivals are the copies of each token's queries, and of `last`.
      gpu.Barrier(num_arrivals=tokens + 1, num_barriers=warpgroups),
      buffer,  # Of keys.
      loaded,
      used,
      buffer,  # Of values.
      loaded,
      used,
    ],
    # Tiles are the first axis: neighbours read the same keys, which then stay
    # in the cache.
    grid=(tiles * splits, heads, b),
    grid_names=("tile", "head", "row"),
    num_threads=warpgroups,
    thread_name="warpgroup",
    compiler_params=_COMPILER,
    interpret=interpret,
    kernel_name="paged_attention",
  )(q, pages.k, pages.v, table, last, ends)
  if splits == 1:
    return results[0]
  out, sums = results
  out = pages_lib.combine_splits(out, sums[..., :group])
  return out.reshape(q.shape).astype(q.dtype)


def write(
  heads: jax.Array,
  pages: pages_lib.Pages,
  table: jax.Array,
  positions: jax.Array,
  real: jax.Array,
  *,
  interpret: Any = None,
) -> tuple[jax.Array, pages_lib.Pages]:
  """Writes keys and values to their pages, in place, by one kernel.

  XLA would first split the heads into three arrays, and then scatter twice.

  Args:
    heads: `[B, T, K, G + 2, H]`, each kv head's queries, key and value.
    pages: the pages of one layer.
    table: int `[B, M]`, the pages of each row.
    positions: int `[B, T]` of the new tokens in their rows.
    real: bool `[B, T]`, False for padding.
    interpret: as for `attend`.

  Returns:
    The queries `[B, T, N, H]`, and the pages with the new tokens.
  """
  b, t, kv_heads, vectors, h = heads.shape
  group = vectors - 2

  def kernel(heads_ref, page_ref, offset_ref, k_ref, v_ref, q_ref):
    head, token, row = map(lax.axis_index, ("head", "token", "row"))
    offset = pl.ds(offset_ref[row, token], 1)
    target = head, page_ref[row, token], offset
    queries = q_ref.at[row, token, pl.ds(head * group, group)]

    def copy(memory, loaded):
      gpu.copy_gmem_to_smem(heads_ref.at[row, token, head], memory, loaded)
      gpu.barrier_wait(loaded)
      gpu.copy_smem_to_gmem(memory.at[pl.ds(0, group)], queries)
      gpu.copy_smem_to_gmem(memory.at[pl.ds(group, 1)], k_ref.at[target])
      gpu.copy_smem_to_gmem(memory.at[pl.ds(group + 1, 1)], v_ref.at[target])
      gpu.wait_smem_to_gmem(0)

    pl.run_scoped(
      copy,
      gpu.SMEM((vectors, h), heads.dtype),
      gpu.Barrier(),
      collective_axes="warpgroup",
    )

  k = jax.new_ref(pages.k, memory_space=gpu.GMEM)
  v = jax.new_ref(pages.v, memory_space=gpu.GMEM)
  page, offset = pages_lib.page_and_offset(pages, table, positions, real)
  q = pl.kernel(
    kernel,
    jax.ShapeDtypeStruct((b, t, kv_heads * group, h), heads.dtype),
    mesh=gpu.Mesh(
      grid=(kv_heads, t, b),
      grid_names=("head", "token", "row"),
      num_threads=1,
      thread_name="warpgroup",
    ),
    compiler_params=_COMPILER,
    interpret=interpret,
    name="paged_write",
  )(heads, page, offset, k, v)
  return q, pages_lib.Pages(jax.freeze(k), jax.freeze(v))


def _kernel(
  q_ref: Any,
  k_ref: Any,
  v_ref: Any,
  table_ref: Any,
  last_ref: Any,
  ends_ref: Any,
  *refs: Any,
  shape: _Shape,
  interpret: bool,
) -> None:
  """Attends from a tile to one part of its row's blocks.

  Args:
    q_ref: `[B, T, N, H]`.
    k_ref: `[K, P, S, H]`.
    v_ref: as `k_ref`.
    table_ref: `[B, M]`.
    last_ref: `[B, tiles x warpgroups, 64]`, the last token of each query.
    ends_ref: `[B, tiles]`, the last token of each tile.
    *refs: the output as `q_ref`; or with several splits `[B, K, splits, G, H]`,
      and the logarithms of the softmax sums to the base 2, `[B, K, splits,
      64]`. Then shared memory and barriers, as in `attend`.
    shape: how the work is divided.
    interpret: whether the kernel is interpreted.
  """
  out_ref, *sums_refs = refs[:-8]
  q_memory, q_loaded = refs[-8:-6]
  keys = _Stream(k_ref, buffer=refs[-6], loaded=refs[-5], used=refs[-4])
  values = _Stream(v_ref, buffer=refs[-3], loaded=refs[-2], used=refs[-1])
  t, n, h = q_ref.shape[1:]
  size = k_ref.shape[2]
  group = n // k_ref.shape[0]
  span = shape.span
  block_pages = span // size
  tile_and_split = lax.axis_index("tile")
  head, row, warpgroup = map(lax.axis_index, ("head", "row", "warpgroup"))
  tile = lax.div(tile_and_split, shape.splits)
  split = lax.rem(tile_and_split, shape.splits)
  chunk = tile * shape.warpgroups + warpgroup  # The warpgroup's tokens.
  heads = pl.ds(head * group, group)
  blocks = lax.div(ends_ref[row, tile], span) + 1
  split_blocks = lax.div(blocks + shape.splits - 1, shape.splits)
  first = split * split_blocks
  stop = jnp.minimum(first + split_blocks, blocks)

  def page_numbers(i):
    """Returns the pages of block `i`, or of another one past the end."""
    column = jnp.minimum(i * block_pages, table_ref.shape[1] - block_pages)
    return tuple(table_ref[row, column + j] for j in range(block_pages))

  def fetch(stream, i, slot, pages):
    """Begins to copy block `i` to a slot, unless it is past the end.

    One warpgroup copies for all.
    """

    @pl.when((i < stop) & (warpgroup == 0))
    def _():
      for j, page in enumerate(pages):
        gpu.copy_gmem_to_smem(
          stream.pool.at[head, page],
          stream.buffer.at[slot, pl.ds(j * size, size)],
          stream.loaded.at[slot],
        )

  def replace(stream, i, slot, pages):
    """Fetches block `i` when all warpgroups have read the block in its slot."""
    if shape.warpgroups > 1:
      gpu.barrier_arrive(stream.used)
      pl.when(warpgroup == 0)(lambda: gpu.barrier_wait(stream.used))
    fetch(stream, i, slot, pages)

  for slot in range(_SLOTS):
    for stream in (keys, values):
      fetch(stream, first + slot, slot, page_numbers(first + slot))

  def load(staging, last_tokens):
    # TMA can write single rows only to memory without tiles, but wgmma reads
    # tiles: hence the copy by way of `staging`.
    @pl.loop(0, shape.tokens)
    def _(i):
      token = jnp.minimum(chunk * shape.tokens + i, t - 1)
      gpu.copy_gmem_to_smem(
        q_ref.at[row, token, heads],
        staging.at[warpgroup, pl.ds(i * group, group)],
        q_loaded.at[warpgroup],
      )

    gpu.copy_gmem_to_smem(
      last_ref.at[row, chunk], last_tokens.at[warpgroup], q_loaded.at[warpgroup]
    )
    gpu.barrier_wait(q_loaded.at[warpgroup])
    q_memory[warpgroup] = staging[warpgroup]
    gpu.commit_smem()
    return last_tokens[warpgroup]

  last = pl.run_scoped(
    load,
    gpu.SMEM((shape.warpgroups, _ROWS, h), q_ref.dtype),
    gpu.SMEM((shape.warpgroups, _ROWS), jnp.int32),
    collective_axes="warpgroup",
  )
  # GPUs have an instruction for powers of 2, but not for powers of e.
  scale = h**-0.5 * math.log2(math.e)
  product = functools.partial(_product, interpret=interpret)

  def step(i, carry):
    # `next_pages` were read a step ago, so that no copy waits for them.
    row_max, row_sum, out, next_pages = carry
    slot = lax.rem(i - first, _SLOTS)
    k = keys.buffer.at[slot]
    v = values.buffer.at[slot]
    gpu.barrier_wait(keys.loaded.at[slot])
    scores = product(q_memory.at[warpgroup], k, transposed=True)
    replace(keys, i + _SLOTS, slot, next_pages)
    key_positions = i * span + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    mask = key_positions <= _rows(last, scores)
    scores = jnp.where(mask, scores * scale, pages_lib.MASKED)
    new_max = jnp.maximum(row_max, jnp.max(scores, axis=1))
    probs = jnp.exp2(scores - _rows(new_max, scores))
    correction = jnp.exp2(row_max - new_max)
    row_sum = row_sum * correction + jnp.sum(probs, axis=1)
    probs = probs.astype(q_ref.dtype)
    gpu.barrier_wait(values.loaded.at[slot])
    out = out * _rows(correction, out) + product(probs, v)
    replace(values, i + _SLOTS, slot, next_pages)
    return new_max, row_sum, out, page_numbers(i + _SLOTS + 1)

  zeros = jnp.zeros((_ROWS,), jnp.float32)
  out = jnp.zeros((_ROWS, h), jnp.float32)
  carry = zeros + pages_lib.MASKED, zeros, out, page_numbers(first + _SLOTS)
  row_max, row_sum, out, _ = lax.fori_loop(first, stop, step, carry)
  # A split without blocks has neither weights nor results.
  row_sum = jnp.maximum(row_sum, 1e-30)

  def store(staging):
    staging[warpgroup] = (out / _rows(row_sum, out)).astype(staging.dtype)
    gpu.commit_smem()

    @pl.loop(0, shape.tokens)
    def _(i):
      token = jnp.minimum(chunk * shape.tokens + i, t - 1)
      target = (row, head, split) if sums_refs else (row, token, heads)
      gpu.copy_smem_to_gmem(
        staging.at[warpgroup, pl.ds(i * group, group)], out_ref.at[target]
      )

    gpu.wait_smem_to_gmem(0)

  pl.run_scoped(
    store,
    gpu.SMEM((shape.warpgroups, _ROWS, h), out_ref.dtype),
    collective_axes="warpgroup",
  )

  def store_sums(staging):
    staging[...] = row_max + jnp.log2(row_sum)
    gpu.commit_smem()
    gpu.copy_smem_to_gmem(staging, sums_refs[0].at[row, head, split])
    gpu.wait_smem_to_gmem(0)

  if sums_refs:
    memory = gpu.SMEM((_ROWS,), jnp.float32)
    pl.run_scoped(store_sums, memory, collective_axes="warpgroup")


def _rows(x: jax.Array, like: jax.Array) -> jax.Array:
  """Broadcasts a number of each row to all columns."""
  return lax.broadcast_in_dim(x, like.shape, [0])


def _product(
  x: Any, y: Any, *, transposed: bool = False, interpret: bool
) -> jax.Array:
  """Multiplies `[R, X]` by `[X, Y]` in shared memory, or by `[Y, X]` turned.

  `x` may be in shared memory or in registers.
  """
  if interpret:
    # The interpreter of JAX 0.10 has no product of registers or with a
    # transposed matrix.
    x = x[...]
    y = y[...]
  y = y.T if transposed else y
  if interpret:
    return jnp.dot(x, y, preferred_element_type=jnp.float32)

  def multiply(accumulator):
    gpu.wgmma(accumulator, x, y)
    return accumulator[...]

  shape = (x.shape[0], y.shape[1])
  return pl.run_scoped(multiply, gpu.ACC(shape, jnp.float32))
