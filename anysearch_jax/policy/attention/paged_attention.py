"""Attention over KV caches that are kept in pages.

A layer's cache is a pool of pages; a row of a call finds its tokens by a table
of page numbers, so rows of any length stand in one pool and share what they
have in common. Page 0 belongs to nobody: padding is written there.

Blocks of pages are gone through up to the longest row of a call. A block that
lies behind a row's own tokens leaves that row's numbers as they are, to the bit
(it adds zeros), so they do not depend on the rows beside it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from anysearch_jax.policy import architecture as architecture_lib

# Finite, so that a block that a row does not see gives zeros and not NaN.
_MASKED = -1e30
IMPLEMENTATIONS = ("xla", "triton", "tpu")


class Pages(NamedTuple):
  """Keys and values of one layer, `[K, P, S, H]` each: P pages of S tokens."""

  k: jax.Array
  v: jax.Array


Pools = tuple[Pages, ...]


def empty(
  a: architecture_lib.Architecture, pages: int, size: int, dtype: Any
) -> Pools:
  """Zeroed pages of every layer, apart: a stack would be copied every step."""
  shape = (a.kv_heads, pages, size, a.head_dim)
  return tuple(
    Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    for _ in range(a.layers)
  )


@dataclasses.dataclass(frozen=True)
class Paged:
  """How cached attention is computed, and where.

  implementation: of one token a row, one of `IMPLEMENTATIONS`; several tokens a
    row are always XLA's. `triton` is for NVIDIA, `tpu` for TPUs.
  block: tokens whose scores are held at a time.
  mesh: rows and pages are cut over its `data`, heads over its `tensor`. Each
    part of the rows has its own part of the pages, which its table counts from
    0. None: one device.
  """

  implementation: str = "xla"
  block: int = 128
  mesh: jax.sharding.Mesh | None = None

  def __call__(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: Pages,
    table: jax.Array,
    positions: jax.Array,
    real: jax.Array,
  ) -> tuple[jax.Array, Pages]:
    """Writes new tokens to their pages and attends to all up to each of them.

    Args:
      q: `[B, T, N, H]`.
      k: `[B, T, K, H]` of the new tokens. v: as `k`.
      pages: the layer's.
      table: int `[B, M]`, the pages of each row in order; 0 is none.
      positions: int `[B, T]` of the new tokens in their rows, below M x S.
      real: bool `[B, T]`; others are padding, and what they give is garbage.

    Returns:
      `[B, T, N, H]`, dtype of `q`, and the pages with the new tokens; scores
      and softmax are float32.
    """
    chex.assert_equal_shape([k, v])
    chex.assert_equal_shape([positions, real])

    def here(q, k, v, pages, table, positions, real):
      pages = write(pages, k, v, table, positions, real)
      attend = (
        functools.partial(_xla, block=self.block)
        if q.shape[1] > 1 or self.implementation == "xla"
        else _KERNELS[self.implementation]
      )
      return attend(q, pages, table, positions), pages

    if self.mesh is not None and self.mesh.size > 1:
      data, tensor = cut(self.mesh)
      rows, heads = jax.P(data), jax.P(data, None, tensor)
      pool = Pages(*[jax.P(tensor, data)] * 2)
      here = jax.shard_map(
        here,
        mesh=self.mesh,
        in_specs=(heads, heads, heads, pool, rows, rows, rows),
        out_specs=(heads, pool),
        check_vma=False,
      )
    return here(q, k, v, pages, table, positions, real)


def cut(mesh: jax.sharding.Mesh) -> tuple[str | None, str | None]:
  """The axes that rows (and pages) and heads are cut over, where they are.

  An axis of one device is left out, as compiled programs leave it out: the same
  sharding spelled in two ways would compile twice.
  """
  data, tensor = (
    axis if mesh.shape[axis] > 1 else None for axis in ("data", "tensor")
  )
  return data, tensor


def choose(
  implementation: str, *, platform: str, head_dim: int, dtype: Any, page: int
) -> str:
  """The implementation of a name on a platform; `auto` is its best.

  Args:
    implementation: `auto`, or one of `IMPLEMENTATIONS`.
    platform: `cpu`, `gpu`, `cuda` or `tpu`.
    head_dim: H.
    dtype: of keys and values.
    page: tokens of a page.

  Raises:
    ValueError: an unknown name, or a kernel that cannot run there.
  """
  if implementation not in ("auto", *IMPLEMENTATIONS):
    raise ValueError(
      f"engine.attention: found {implementation!r}, expected auto or one of "
      f"{', '.join(IMPLEMENTATIONS)}."
    )
  half = jnp.dtype(dtype) == jnp.bfloat16
  able = ["xla"]
  if platform in ("gpu", "cuda"):
    # Triton's blocks are powers of two, its products at least 16 wide.
    if half and head_dim in (64, 128, 256) and page in (16, 32, 64, 128):
      able.append("triton")
  elif platform == "tpu" and half and head_dim % 128 == 0 and page % 16 == 0:
    able.append("tpu")
  if implementation == "auto":
    return able[-1]
  if implementation not in able:
    raise ValueError(
      f"engine.attention: {implementation} does not run on {platform} with "
      f"head_dim {head_dim}, {jnp.dtype(dtype).name} and pages of {page}; "
      f"expected {' or '.join(able)}."
    )
  return implementation


def write(
  pages: Pages,
  k: jax.Array,
  v: jax.Array,
  table: jax.Array,
  positions: jax.Array,
  real: jax.Array,
) -> Pages:
  """Puts tokens where the table says; arguments as `Paged.__call__`."""
  size = pages.k.shape[2]
  number = jnp.take_along_axis(table, positions // size, axis=1, mode="clip")
  number, offset = jnp.where(real, number, 0), positions % size
  return jax.tree.map(
    lambda pool, new: pool.at[:, number, offset].set(
      new.transpose(2, 0, 1, 3).astype(pool.dtype)
    ),
    pages,
    Pages(k, v),
  )


def _xla(
  q: jax.Array,
  pages: Pages,
  table: jax.Array,
  positions: jax.Array,
  *,
  block: int,
) -> jax.Array:
  """Softmax over blocks of pages, one after the other, in float32."""
  b, t, n, h = q.shape
  kv_heads, _, size, _ = pages.k.shape
  each = max(1, min(block // size, table.shape[1]))
  span = each * size
  # The table in whole blocks.
  table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % each)))
  q = q.reshape(b, t, kv_heads, n // kv_heads, h).transpose(2, 0, 3, 1, 4)
  dtype = q.dtype

  def step(i, carry):
    most, total, out = carry
    numbers = jax.lax.dynamic_slice_in_dim(table, i * each, each, axis=1)
    k, v = (
      x[:, numbers].reshape(kv_heads, b, span, h).astype(dtype) for x in pages
    )
    scores = jnp.einsum(
      "kbgth,kbsh->kbgts", q, k, preferred_element_type=jnp.float32
    )
    at = i * span + jnp.arange(span)
    seen = at[None, None, :] <= positions[:, :, None]
    scores = jnp.where(seen[None, :, None], scores * h**-0.5, _MASKED)
    larger = jnp.maximum(most, jnp.max(scores, -1))
    p = jnp.exp(scores - larger[..., None])
    shrink = jnp.exp(most - larger)
    new = jnp.einsum(
      "kbgts,kbsh->kbgth",
      p.astype(dtype),
      v,
      preferred_element_type=jnp.float32,
    )
    total = total * shrink + jnp.sum(p, -1)
    return larger, total, out * shrink[..., None] + new

  out = jnp.zeros((kv_heads, b, n // kv_heads, t, h), jnp.float32)
  most = jnp.full(out.shape[:-1], _MASKED)
  blocks = jnp.max(positions) // span + 1
  _, total, out = jax.lax.fori_loop(
    0, blocks, step, (most, jnp.zeros_like(most), out)
  )
  out = (out / total[..., None]).astype(dtype)
  return out.transpose(1, 3, 0, 2, 4).reshape(b, t, n, h)


def _triton(
  q: jax.Array, pages: Pages, table: jax.Array, positions: jax.Array
) -> jax.Array:
  # It loads Pallas, which only GPUs need.
  from jax.experimental.pallas.ops.gpu import paged_attention

  # Rows are cut in parts that work side by side; parts are whole blocks, of
  # 128 tokens that fit a multiprocessor's own memory.
  splits, each = 4, max(1, 128 // pages.k.shape[2])
  table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % (splits * each))))
  out = paged_attention.paged_attention(
    q[:, 0] * q.shape[-1] ** -0.5,
    *pages,
    table,
    positions[:, 0] + 1,
    k_splits=splits,
    pages_per_compute_block=each,
  )
  return out[:, None].astype(q.dtype)


def _tpu(
  q: jax.Array, pages: Pages, table: jax.Array, positions: jax.Array
) -> jax.Array:
  # It loads Pallas, which only TPUs need.
  from jax.experimental.pallas.ops.tpu.paged_attention import (
    paged_attention_kernel,
  )

  each = 8
  table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % each)))
  out = paged_attention_kernel.paged_attention(
    q[:, 0] * q.shape[-1] ** -0.5,
    *pages,
    positions[:, 0] + 1,
    table,
    pages_per_compute_block=each,
  )
  return out[:, None].astype(q.dtype)


_KERNELS = {"triton": _triton, "tpu": _tpu}
