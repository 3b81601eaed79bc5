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

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu

from anysearch_jax.policy.attention import pages as pages_lib

# Finite, so that differences of masked scores are 0 and not NaN.
_MASKED = -1e30
# Rows of a warpgroup's matrix products: wgmma has no fewer.
_ROWS = 64
# Columns of one product with values: a thread holds the sums of all columns,
# and beside them only those of one product.
_WIDTH = 128
# Blocks in shared memory: one is computed and one is under way. In decode with
# heads of 128, two programs then fit into a multiprocessor.
_SLOTS = 2
# Programs that occupy a GPU, about 8 for each multiprocessor.
_PROGRAMS = 1056
_MAX_SPLITS = 16


@dataclasses.dataclass(frozen=True)
class _Shape:
  """How work is divided.

  tokens: of a warpgroup. warpgroups: of a program. tiles: programs of a row and
  kv head, each for `splits` parts of the keys. span: tokens of a block.
  """

  tokens: int
  warpgroups: int
  tiles: int
  splits: int
  span: int


def _shape(b: int, t: int, heads: int, group: int, h: int) -> _Shape:
  """Returns how to divide `b` rows of `t` tokens and `heads` kv heads."""
  if group > _ROWS:
    raise ValueError(
      f"attention: found {group} query heads to a kv head, expected at most "
      f"{_ROWS}; set engine.attention=xla."
    )
  tokens = min(t, _ROWS // group)
  # Two warpgroups share a block, which halves what is read from the cache.
  warpgroups = 2 if t > tokens and h <= _WIDTH else 1
  splits = _PROGRAMS // (b * heads) if t == 1 else 1
  return _Shape(
    tokens=tokens,
    warpgroups=warpgroups,
    tiles=-(-t // (warpgroups * tokens)),
    splits=max(1, min(_MAX_SPLITS, splits)),
    span=64 * warpgroups,
  )


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
  shape = _shape(b, t, heads, group, h)
  pieces = max(1, shape.span // size)
  table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pieces)))
  # The last token that each query sees. Queries beyond the row's tokens repeat
  # the last one.
  all_tokens = shape.tiles * shape.warpgroups * shape.tokens
  last = jnp.pad(positions, ((0, 0), (0, all_tokens - t)), mode="edge")
  ends = jnp.max(last.reshape(b, shape.tiles, -1), axis=2)
  last = last.reshape(b, -1, shape.tokens)
  last = jnp.repeat(last, group, axis=2)
  last = jnp.pad(last, ((0, 0), (0, 0), (0, _ROWS - last.shape[2])))
  outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
  if shape.splits > 1:
    parts = (b, heads, shape.splits)
    outputs = [
      jax.ShapeDtypeStruct((*parts, group, h), jnp.float32),
      jax.ShapeDtypeStruct((*parts, _ROWS), jnp.float32),
    ]
  block = gpu.SMEM((_SLOTS, shape.span, h), q.dtype)
  loaded = gpu.Barrier(num_arrivals=pieces, num_barriers=_SLOTS)
  used = gpu.Barrier(num_arrivals=shape.warpgroups)
  found = gpu.kernel(
    functools.partial(_kernel, shape=shape, interpret=interpret is not None),
    out_type=outputs,
    scratch_types=[
      gpu.SMEM((shape.warpgroups, _ROWS, h), q.dtype),
      gpu.Barrier(num_arrivals=shape.tokens + 1, num_barriers=shape.warpgroups),
      *(block, loaded, used) * 2,
    ],
    # Neighbours read the same keys, which stay in the cache.
    grid=(shape.tiles * shape.splits, heads, b),
    grid_names=("tile", "head", "row"),
    num_threads=shape.warpgroups,
    thread_name="warpgroup",
    compiler_params=gpu.CompilerParams(
      approx_math=True, lowering_semantics=gpu.LoweringSemantics.Warpgroup
    ),
    interpret=interpret,
    kernel_name="paged_attention",
  )(q, pages.k, pages.v, table, last, ends)
  if shape.splits == 1:
    return found[0]
  return (
    _joined(found[0], found[1][..., :group]).reshape(q.shape).astype(q.dtype)
  )


