"""Paged attention on Hopper: one Pallas kernel for prefill and decode."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu

from anysearch_jax.policy.attention import pages as pages_lib

_MASKED = -1e30
# Rows of a warpgroup's matrix products.
_ROWS = 64
_WIDTH = 128
_PROGRAMS = 1056
_MAX_SPLITS = 16


def attend(
  q: jax.Array,
  pages: pages_lib.Pages,
  table: jax.Array,
  positions: jax.Array,
  *,
  interpret: Any = False,
) -> jax.Array:
  b, t, n, h = q.shape
  heads, _, size, _ = pages.k.shape
  group = n // heads
  tokens = min(t, _ROWS // group)
  groups = 2 if t > tokens and h <= _WIDTH else 1
  tiles = -(-t // (groups * tokens))
  span = 128 if groups == 2 else 64
  table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % max(1, span // size))))
  last = jnp.pad(
    positions, ((0, 0), (0, tiles * groups * tokens - t)), mode="edge"
  )
  ends = jnp.max(last.reshape(b, tiles, groups * tokens), axis=2)
  last = jnp.repeat(last.reshape(b, tiles * groups, tokens), group, axis=2)
  last = jnp.pad(last, ((0, 0), (0, 0), (0, _ROWS - tokens * group)))
  splits = _PROGRAMS // (b * heads) if t == 1 else 1
  splits = max(1, min(_MAX_SPLITS, splits))
  outputs: Any = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
  if splits > 1:
    outputs = [
      jax.ShapeDtypeStruct((b, heads, splits, group, h), jnp.float32),
      jax.ShapeDtypeStruct((b, heads, splits, _ROWS), jnp.float32),
    ]
  slots = 2
  block = gpu.SMEM((slots, span, h), q.dtype)
  ready = gpu.Barrier(num_arrivals=max(1, span // size), num_barriers=slots)
  free = gpu.Barrier(num_arrivals=groups)
  found = gpu.kernel(
    functools.partial(
      _kernel, tokens=tokens, groups=groups, splits=splits, interpret=interpret
    ),
    out_type=outputs,
    scratch_types=[
      gpu.SMEM((groups, _ROWS, h), q.dtype),
      block,
      block,
      gpu.Barrier(num_arrivals=tokens + 1, num_barriers=groups),
      ready,
      ready,
      free,
      free,
    ],
    grid=(tiles * splits, heads, b),
    grid_names=("tile", "head", "row"),
    num_threads=groups,
    thread_name="warpgroup",
    compiler_params=gpu.CompilerParams(
      approx_math=True,
      reduction_scratch_bytes=0,
      lowering_semantics=gpu.LoweringSemantics.Warpgroup,
    ),
    interpret=gpu_interpret(interpret),
    kernel_name="paged_attention",
  )(q, *pages, table, last, ends)
  if splits > 1:
    found = [_joined(found[0], found[1][..., :group])]
  return found[0].reshape(q.shape).astype(q.dtype)


def gpu_interpret(x):
  if x:
    from jax._src.pallas.mosaic_gpu.interpret import params
    return params.InterpretGPUParams()
  return None


def _kernel(
  q_ref, k_ref, v_ref, table_ref, last_ref, ends_ref, out_ref, *rest,
  tokens, groups, splits, interpret,
):
  *sums, q_smem, k_smem, v_smem, q_ready, k_ready, v_ready, k_free, v_free = rest
  slots, span, h = k_smem.shape
  t, n = q_ref.shape[1:3]
  heads, _, size, _ = k_ref.shape
  group = n // heads
  x, head, row, own = (lax.axis_index(i) for i in ("tile", "head", "row", "warpgroup"))
  tile, part = x // splits, x % splits
  first_head = head * group
  token = [jnp.minimum((tile * groups + own) * tokens + i, t - 1) for i in range(tokens)]

  def load(stage, seen):
    stage = stage.at[own]
    for i in range(tokens):
      gpu.copy_gmem_to_smem(
        q_ref.at[row, token[i], pl.ds(first_head, group)],
        stage.at[pl.ds(i * group, group)],
        q_ready.at[own],
      )
    gpu.copy_gmem_to_smem(
      last_ref.at[row, tile * groups + own], seen.at[own], q_ready.at[own]
    )
    gpu.barrier_wait(q_ready.at[own])
    q_smem[own] = stage[...]
    gpu.commit_smem()
    return seen[own]

  last = pl.run_scoped(
    load,
    gpu.SMEM((groups, _ROWS, h), q_ref.dtype),
    gpu.SMEM((groups, _ROWS), jnp.int32),
    collective_axes="warpgroup",
  )
  blocks = ends_ref[row, tile] // span + 1
  share = (blocks + splits - 1) // splits
  first = part * share
  stop = jnp.minimum(first + share, blocks)
  copies = max(1, span // size)
  length = min(span, size)

  def numbers(i):
    if size > span:
      return (table_ref[row, jnp.minimum(i * span // size, table_ref.shape[1] - 1)],)
    i = jnp.minimum(i, table_ref.shape[1] // copies - 1)
    return tuple(table_ref[row, i * copies + j] for j in range(copies))

  def fetch(pool, smem, ready, i, slot, found):
    offset = i * span % size if size > span else 0
    @pl.when((i < stop) & (own == 0))
    def _():
      for j, number in enumerate(found):
        gpu.copy_gmem_to_smem(
          pool.at[head, number, pl.ds(offset, length)],
          smem.at[slot, pl.ds(j * length, length)],
          ready.at[slot],
        )

  def refill(pool, smem, ready, free, i, slot, found):
    if groups > 1:
      gpu.barrier_arrive(free)
      pl.when(own == 0)(lambda: gpu.barrier_wait(free))
    fetch(pool, smem, ready, i, slot, found)

  for d in range(slots):
    found = numbers(first + d)
    fetch(k_ref, k_smem, k_ready, first + d, d, found)
    fetch(v_ref, v_smem, v_ready, first + d, d, found)

  scale = h**-0.5 * math.log2(math.e)
  width = min(h, _WIDTH)

  def over(x, shape):
    return lax.broadcast_in_dim(x, shape, [0])

  def product(x, y, *, transposed=False):
    if interpret:
      # The interpreter of JAX 0.10 multiplies no registers and transposes
      # no shared memory.
      x, y = x if isinstance(x, jax.Array) else x[...], y[...]
      y = y.T if transposed else y
      return jnp.dot(x, y, preferred_element_type=jnp.float32)
    y = y.T if transposed else y

    def multiply(total):
      gpu.wgmma(total, x, y)
      return total[...]

    shape = (x.shape[0], y.shape[1])
    return pl.run_scoped(multiply, gpu.ACC(shape, jnp.float32))

  def step(i, carry):
    most, total, outs, found = carry
    slot = lax.rem(i - first, slots)
    gpu.barrier_wait(k_ready.at[slot])

    scores = product(q_smem.at[own], k_smem.at[slot], transposed=True)
    refill(k_ref, k_smem, k_ready, k_free, i + slots, slot, found)
    at = i * span + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    scores = jnp.where(at <= over(last, scores.shape), scores * scale, _MASKED)
    larger = jnp.maximum(most, jnp.max(scores, axis=1))
    p = jnp.exp2(scores - over(larger, scores.shape))
    shrink = jnp.exp2(most - larger)
    total = total * shrink + jnp.sum(p, axis=1)
    p = p.astype(v_smem.dtype)
    gpu.barrier_wait(v_ready.at[slot])

    outs = tuple(
      out * over(shrink, out.shape)
      + product(p, v_smem.at[slot, :, pl.ds(c * width, width)])
      for c, out in enumerate(outs)
    )
    refill(v_ref, v_smem, v_ready, v_free, i + slots, slot, found)
    return larger, total, outs, numbers(i + 1 + slots)

  most, total, outs, _ = lax.fori_loop(first, stop, step, (
    jnp.full((_ROWS,), _MASKED, jnp.float32),
    jnp.zeros((_ROWS,), jnp.float32),
    (jnp.zeros((_ROWS, width), jnp.float32),) * (h // width),
    numbers(first + slots),
  ))
  total = jnp.maximum(total, 1e-30)

  def store(stage):
    stage = stage.at[own]
    for c, out in enumerate(outs):
      stage[:, pl.ds(c * width, width)] = (out / over(total, out.shape)).astype(stage.dtype)
    gpu.commit_smem()
    if sums:
      gpu.copy_smem_to_gmem(stage.at[pl.ds(0, group)], out_ref.at[row, head, part])
    else:
      for i in range(tokens):
        gpu.copy_smem_to_gmem(stage.at[pl.ds(i * group, group)], out_ref.at[row, token[i], pl.ds(first_head, group)])
    gpu.wait_smem_to_gmem(0)

  pl.run_scoped(
    store,
    gpu.SMEM((groups, _ROWS, h), out_ref.dtype),
    collective_axes="warpgroup",
  )

  def store_sums(stage):
    stage[...] = most + jnp.log2(total)
    gpu.commit_smem()
    gpu.copy_smem_to_gmem(stage, sums[0].at[row, head, part])
    gpu.wait_smem_to_gmem(0)

  if sums:
    pl.run_scoped(
      store_sums,
      gpu.SMEM((_ROWS,), jnp.float32),
      collective_axes="warpgroup",
    )


def _joined(out, sums):
  weight = jnp.exp2(sums - jnp.max(sums, axis=2, keepdims=True))
  weight /= jnp.sum(weight, axis=2, keepdims=True)
  return jnp.sum(out * weight[..., None], axis=2)
