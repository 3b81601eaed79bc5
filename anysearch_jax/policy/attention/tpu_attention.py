"""Paged attention on TPUs: a Pallas kernel for the chunks of prefill.

A program takes a tile of queries of one row and kv head, and goes over the
row's pages block by block with an online softmax, so that no scores are ever in
main memory (https://arxiv.org/abs/2205.14135). A tile has the query heads that
share the kv head, with several tokens each. Scores, sums and partial results
are float32.

Pages are anywhere in main memory, so the kernel copies them itself. While one
block is computed, the next one is on its way: the next of the same tile, or the
first of the next program. JAX's ragged paged attention does the same, but wants
keys and values interleaved in one pool, unlike JAX's kernel for decode.
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

# Tokens whose keys and values are copied at a time.
_SPAN = 512
# Queries of a tile, at most. With a block's tokens, their scores take 1 MiB.
_QUERIES = 512
# bfloat16 vectors are stored in tiles of 16 rows and 128 columns.
_ROWS, _COLUMNS = 16, 128


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
    pages: of one layer, with the new tokens; a page has a multiple of 16.
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
  each, group = max(1, _SPAN // size), n // heads
  each = min(each, table.shape[1])
  table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % each)))
  # Tokens of a tile, a multiple of 16.
  tile = _ROWS * min(max(1, _QUERIES // group // _ROWS), -(-t // _ROWS))
  q = jnp.pad(q.swapaxes(1, 2), ((0, 0), (0, 0), (0, -t % tile), (0, 0)))
  tiles = q.shape[2] // tile
  # Some TPUs have two cores, which share the first axis of the grid. Rows
  # alternate between them, because those at the end of a call may be padding.
  cores = 2 if b % 2 == 0 else 1
  queries = pl.BlockSpec(
    (None, group, tile, h),
    lambda core, program, *_: (
      *_place(core, program, cores=cores, heads=heads, tiles=tiles),
      0,
    ),
  )
  buffer = pltpu.VMEM((2, each, size, h), pages.k.dtype)
  found = pl.pallas_call(
    functools.partial(_kernel, heads=heads, tiles=tiles),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(cores, b // cores * heads * tiles),
      in_specs=[queries, *(pl.BlockSpec(memory_space=pl.ANY),) * 2],
      out_specs=queries,
      scratch_shapes=[
        buffer,
        buffer,
        pltpu.SemaphoreType.DMA((2, 2)),
        pltpu.SMEM((1,), jnp.int32),
        *(pltpu.VMEM((group * tile, _COLUMNS), jnp.float32),) * 2,
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
  return found[:, :, :t].swapaxes(1, 2)


def _place(
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
  most_ref: Any,
  total_ref: Any,
  sum_ref: Any,
  *,
  heads: int,
  tiles: int,
) -> None:
  """Attends from a tile to the blocks of its row.

  Args:
    table_ref: `[B, M]`.
    first_ref: `[B]`, the first new token of each row. last_ref: the last.
    q_ref: `[G, T, H]`. out_ref: as `q_ref`.
    k_pool: `[K, P, S, H]`, in main memory. v_pool: as `k_pool`.
    k_buffer: two blocks `[2, pages, S, H]`. v_buffer: as `k_buffer`.
    copied: semaphores `[2, 2]`, of keys and values in each buffer.
    slot_ref: `[1]`, the buffer of this program's first block.
    most_ref: `[G T, 128]`, each query's maximum in every column.
    total_ref: the same of its sum.
    sum_ref: `[G T, H]`, before it is divided by the sum.
    heads: K.
    tiles: of a row and head.
  """
  core, program = pl.program_id(0), pl.program_id(1)
  cores, programs = pl.num_programs(0), pl.num_programs(1)
  group, tile, h = q_ref.shape
  _, each, size, _ = k_buffer.shape
  span = each * size

  place = functools.partial(_place, core, cores=cores, heads=heads, tiles=tiles)

  def copies(row, head, block, slot):
    for i in range(each):
      page = table_ref[row, block * each + i]
      for j, (pool, buffer) in enumerate(
        ((k_pool, k_buffer), (v_pool, v_buffer))
      ):
        yield pltpu.make_async_copy(
          pool.at[head, page], buffer.at[slot, i], copied.at[j, slot]
        )

  def start(row, head, block, slot):
    for copy in copies(row, head, block, slot):
      copy.start()

  row, head, x = place(program)
  first = first_ref[row] + x * tile
  last = jnp.minimum(first + tile - 1, last_ref[row])
  blocks = jax.lax.div(last, span) + 1

  @pl.when(program == 0)
  def begin():
    slot_ref[0] = 0
    start(row, head, 0, 0)

  most_ref[...] = jnp.full_like(most_ref, pages_lib.MASKED)
  total_ref[...] = jnp.zeros_like(total_ref)
  sum_ref[...] = jnp.zeros_like(sum_ref)
  slot = slot_ref[0]
  q = q_ref[...].reshape(group * tile, h)
  # Powers of 2 are an instruction, powers of e are not.
  scale = h**-0.5 * math.log2(math.e)

  def step(i, slot):
    other = 1 - slot

    more = i + 1 < blocks

    @pl.when(more | (program + 1 < programs))
    def prefetch():
      next_row, next_head, _ = place(program + 1)
      start(
        jnp.where(more, row, next_row),
        jnp.where(more, head, next_head),
        jnp.where(more, i + 1, 0),
        other,
      )

    for copy in copies(row, head, i, slot):
      copy.wait()
    k, v = (
      x[slot].reshape(span, h).astype(q.dtype) for x in (k_buffer, v_buffer)
    )
    scores = jax.lax.dot_general(
      q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    at = i * span + jax.lax.broadcasted_iota(jnp.int32, (tile, span), 1)
    seen = at <= first + jax.lax.broadcasted_iota(jnp.int32, (tile, span), 0)
    scores = scores.reshape(group, tile, span) * scale
    scores = jnp.where(seen[None], scores, pages_lib.MASKED).reshape(-1, span)
    most = most_ref[...]
    larger = jnp.maximum(most, jnp.max(scores, axis=1, keepdims=True))
    most_ref[...] = larger
    p = jnp.exp2(scores - larger[:, :1])
    shrink = jnp.exp2(most - larger)
    total_ref[...] = total_ref[...] * shrink + jnp.sum(p, 1, keepdims=True)
    new = jnp.dot(p.astype(q.dtype), v, preferred_element_type=jnp.float32)
    sum_ref[...] = sum_ref[...] * shrink[:, :1] + new
    return other

  slot_ref[0] = jax.lax.fori_loop(0, blocks, step, slot)
  out = sum_ref[...] / total_ref[...][:, :1]
  out_ref[...] = out.reshape(group, tile, h).astype(out_ref.dtype)
