"""Paged attention on TPUs: a Pallas kernel for the chunks of prefill.

A program takes a tile of queries of one row and kv head, and goes over the
row's pages block by block with an online softmax, so that no scores are ever in
main memory (https://arxiv.org/abs/2205.14135). A tile has the query heads that
share the kv head, with several tokens each. Scores, sums and partial results
are float32.

Pages are anywhere in main memory, so the kernel copies them itself. While one
block is computed, the next one is on its way: the next of the same tile, or the
first of the next program. JAX's ragged paged attention does the same, but wants
keys and values interleaved in one pool, unlike JAX's kernel for decode
(`jax.experimental.pallas.ops.tpu`).

Shapes: P pages of S tokens; a row's table has M pages; G query heads share a kv
head. The others are in the legend of `types`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from anysearch_jax.policy.attention import pages as pages_lib

# Tokens of a block, whose keys and values are copied at a time.
_SPAN = 512
# Queries of a tile, at most. Their scores with a block's tokens take 1 MiB of
# vector memory.
_QUERIES = 512
# TPUs store bfloat16 arrays in tiles of 16 rows and 128 columns.
_ROWS = 16
_COLUMNS = 128


def attend(
  q: jax.Array,
  pages: pages_lib.Pages,
  table: jax.Array,
  positions: jax.Array,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Attends from new tokens to the pages of their rows.

  Args:
    q: `[B, T, N, H]`.
    pages: the pages of one layer, with the new tokens; S is a multiple of 16.
    table: int `[B, M]`, the pages of each row.
    positions: int `[B, T]` of the new tokens in their rows; each attends to the
      tokens up to its own. They count up by 1, except that padding at the end
      of a row may repeat the last, and its results are meaningless.
    interpret: whether to run on any device, slowly.

  Returns:
    `[B, T, N, H]`, dtype of `q`.
  """
  b, t, n, h = q.shape
  heads, _, size, _ = pages.k.shape
  group = n // heads
  block_pages = min(max(1, _SPAN // size), table.shape[1])
  table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % block_pages)))
  # Tokens of a tile, a multiple of 16.
  tile = _ROWS * min(max(1, _QUERIES // group // _ROWS), -(-t // _ROWS))
  q = jnp.pad(q.swapaxes(1, 2), ((0, 0), (0, 0), (0, -t % tile), (0, 0)))
  tiles = q.shape[2] // tile
  # Some TPUs have two cores, which share the first axis of the grid. Rows
  # alternate between them, because those at the end of a call may be padding.
  cores = 2 if b % 2 == 0 else 1

  def query_index(core, program, *_):
    place = _row_head_tile(core, program, cores=cores, heads=heads, tiles=tiles)
    return *place, 0

  queries = pl.BlockSpec((None, group, tile, h), query_index)
  pool = pl.BlockSpec(memory_space=pl.ANY)  # Main memory.
  buffer = pltpu.VMEM((2, block_pages, size, h), pages.k.dtype)
  row_numbers = pltpu.VMEM((group * tile, _COLUMNS), jnp.float32)
  out = pl.pallas_call(
    functools.partial(_kernel, heads=heads, tiles=tiles),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(cores, b // cores * heads * tiles),
      in_specs=[queries, pool, pool],
      out_specs=queries,
      scratch_shapes=[
        buffer,  # Of keys.
        buffer,  # Of values.
        pltpu.SemaphoreType.DMA((2, 2)),
        pltpu.SMEM((1,), jnp.int32),
        row_numbers,  # Maxima.
        row_numbers,  # Sums.
        pltpu.VMEM((group * tile, h), jnp.float32),
      ],
    ),
    out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary")
    ),
    interpret=interpret,
    name="paged_prefill",
  )(table, positions[:, 0], jnp.max(positions, axis=1), q, pages.k, pages.v)
  return out[:, :, :t].swapaxes(1, 2)


def _row_head_tile(
  core: Any, program: Any, *, cores: Any, heads: int, tiles: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the row, the kv head and the tile of a core's program."""
  # `//` rounds down with a sign, which takes more instructions.
  row = jax.lax.div(program, heads * tiles) * cores + core
  head = jax.lax.rem(jax.lax.div(program, tiles), heads)
  return row, head, jax.lax.rem(program, tiles)


def _kernel(
  table_ref: Any,
  first_ref: Any,
  last_ref: Any,
  q_ref: Any,
  k_pool: Any,
  v_pool: Any,
  out_ref: Any,
  k_buffer: Any,
  v_buffer: Any,
  copied: Any,
  slot_ref: Any,
  max_ref: Any,
  sum_ref: Any,
  acc_ref: Any,
  *,
  heads: int,
  tiles: int,
) -> None:
  """Attends from a tile to the blocks of its row.

  Args:
    table_ref: `[B, M]`.
    first_ref: `[B]`, the first new token of each row.
    last_ref: `[B]`, the last token of each row.
    q_ref: `[G, T, H]`.
    k_pool: `[K, P, S, H]`, in main memory.
    v_pool: as `k_pool`.
    out_ref: as `q_ref`.
    k_buffer: two blocks `[2, pages, S, H]`.
    v_buffer: as `k_buffer`.
    copied: semaphores `[2, 2]`, of keys and values in each buffer.
    slot_ref: `[1]`, the buffer of this program's first block.
    max_ref: `[G T, 128]`, each query's maximum score, in every column: an array
      of one column would take as much memory.
    sum_ref: `[G T, 128]`, each query's softmax sum, alike.
    acc_ref: `[G T, H]`, the weighted sum of values, not yet divided.
    heads: K.
    tiles: number of tiles of a row and head.
  """
  core = pl.program_id(0)
  program = pl.program_id(1)
  cores = pl.num_programs(0)
  programs = pl.num_programs(1)
  group, tile, h = q_ref.shape
  _, block_pages, size, _ = k_buffer.shape
  span = block_pages * size

  row_head_tile = functools.partial(
    _row_head_tile, core, cores=cores, heads=heads, tiles=tiles
  )

  def copies(row, head, block, slot):
    """Yields the copies of a block's pages, to start or to wait for."""
    streams = ((k_pool, k_buffer), (v_pool, v_buffer))
    for i in range(block_pages):
      page = table_ref[row, block * block_pages + i]
      for j, (pool, buffer) in enumerate(streams):
        yield pltpu.make_async_copy(
          pool.at[head, page], buffer.at[slot, i], copied.at[j, slot]
        )

  def start(row, head, block, slot):
    for copy in copies(row, head, block, slot):
      copy.start()

  row, head, x = row_head_tile(program)
  first = first_ref[row] + x * tile
  last = jnp.minimum(first + tile - 1, last_ref[row])
  blocks = jax.lax.div(last, span) + 1

  @pl.when(program == 0)
  def begin():
    slot_ref[0] = 0
    start(row, head, 0, 0)

  max_ref[...] = jnp.full_like(max_ref, pages_lib.MASKED)
  sum_ref[...] = jnp.zeros_like(sum_ref)
  acc_ref[...] = jnp.zeros_like(acc_ref)
  slot = slot_ref[0]
  q = q_ref[...].reshape(group * tile, h)
  # TPUs have an instruction for powers of 2, but not for powers of e.
  scale = h**-0.5 * math.log2(math.e)

  def step(i, slot):
    next_slot = 1 - slot
    has_next_block = i + 1 < blocks

    # The next block of this tile, or the first one of the next program.
    @pl.when(has_next_block | (program + 1 < programs))
    def prefetch():
      next_row, next_head, _ = row_head_tile(program + 1)
      start(
        jnp.where(has_next_block, row, next_row),
        jnp.where(has_next_block, head, next_head),
        jnp.where(has_next_block, i + 1, 0),
        next_slot,
      )

    for copy in copies(row, head, i, slot):
      copy.wait()
    k = k_buffer[slot].reshape(span, h).astype(q.dtype)
    v = v_buffer[slot].reshape(span, h).astype(q.dtype)
    scores = jax.lax.dot_general(
      q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    shape = (tile, span)
    keys = i * span + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    queries = first + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    mask = keys <= queries
    scores = scores.reshape(group, tile, span) * scale
    scores = jnp.where(mask[None], scores, pages_lib.MASKED).reshape(-1, span)
    row_max = max_ref[...]
    new_max = jnp.maximum(row_max, jnp.max(scores, axis=1, keepdims=True))
    max_ref[...] = new_max
    probs = jnp.exp2(scores - new_max[:, :1])
    correction = jnp.exp2(row_max - new_max)
    block_sum = jnp.sum(probs, axis=1, keepdims=True)
    sum_ref[...] = sum_ref[...] * correction + block_sum
    block_out = jnp.dot(
      probs.astype(q.dtype), v, preferred_element_type=jnp.float32
    )
    acc_ref[...] = acc_ref[...] * correction[:, :1] + block_out
    return next_slot

  slot_ref[0] = jax.lax.fori_loop(0, blocks, step, slot)
  out = acc_ref[...] / sum_ref[...][:, :1]
  out_ref[...] = out.reshape(group, tile, h).astype(out_ref.dtype)