@dataclasses.dataclass
class _Blocks:
  """Blocks of keys or of values of a row and kv head, on their way.

  pool: `[K, P, S, H]`. memory: `[slots, span, H]`. loaded: a barrier for each
  slot. used: of all warpgroups that have read a slot. head: the kv head. stop:
  the first block that is not loaded. own: the number of the warpgroup.
  """

  pool: Any
  memory: Any
  loaded: Any
  used: Any
  head: Any
  stop: Any
  own: Any

  def load(self, i: Any, slot: Any, numbers: tuple[Any, ...]) -> None:
    """Begins to copy block `i` from its pages to a slot."""
    size, span = self.pool.shape[2], self.memory.shape[1]
    length = min(size, span)
    start = lax.rem(i * span, size) if size > span else 0

    @pl.when((i < self.stop) & (self.own == 0))
    def _():
      for j, number in enumerate(numbers):
        gpu.copy_gmem_to_smem(
          self.pool.at[self.head, number, pl.ds(start, length)],
          self.memory.at[slot, pl.ds(j * length, length)],
          self.loaded.at[slot],
        )

  def reload(
    self, i: Any, slot: Any, numbers: tuple[Any, ...], warpgroups: int
  ) -> None:
    """Replaces a slot's block by block `i` when all have used it."""
    if warpgroups > 1:
      gpu.barrier_arrive(self.used)
      pl.when(self.own == 0)(lambda: gpu.barrier_wait(self.used))
    self.load(i, slot, numbers)


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
  q_memory, q_loaded, *keys, v_memory, v_loaded, v_used = refs[-8:]
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
  k_blocks = _Blocks(k_ref, *keys, head, stop, own)
  v_blocks = _Blocks(v_ref, v_memory, v_loaded, v_used, head, stop, own)

  def numbers(i):
    """Returns the pages of block `i`, or of another one past the end."""
    each = max(1, span // size)
    page = lax.div(i * span, size) if size > span else i * each
    page = jnp.minimum(page, table_ref.shape[1] - each)
    return tuple(table_ref[row, page + j] for j in range(each))

  for slot in range(_SLOTS):
    found = numbers(first + slot)
    k_blocks.load(first + slot, slot, found)
    v_blocks.load(first + slot, slot, found)

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
  width = min(h, _WIDTH)
  product = functools.partial(_product, interpret=interpret)

  def step(i, carry):
    # Page numbers were read a step ago: the copies need not wait for them.
    most, total, out, found = carry
    slot = lax.rem(i - first, _SLOTS)
    gpu.barrier_wait(k_blocks.loaded.at[slot])
    scores = product(q_memory.at[own], k_blocks.memory.at[slot], turned=True)
    k_blocks.reload(i + _SLOTS, slot, found, shape.warpgroups)
    token = i * span + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    seen = token <= _rows(last, scores)
    scores = jnp.where(seen, scores * scale, _MASKED)
    larger = jnp.maximum(most, jnp.max(scores, axis=1))
    p = jnp.exp2(scores - _rows(larger, scores))
    shrink = jnp.exp2(most - larger)
    total = total * shrink + jnp.sum(p, axis=1)
    p = p.astype(q_ref.dtype)
    gpu.barrier_wait(v_loaded.at[slot])
    out = tuple(
      old * _rows(shrink, old)
      + product(p, v_memory.at[slot, :, pl.ds(j * width, width)])
      for j, old in enumerate(out)
    )
    v_blocks.reload(i + _SLOTS, slot, found, shape.warpgroups)
    return larger, total, out, numbers(i + _SLOTS + 1)

  nothing = jnp.zeros((_ROWS,), jnp.float32)
  most, total, out, _ = lax.fori_loop(
    first,
    stop,
    step,
    (
      nothing + _MASKED,
      nothing,
      (jnp.zeros((_ROWS, width), jnp.float32),) * (h // width),
      numbers(first + _SLOTS),
    ),
  )
  # A part without blocks has neither weights nor results.
  total = jnp.maximum(total, 1e-30)

  def store(plain):
    for j, x in enumerate(out):
      x = (x / _rows(total, x)).astype(plain.dtype)
      plain[own, :, pl.ds(j * width, width)] = x
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


def _joined(out: jax.Array, sums: jax.Array) -> jax.Array:
  """Joins parts: results `[B, K, splits, G, H]` by sums `[B, K, splits, G]`."""
  weight = jnp.exp2(sums - jnp.max(sums, axis=2, keepdims=True))
  weight /= jnp.sum(weight, axis=2, keepdims=True)
  return jnp.sum(out * weight[..., None], axis=2)
