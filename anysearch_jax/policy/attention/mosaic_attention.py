"""Paged attention on Hopper GPUs: one Mosaic kernel for prefill and decode.

Why Mosaic: JAX will remove Pallas's Triton backend, and jax-triton needs a
compiler of its own and Python 3.12. Mosaic comes with JAX, is interpreted on a
CPU and compiles without a device, so that tests check numbers and registers. It
has TMA and wgmma, which make a block's loads free for the warpgroup that waits
for the block before. https://docs.jax.dev/en/latest/pallas/gpu/reference.html

A program takes queries of one row and kv head, those of all query heads that
share it, and goes over the row's pages block by block with an online softmax
(https://arxiv.org/abs/2205.14135). TMA copies page after page to shared memory
while the block before is computed. Queries and results are copied token by
token, so that neither is padded or transposed in main memory.

In decode the blocks of a row are split between programs if there are too few of
them; their results are joined at the end
(https://pytorch.org/blog/flash-decoding/).
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
# Blocks in shared memory: one is computed and one is under way. In decode with
# heads of 128, two programs then fit into a multiprocessor.
_SLOTS = 2
# Programs that occupy a GPU, about 8 for each multiprocessor.
_PROGRAMS = 1056
_MAX_SPLITS = 16
_COMPILER = gpu.CompilerParams(
  approx_math=True, lowering_semantics=gpu.LoweringSemantics.Warpgroup
)


class _Shape(NamedTuple):
  """How work is divided."""

  tokens: int  # Of a warpgroup.
  warpgroups: int  # Of a program; they share its blocks.
  splits: int  # Parts of the keys.
  span: int  # Tokens of a block.


def attend(
  q: jax.Array,
  pages: pages_lib.Pages,
  table: jax.Array,
  positions: jax.Array,
  *,
  interpret: Any = None,
) -> jax.Array:
  """Attends from new tokens to the pages of their rows.

  Arguments as in `tpu_attention.attend`, with positions in any order and at
  most 64 query heads to a kv head. `interpret` is None or Mosaic's parameters
  of interpretation.
  """
  b, t, n, h = q.shape
  heads, _, size, _ = pages.k.shape
  group = n // heads
  if group > _ROWS:
    raise ValueError(
      f"attention: found {group} query heads to a kv head, expected at most "
      f"{_ROWS}; set engine.attention=xla."
    )
  tokens = min(t, _ROWS // group)
  warpgroups = 2 if t > tokens else 1
  tiles = -(-t // (warpgroups * tokens))
  splits = _PROGRAMS // (b * heads) if t == 1 else 1
  splits = max(1, min(_MAX_SPLITS, splits))
  shape = _Shape(tokens, warpgroups, splits, max(64 * warpgroups, size))
  pieces = shape.span // size
  table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pieces)))
  # The last token that each query sees. Queries beyond the row's tokens repeat
  # the last one.
  more = tiles * warpgroups * tokens - t
  last = jnp.pad(positions, ((0, 0), (0, more)), mode="edge")
  ends = jnp.max(last.reshape(b, tiles, -1), axis=2)
  last = jnp.repeat(last.reshape(b, -1, tokens), group, axis=2)
  last = jnp.pad(last, ((0, 0), (0, 0), (0, _ROWS - last.shape[2])))
  outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
  if splits > 1:
    parts = (b, heads, splits)
    outputs = [
      jax.ShapeDtypeStruct((*parts, group, h), jnp.float32),
      jax.ShapeDtypeStruct((*parts, _ROWS), jnp.float32),
    ]
  block = gpu.SMEM((_SLOTS, shape.span, h), q.dtype)
  loaded = gpu.Barrier(num_arrivals=pieces, num_barriers=_SLOTS)
  used = gpu.Barrier(num_arrivals=warpgroups)
  found = gpu.kernel(
    functools.partial(_kernel, shape=shape, interpret=interpret is not None),
    out_type=outputs,
    scratch_types=[
      gpu.SMEM((warpgroups, _ROWS, h), q.dtype),
      gpu.Barrier(num_arrivals=tokens + 1, num_barriers=warpgroups),
      *(block, loaded, used) * 2,
    ],
    # Neighbours read the same keys, which stay in the cache.
    grid=(tiles * splits, heads, b),
    grid_names=("tile", "head", "row"),
    num_threads=warpgroups,
    thread_name="warpgroup",
    compiler_params=_COMPILER,
    interpret=interpret,
    kernel_name="paged_attention",
  )(q, pages.k, pages.v, table, last, ends)
  if splits == 1:
    return found[0]
  out = pages_lib.combine_splits(found[0], found[1][..., :group])
  return out.reshape(q.shape).astype(q.dtype)


def write(
  heads: jax.Array,
  pages: pages_lib.Pages,
  *rows: jax.Array,
  interpret: Any = None,
) -> tuple[jax.Array, pages_lib.Pages]:
  """Writes keys and values to their pages, in place, by one kernel.

  `heads` are `[B, T, K, G + 2, H]`, each kv head's queries, key and value;
  `rows` are those of `page_and_offset`. Also returns the queries `[B, T, N, H]`.
  """
  b, t, kv_heads, each, h = heads.shape
  group = each - 2

  def kernel(heads_ref, number_ref, offset_ref, k_ref, v_ref, q_ref):
    head, token, row = map(lax.axis_index, ("head", "token", "row"))
    place = head, number_ref[row, token], pl.ds(offset_ref[row, token], 1)
    queries = q_ref.at[row, token, pl.ds(head * group, group)]

    def copied(memory, loaded):
      gpu.copy_gmem_to_smem(heads_ref.at[row, token, head], memory, loaded)
      gpu.barrier_wait(loaded)
      gpu.copy_smem_to_gmem(memory.at[pl.ds(0, group)], queries)
      gpu.copy_smem_to_gmem(memory.at[pl.ds(group, 1)], k_ref.at[place])
      gpu.copy_smem_to_gmem(memory.at[pl.ds(group + 1, 1)], v_ref.at[place])
      gpu.wait_smem_to_gmem(0)

    memory = gpu.SMEM((each, h), heads.dtype), gpu.Barrier()
    pl.run_scoped(copied, *memory, collective_axes="warpgroup")

  k, v = (jax.new_ref(x, memory_space=gpu.GMEM) for x in pages[:2])
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
  )(heads, *pages_lib.page_and_offset(pages, *rows), k, v)
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
    k_ref: `[K, P, S, H]`. v_ref: as `k_ref`.
    table_ref: `[B, M]`.
    last_ref: `[B, tiles x warpgroups, 64]`, the last token of each query.
    ends_ref: `[B, tiles]`, the last token of each tile.
    refs: the output as `q_ref`; or with several splits `[B, K, splits, G, H]`,
      and the logarithms of the sums of weights `[B, K, splits, 64]`, to the
      base 2. Then shared memory and barriers.
    shape: how work is divided.
    interpret: whether the kernel is interpreted.
  """
  out_ref, *sums = refs[:-8]
  q_memory, q_loaded, *keys_and_values = refs[-8:]
  keys, values = (k_ref, *keys_and_values[:3]), (v_ref, *keys_and_values[3:])
  t, n, h = q_ref.shape[1:]
  size, group, span = k_ref.shape[2], n // k_ref.shape[0], shape.span
  x, head, row, own = map(lax.axis_index, ("tile", "head", "row", "warpgroup"))
  tile, part = lax.div(x, shape.splits), lax.rem(x, shape.splits)
  at = tile * shape.warpgroups + own
  heads = pl.ds(head * group, group)
  blocks = lax.div(ends_ref[row, tile], span) + 1
  share = lax.div(blocks + shape.splits - 1, shape.splits)
  first = part * share
  stop = jnp.minimum(first + share, blocks)

  def numbers(i):
    """Returns the pages of block `i`, or of another one past the end."""
    each = span // size
    page = jnp.minimum(i * each, table_ref.shape[1] - each)
    return tuple(table_ref[row, page + j] for j in range(each))

  def fetch(which, i, slot, numbers):
    """Begins to copy block `i` of keys or values to a slot, if there is one."""
    pool, memory, loaded = which[:3]

    @pl.when((i < stop) & (own == 0))
    def _():
      for j, number in enumerate(numbers):
        gpu.copy_gmem_to_smem(
          pool.at[head, number],
          memory.at[slot, pl.ds(j * size, size)],
          loaded.at[slot],
        )

  def replace(which, i, slot, numbers):
    """Fetches block `i` when all warpgroups have used what is in its slot."""
    used = which[-1]
    if shape.warpgroups > 1:
      gpu.barrier_arrive(used)
      pl.when(own == 0)(lambda: gpu.barrier_wait(used))
    fetch(which, i, slot, numbers)

  for slot in range(_SLOTS):
    for which in (keys, values):
      fetch(which, first + slot, slot, numbers(first + slot))

  def load(plain, seen):
    # By way of memory without tiles, whose rows TMA can write one by one.
    @pl.loop(0, shape.tokens)
    def _(i):
      gpu.copy_gmem_to_smem(
        q_ref.at[row, jnp.minimum(at * shape.tokens + i, t - 1), heads],
        plain.at[own, pl.ds(i * group, group)],
        q_loaded.at[own],
      )

    gpu.copy_gmem_to_smem(last_ref.at[row, at], seen.at[own], q_loaded.at[own])
    gpu.barrier_wait(q_loaded.at[own])
    q_memory[own] = plain[own]
    gpu.commit_smem()
    return seen[own]

  last = pl.run_scoped(
    load,
    gpu.SMEM((shape.warpgroups, _ROWS, h), q_ref.dtype),
    gpu.SMEM((shape.warpgroups, _ROWS), jnp.int32),
    collective_axes="warpgroup",
  )
  # Powers of 2 are an instruction, powers of e are not.
  scale = h**-0.5 * math.log2(math.e)
  product = functools.partial(_product, interpret=interpret)

  def step(i, carry):
    # Page numbers were read a step ago: the copies need not wait for them.
    most, total, out, found = carry
    slot = lax.rem(i - first, _SLOTS)
    k, v = (memory.at[slot] for _, memory, *_ in (keys, values))
    gpu.barrier_wait(keys[2].at[slot])
    scores = product(q_memory.at[own], k, turned=True)
    replace(keys, i + _SLOTS, slot, found)
    token = i * span + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    seen = token <= _rows(last, scores)
    scores = jnp.where(seen, scores * scale, pages_lib.MASKED)
    larger = jnp.maximum(most, jnp.max(scores, axis=1))
    p = jnp.exp2(scores - _rows(larger, scores))
    shrink = jnp.exp2(most - larger)
    total = total * shrink + jnp.sum(p, axis=1)
    p = p.astype(q_ref.dtype)
    gpu.barrier_wait(values[2].at[slot])
    out = out * _rows(shrink, out) + product(p, v)
    replace(values, i + _SLOTS, slot, found)
    return larger, total, out, numbers(i + _SLOTS + 1)

  nothing, out = (jnp.zeros(x, jnp.float32) for x in ((_ROWS,), (_ROWS, h)))
  start = nothing + pages_lib.MASKED, nothing, out, numbers(first + _SLOTS)
  most, total, out, _ = lax.fori_loop(first, stop, step, start)
  # A part without blocks has neither weights nor results.
  total = jnp.maximum(total, 1e-30)

  def store(plain):
    plain[own] = (out / _rows(total, out)).astype(plain.dtype)
    gpu.commit_smem()

    @pl.loop(0, shape.tokens)
    def _(i):
      token = jnp.minimum(at * shape.tokens + i, t - 1)
      place = (row, head, part) if sums else (row, token, heads)
      gpu.copy_smem_to_gmem(
        plain.at[own, pl.ds(i * group, group)], out_ref.at[place]
      )

    gpu.wait_smem_to_gmem(0)

  pl.run_scoped(
    store,
    gpu.SMEM((shape.warpgroups, _ROWS, h), out_ref.dtype),
    collective_axes="warpgroup",
  )

  def store_sums(plain):
    plain[...] = most + jnp.log2(total)
    gpu.commit_smem()
    gpu.copy_smem_to_gmem(plain, sums[0].at[row, head, part])
    gpu.wait_smem_to_gmem(0)

  if sums:
    memory = gpu.SMEM((_ROWS,), jnp.float32)
    pl.run_scoped(store_sums, memory, collective_axes="warpgroup")


def _rows(x: jax.Array, like: jax.Array) -> jax.Array:
  """Returns one number of each row, for all columns."""
  return lax.broadcast_in_dim(x, like.shape, [0])


def _product(
  x: Any, y: Any, *, turned: bool = False, interpret: bool
) -> jax.Array:
  """Multiplies `[R, X]` by `[X, Y]` in shared memory, or by `[Y, X]` turned."""
  if interpret:
    # The interpreter of JAX 0.10 has no product of registers or with a
    # transposed matrix.
    x, y = x if isinstance(x, jax.Array) else x[...], y[...]
    y = y.T if turned else y
    return jnp.dot(x, y, preferred_element_type=jnp.float32)
  y = y.T if turned else y

  def multiply(total):
    gpu.wgmma(total, x, y)
    return total[...]

  shape = (x.shape[0], y.shape[1])
  return pl.run_scoped(multiply, gpu.ACC(shape, jnp.float32))
