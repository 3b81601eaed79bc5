"""Attention over paged KV caches (https://arxiv.org/abs/2309.06180).

Attention runs over blocks of pages up to the longest row of a call. A block
past a row's last token adds exact zeros, so the row's result does not depend,
to the bit, on the other rows of the call.

Shapes: P pages of S tokens; a row's table has M pages; G query heads share a kv
head. The others are in the legend of `types`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp

from anysearch_jax.policy.attention import layer_options
from anysearch_jax.policy.attention import pages as pages_lib

# Scores that `_xla` has in memory at a time: 16 MiB of float32.
_SCORES = 1 << 22
# Pages that JAX's decode kernel for TPUs copies at a time.
_TPU_DECODE_PAGES = 8
IMPLEMENTATIONS = ("xla", "mosaic", "tpu")


@dataclasses.dataclass(frozen=True)
class Paged:
  """How cached attention is computed, and on which mesh.

  Attributes:
    implementation: one of `IMPLEMENTATIONS`. `mosaic` is for Hopper GPUs;
      `tpu`, for TPUs, is one kernel for one token per row and another for
      several.
    block: maximum tokens of a row whose scores XLA has in memory at a time.
    mesh: rows and pages are sharded over `data`, heads over `tensor`. Each data
      shard has its own pages, and its table counts them from 0. None means one
      device.
    as_vectors: see `pages.write`.
  """

  implementation: str = "xla"
  block: int = 128
  mesh: jax.sharding.Mesh | None = None
  as_vectors: bool = False

  def __call__(
    self,
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    pages: pages_lib.Pages,
    table: jax.Array,
    positions: jax.Array,
    real: jax.Array,
    window: int | None = None,
    sinks: jax.Array | None = None,
  ) -> tuple[jax.Array, pages_lib.Pages]:
    """Writes new tokens to their pages; each attends to all tokens up to it.

    Args:
      q: `[B, T, N, H]`.
      k: `[B, T, K, H]` of the new tokens. If None, `q` is fused,
        `[B, T, K, G + 2, H]`: each kv head's queries, key and value.
      v: as `k`.
      pages: the layer's pages.
      table: int `[B, M]`, the pages of each row in order, padded with 0.
      positions: int `[B, T]` of the new tokens in their rows, below M x S.
      real: bool `[B, T]`, False for padding, whose results are meaningless.
      window: number of tokens that each sees, itself included; None: all. No
        kernel has windows or sinks, so XLA computes them.
      sinks: `[N]`, as in `dense_attention.attend`.

    Returns:
      `[B, T, N, H]`, dtype of `q`, and the pages with the new tokens; scores
      and softmax are float32.
    """
    chex.assert_equal_shape([positions, real])

    def local(q, k, v, pages, table, positions, real, sinks):
      if k is None and self.implementation == "mosaic":
        from anysearch_jax.policy.attention import mosaic_attention

        q, pages = mosaic_attention.write(q, pages, table, positions, real)
      else:
        if k is None:
          q, k, v = pages_lib.split_fused(q)
        pages = pages_lib.write(
          pages, k, v, table, positions, real, as_vectors=self.as_vectors
        )
      attend = self._attend(tokens=q.shape[1], window=window, sinks=sinks)
      return attend(q, pages, table, positions), pages

    if self.mesh is not None and self.mesh.size > 1:
      data, tensor = row_and_head_axes(self.mesh)
      rows = jax.P(data)
      heads = jax.P(data, None, tensor)
      pool = jax.P(tensor, data)
      local = jax.shard_map(
        local,
        mesh=self.mesh,
        in_specs=(heads, heads, heads, pool, rows, rows, rows, jax.P(tensor)),
        out_specs=(heads, pool),
        check_vma=False,
      )
    return local(q, k, v, pages, table, positions, real, sinks)

  def _attend(
    self, *, tokens: int, window: int | None, sinks: jax.Array | None
  ) -> Callable[..., jax.Array]:
    """Returns the function for `tokens` new tokens per row."""
    xla = functools.partial(_xla, block=self.block, sinks=sinks)
    if window is not None and window < layer_options.NO_WINDOW:
      return functools.partial(xla, window=window)
    if sinks is not None:
      return xla
    # Imported here because they load Pallas, which only accelerators need.
    if self.implementation == "mosaic":
      from anysearch_jax.policy.attention import mosaic_attention

      return mosaic_attention.attend
    if self.implementation == "tpu" and tokens > 1:
      from anysearch_jax.policy.attention import tpu_attention

      return tpu_attention.attend
    if self.implementation == "tpu":
      return _tpu_decode
    return xla


def row_and_head_axes(mesh: jax.sharding.Mesh) -> tuple[str | None, str | None]:
  """Returns the mesh axes of rows (and pages) and of heads, or None.

  An axis of one device becomes None, as in the shardings that compiled programs
  return. The same sharding spelled in two ways would compile twice.
  """
  data, tensor = (
    axis if mesh.shape[axis] > 1 else None for axis in ("data", "tensor")
  )
  return data, tensor


def choose(
  implementation: str,
  *,
  platform: str,
  head_dim: int,
  dtype: Any,
  page: int,
  stored: Any = None,
  capability: str | None = None,
) -> str:
  """Returns the implementation to use on a platform; `auto` takes the best.

  Args:
    implementation: `auto`, or one of `IMPLEMENTATIONS`.
    platform: `cpu`, `gpu`, `cuda` or `tpu`.
    head_dim: H.
    dtype: of queries.
    page: tokens per page.
    stored: dtype of the pages; None means `dtype`.
    capability: of an NVIDIA GPU, such as "9.0"; None if it is unknown.

  Raises:
    ValueError: the name is unknown, or the kernel cannot run there.
  """
  if implementation not in ("auto", *IMPLEMENTATIONS):
    raise ValueError(
      f"engine.attention: found {implementation!r}, expected auto or one of "
      f"{', '.join(IMPLEMENTATIONS)}."
    )
  bfloat16 = jnp.dtype(dtype) == jnp.bfloat16
  able = ["xla"]
  if platform in ("gpu", "cuda"):
    version = float(capability or 0)
    # Blackwell has other matrix products (tcgen05) than Hopper (wgmma).
    quantised = stored is not None and jnp.dtype(stored) != jnp.dtype(dtype)
    # If it is asked for, an error below says why it is refused.
    readable = not quantised or implementation == "mosaic"
    sized = head_dim in (64, 128) and page in (16, 32, 64, 128)
    if bfloat16 and sized and readable and 9 <= version < 10:
      able.append("mosaic")
  elif (
    platform == "tpu" and bfloat16 and head_dim % 128 == 0 and page % 16 == 0
  ):
    # The compiler stores narrower heads with tokens in the last axis, and would
    # lay out the whole pool anew for a kernel.
    able.append("tpu")
  if implementation == "auto":
    implementation = able[-1]
  if implementation not in able:
    raise ValueError(
      f"engine.attention: {implementation} does not run on {platform} with "
      f"head_dim {head_dim}, {jnp.dtype(dtype).name} and pages of {page}; "
      f"expected {' or '.join(able)}."
    )
  if stored not in (None, dtype) and implementation != "xla":
    raise ValueError(
      f"engine.kv_dtype: found float8, which the kernel {implementation} does "
      f"not read on {platform} {capability or 'devices'}; expected auto, or "
      "engine.attention=xla, which is slower."
    )
  return implementation


def _xla(
  q: jax.Array,
  pages: pages_lib.Pages,
  table: jax.Array,
  positions: jax.Array,
  *,
  block: int,
  window: int | None = None,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Attends to one block of pages after the other, with an online softmax.

  Shapes are static, so one gather would copy M pages for every row in every
  step, however few of them the rows use. The loop over blocks ends after the
  longest row: its number of iterations may depend on the data. A block gathers
  the same columns of all rows' tables.
  """
  b, t, n, h = q.shape
  kv_heads, _, size, _ = pages.k.shape
  block = min(block, _SCORES // (b * t * n))
  block_pages = max(1, min(block // size, table.shape[1]))
  span = block_pages * size
  # Pad the table to whole blocks.
  table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % block_pages)))
  q = q.reshape(b, t, kv_heads, n // kv_heads, h).transpose(2, 0, 3, 1, 4)
  dtype = q.dtype

  def step(i, carry):
    columns = (first + i) * block_pages + jnp.arange(block_pages)
    numbers = jnp.take_along_axis(table, columns, axis=1, mode="clip")
    gathered = jax.tree.map(
      lambda x: x[:, numbers].reshape(kv_heads, b, span, *x.shape[3:]), pages
    )
    k, v = pages_lib.dequantised(gathered, dtype)
    scores = jnp.einsum(
      "kbgth,kbsh->kbgts", q, k, preferred_element_type=jnp.float32
    )
    key_positions = ((first + i) * span + jnp.arange(span))[:, None]
    mask = key_positions <= positions[:, :, None]
    if window is not None:
      mask &= key_positions > positions[:, :, None] - window
    scores = jnp.where(mask[None, :, None], scores * h**-0.5, pages_lib.MASKED)
    return add_block(carry, scores, v, "kbgts,kbsh->kbgth")

  # Each row's first block; those before its window would add exact zeros.
  first = jnp.zeros((b, 1), jnp.int32)
  if window is not None:
    first_position = jnp.min(positions, axis=1, keepdims=True)
    first = jnp.maximum(0, first_position - window + 1) // span
  blocks = jnp.max(positions // span - first) + 1
  carry = initial_carry((kv_heads, b, n // kv_heads, t, h), sinks)
  _, row_sum, out = jax.lax.fori_loop(0, blocks, step, carry)
  out = (out / row_sum[..., None]).astype(dtype)
  return out.transpose(1, 3, 0, 2, 4).reshape(b, t, n, h)


def initial_carry(
  shape: Sequence[int], sinks: jax.Array | None
) -> tuple[jax.Array, ...]:
  """Returns the carry of `add_block` before any block.

  Args:
    shape: of the output, `[K, B, G, ..., H]`.
    sinks: `[N]`; a sink counts as a key without a value that was added already.
  """
  row_max = jnp.full(shape[:-1], pages_lib.MASKED)
  out = jnp.zeros(shape)
  if sinks is None:
    return row_max, jnp.zeros_like(row_max), out
  by_head = (shape[0], 1, shape[2], *(1 for _ in shape[4:]))
  sinks = sinks.astype(jnp.float32).reshape(by_head)
  row_max = jnp.broadcast_to(sinks, row_max.shape)
  return row_max, jnp.ones_like(row_max), out


def add_block(
  carry: tuple[jax.Array, ...], scores: jax.Array, v: jax.Array, products: str
) -> tuple[jax.Array, ...]:
  """Adds a block of keys to an online softmax.

  Args:
    carry: each query's maximum score, softmax sum and weighted sum of values
      over the blocks before, all float32; the sums are relative to the maximum,
      so they are rescaled (https://arxiv.org/abs/1805.02867).
    scores: scores of the block's keys, which are the last axis.
    v: the block's values.
    products: an einsum of probabilities and values.

  Returns:
    The carry with the block. The attention output is its third value divided by
    the second.
  """
  row_max, row_sum, out = carry
  new_max = jnp.maximum(row_max, jnp.max(scores, -1))
  probs = jnp.exp(scores - new_max[..., None])
  correction = jnp.exp(row_max - new_max)
  block_out = jnp.einsum(
    products, probs.astype(v.dtype), v, preferred_element_type=jnp.float32
  )
  row_sum = row_sum * correction + jnp.sum(probs, -1)
  return new_max, row_sum, out * correction[..., None] + block_out


def _tpu_decode(
  q: jax.Array, pages: pages_lib.Pages, table: jax.Array, positions: jax.Array
) -> jax.Array:
  """Calls JAX's kernel, which expects scaled queries and lengths of rows."""
  from jax.experimental.pallas.ops.tpu.paged_attention import (
    paged_attention_kernel,
  )

  padding = -table.shape[1] % _TPU_DECODE_PAGES
  table = jnp.pad(table, ((0, 0), (0, padding)))
  out = paged_attention_kernel.paged_attention(
    q[:, 0] * q.shape[-1] ** -0.5,
    pages.k,
    pages.v,
    positions[:, 0] + 1,
    table,
    pages_per_compute_block=_TPU_DECODE_PAGES,
  )
  return out[:, None].astype(q.dtype)
