"""Self-attention of whole packed rows, for training and scoring.

One function has three implementations: XLA on any device, cuDNN on NVIDIA GPUs
and splash attention on TPUs. Each computes one device's shard without
collectives; the caller may shard rows and heads over devices. A fourth one,
`GATHERED`, is for positions that are sharded too: it gathers keys and values.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention

from anysearch_jax.policy.attention import (
  cudnn,
  dense_attention,
  paged_attention,
  pages,
)

IMPLEMENTATIONS = ("xla", "cudnn", "splash")
GATHERED = "gathered"
CONTEXT = "context"  # The mesh axis that positions are sharded over.
# The checkpoint name by which `saves` recognises attention's results.
_NAME = "attention"
# Query chunks are divided into parts, and the chunks of a part attend to the
# same prefix of the keys. (parts + 1) / (2 parts) of all scores are computed;
# more parts compute less but compile a loop each.
_PARTS = 4
# Block sizes of splash attention in tokens, the fastest first. A row's length
# must be a multiple.
_SPLASH_BLOCKS = (512, 256, 128)


def self_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  window: jax.Array | None = None,
  sinks: jax.Array | None = None,
  *,
  implementation: str,
  chunk: int,
  max_segments: int = 64,
) -> jax.Array:
  """Computes causal attention inside segments.

  Args:
    q: `[B, T, N, H]`; each kv head serves N / K query heads.
    k: `[B, T, K, H]`.
    v: as `k`.
    segment_ids: int `[B, T]`, 0 is padding. Segments are contiguous.
    window: number of tokens that each sees, itself included; None: all of its
      segment up to itself. Only for `xla` and `GATHERED`.
    sinks: as in `dense_attention.attend`. Only for `xla` and `GATHERED`.
    implementation: `xla`, `cudnn` or `splash`, see `choose`; or `GATHERED`,
      under `shard_map`, where T are the positions of one device of `CONTEXT`.
    chunk: for `xla`, number of queries whose scores are in memory at a time;
      for `GATHERED`, that number with the keys of one device.
    max_segments: for `cudnn`, maximum number of segments per row. A row with
      more segments gives NaN. Memory grows with this number.

  Returns:
    `[B, T, N, H]`, dtype of `q`, zeros at padding.
  """
  k = k.astype(q.dtype)
  v = v.astype(q.dtype)
  if implementation == "xla":
    out = _xla(q, k, v, segment_ids, window, sinks, chunk)
  elif implementation == "cudnn":
    out = _cudnn(q, k, v, segment_ids, max_segments)
  elif implementation == GATHERED:
    out = _gathered(q, k, v, segment_ids, window, sinks, chunk)
  else:
    out = _splash(q, k, v, segment_ids)
  return jnp.where((segment_ids > 0)[..., None, None], out, 0)


def choose(
  implementation: str,
  *,
  platform: str,
  head_dim: int,
  dtype: jax.typing.DTypeLike,
  length: int,
  compute_capability: float | None,
  xla_only_feature: str = "",
) -> str:
  """Returns the implementation to use; `auto` takes the best that can run.

  Args:
    implementation: one of `IMPLEMENTATIONS`, or `auto`.
    platform: of the devices: `cpu`, `gpu`, `cuda` or `tpu`.
    head_dim: H.
    dtype: of queries, keys and values.
    length: T.
    compute_capability: of NVIDIA devices, such as 9.0; None elsewhere.
    xla_only_feature: as in `Architecture`.

  Raises:
    ValueError: the implementation is unknown or cannot run.
  """
  name = jnp.dtype(dtype).name
  block = _SPLASH_BLOCKS[-1]
  found_length = f"found {length}: change batch.row_lengths"
  no_feature = {
    f"has no {xla_only_feature}, which this policy has": not xla_only_feature
  }
  # Conditions of each implementation, by the reason to refuse it otherwise.
  conditions = {
    # As `check_layout` and `check_is_flash_attention` of JAX.
    "cudnn": {
      f"runs on NVIDIA GPUs; found platform {platform}": (
        platform in ("gpu", "cuda")
      ),
      "needs compute capability 9.0 (Hopper) for packed rows; found "
      f"{compute_capability}": (
        compute_capability is not None and compute_capability >= 9.0
      ),
      f"needs bfloat16 or float16; found {name}: compute in bfloat16": (
        name in ("bfloat16", "float16")
      ),
      "needs heads of at most 256 dimensions, a multiple of 8; found "
      f"{head_dim}": head_dim <= 256 and head_dim % 8 == 0,
      f"needs rows of an even length; {found_length}": length % 2 == 0,
      **no_feature,
    },
    "splash": {
      f"runs on TPUs; found platform {platform}": platform == "tpu",
      f"needs rows of a multiple of {block} tokens; {found_length}": (
        length % block == 0
      ),
      **no_feature,
    },
    "xla": {},
  }
  refused = {
    name: next((reason for reason, holds in checks.items() if not holds), None)
    for name, checks in conditions.items()
  }
  if implementation == "auto":
    return next(name for name, reason in refused.items() if reason is None)
  if implementation not in refused:
    raise ValueError(
      f"batch.attention: found {implementation!r}, expected auto or one of "
      f"{', '.join(IMPLEMENTATIONS)}."
    )
  if reason := refused[implementation]:
    raise ValueError(
      f"batch.attention={implementation} {reason}; or set batch.attention to "
      "auto or xla."
    )
  return implementation


def saves(primitive, *_, **params) -> bool:
  """A `jax.checkpoint` policy that saves attention's results.

  The backward pass reads them; it computes everything else again.
  """
  if primitive.name == "name":
    return params["name"] == _NAME
  # cuDNN's softmax statistics cannot be named, so save all of its outputs.
  return cudnn.is_forward(primitive)


def _chunks(x: jax.Array, count: int) -> jax.Array:
  """Cuts `[B, T, ...]` into `[count, B, size, ...]`; the end is padded."""
  length = x.shape[1]
  size = -(-length // count)
  padding = [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2)
  x = jnp.pad(x, padding)
  return x.reshape(len(x), count, size, *x.shape[2:]).swapaxes(0, 1)


def _xla(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  window: jax.Array | None,
  sinks: jax.Array | None,
  chunk: int,
) -> jax.Array:
  """Attends chunk after chunk of queries to a prefix of the keys.

  Only one chunk's scores are in memory at a time; each chunk is rematerialised
  in the backward pass.
  """
  b, t, n, h = q.shape
  k = k.swapaxes(1, 2)
  v = v.swapaxes(1, 2)
  chunks = -(-t // chunk)
  if chunks == 1:
    mask = dense_attention.segment_mask(segment_ids, window)
    return checkpoint_name(dense_attention.attend(q, k, v, mask, sinks), _NAME)
  # Chunks of equal size: the last one is padded by fewer than `chunks` tokens.
  size = -(-t // chunks)
  # The gradients of keys and values are summed over chunks in the dtype of
  # these arrays, so make it float32.
  k = k.astype(jnp.float32)
  v = v.astype(jnp.float32)
  # `attend` must not close over sinks: `jax.vjp(...).with_refs` then expects a
  # cotangent of another type (seen with JAX 0.10.2).
  if sinks is not None:
    sinks = jnp.broadcast_to(sinks, (chunks, n))
  queries = _chunks(q, chunks), _chunks(segment_ids, chunks), sinks
  positions = np.arange(chunks * size).reshape(chunks, size)
  outputs = []
  for part in np.array_split(np.arange(chunks), min(chunks, _PARTS)):
    end = min((part[-1] + 1) * size, t)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def attend(xs, end=end):
      q, ids, sinks, positions = xs
      mask = ids[:, :, None] == segment_ids[:, None, :end]
      distances = positions[:, None] - np.arange(end)
      visible = distances >= 0
      if window is not None:
        visible &= distances < window
      mask &= visible
      keys = k[:, :, :end].astype(q.dtype)
      values = v[:, :, :end].astype(q.dtype)
      return dense_attention.attend(q, keys, values, mask, sinks)

    q_part, ids_part, sinks_part = jax.tree.map(
      lambda x, part=part: x[part[0] : part[-1] + 1], queries
    )
    xs = q_part, ids_part, sinks_part, positions[part]
    outputs.append(jax.lax.map(attend, xs))
  out = jnp.concatenate(outputs).swapaxes(0, 1).reshape(b, chunks * size, n, h)
  return checkpoint_name(out[:, :t], _NAME)


def _gathered(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  window: jax.Array | None,
  sinks: jax.Array | None,
  chunk: int,
) -> jax.Array:
  """Attends to the keys of all devices of `CONTEXT`, which each device gathers.

  Keys and values of a whole row are small beside its scores, of which only one
  chunk's are in memory at a time. Blocks of keys, one of each device, are
  skipped where no query of a chunk sees one of them.
  """
  b, t, n, h = q.shape
  kv_heads = k.shape[2]
  devices = jax.lax.axis_size(CONTEXT)
  # Scores of all blocks are kept for a chunk's backward pass, so a chunk has
  # fewer queries if there are more devices. Chunks are of equal size.
  max_size = max(1, chunk // devices)
  size = -(-t // -(-t // max_size))
  chunks = -(-t // size)
  gather = functools.partial(jax.lax.all_gather, axis_name=CONTEXT)
  key_ids = gather(segment_ids)
  # As in `_xla`: gradients of keys and values are summed in float32.
  keys = gather(k).astype(jnp.float32)
  values = gather(v).astype(jnp.float32)
  starts = np.arange(devices) * t
  positions = jax.lax.axis_index(CONTEXT) * t + np.arange(chunks * size)
  if sinks is not None:
    sinks = jnp.broadcast_to(sinks, (chunks, n))

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def attend(xs):
    q, ids, sinks, positions = xs
    q = q.reshape(b, size, kv_heads, n // kv_heads, h).transpose(2, 0, 3, 1, 4)

    def step(carry, block):
      k, v, key_ids, start = block
      distances = positions[:, None] - start - np.arange(t)
      mask = (ids[:, :, None] == key_ids[:, None]) & (distances >= 0)
      if window is not None:
        mask &= distances < window

      def add(carry):
        scores = jnp.einsum(
          "kbgth,bskh->kbgts",
          q,
          k.astype(q.dtype),
          preferred_element_type=jnp.float32,
        )
        scores = jnp.where(mask[:, None], scores * h**-0.5, pages.MASKED)
        return paged_attention.add_block(
          carry, scores, v.astype(q.dtype), "kbgts,bskh->kbgth"
        )

      # A query that sees none of these keys adds numbers with the weight of
      # masked scores, which is 0 beside that of a key that it sees: its own.
      return jax.lax.cond(jnp.any(mask), add, lambda x: x, carry), None

    carry = paged_attention.initial_carry(q.shape, sinks)
    (_, row_sum, out), _ = jax.lax.scan(
      step, carry, (keys, values, key_ids, starts)
    )
    out = (out / row_sum[..., None]).astype(q.dtype)
    return out.transpose(1, 3, 0, 2, 4).reshape(b, size, n, h)

  positions = positions.reshape(chunks, size)
  xs = _chunks(q, chunks), _chunks(segment_ids, chunks), sinks, positions
  out = jax.lax.map(attend, xs)
  out = out.swapaxes(0, 1).reshape(b, chunks * size, n, h)
  return checkpoint_name(out[:, :t], _NAME)


def _cudnn(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  max_segments: int,
) -> jax.Array:
  """Passes segments to cuDNN as separate sequences, by offsets into rows."""
  b, t, n, h = q.shape
  if b * t * n * h >= 2**31:
    raise ValueError(
      f"cuDNN counts the elements of packed queries in 32 bits; found {b} rows "
      f"x {t} tokens x {n} heads x {h} on a device. Lower "
      "batch.micro_batch_tokens."
    )
  # JAX 0.10 scales the key offsets by the number of query heads instead of kv
  # heads (https://github.com/jax-ml/jax/pull/39521), so repeat the kv heads
  # until both numbers are equal.
  k = jnp.repeat(k, n // k.shape[2], axis=2)
  v = jnp.repeat(v, n // v.shape[2], axis=2)
  # Padding is a segment too: cuDNN does not write memory between segments,
  # which may contain NaN. The 1 in `m` is for it. It also makes m at least 2:
  # with one segment, JAX would not treat the row as packed.
  m = min(max_segments, t) + 1
  starts = jnp.diff(segment_ids, axis=1, prepend=-1) != 0
  number = jnp.cumsum(starts, axis=1, dtype=jnp.int32) - 1
  lengths = jnp.sum(
    number[:, None, :] == jnp.arange(m)[:, None], axis=-1, dtype=jnp.int32
  )
  offsets = jnp.cumsum(lengths, axis=1, dtype=jnp.int32) - lengths
  offsets = jnp.where(lengths > 0, offsets, -1)
  lengths = jnp.where(lengths > 0, lengths, -1)
  offsets = jnp.pad(offsets, ((0, 0), (0, 1)), constant_values=-1)
  out = cudnn.packed_attention(q, k, v, lengths=lengths, offsets=offsets)
  fits = number[:, -1] < m
  return jnp.where(fits[:, None, None, None], out, jnp.nan)


def _splash(
  q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array
) -> jax.Array:
  """Calls JAX's Pallas kernel for TPUs, by blocks of queries and keys."""
  _, t, n, h = q.shape
  block = next(size for size in _SPLASH_BLOCKS if t % size == 0)
  kernel = splash_attention.make_splash_mha_single_device(
    splash_attention.MultiHeadMask([splash_attention.CausalMask((t, t))] * n),
    block_sizes=splash_attention.BlockSizes(
      block_q=block,
      block_kv=block,
      block_q_dkv=block,
      block_kv_dkv=block,
      block_q_dq=block,
      block_kv_dq=block,
    ),
    residual_checkpoint_name=_NAME,
  )
  q = (q * h**-0.5).swapaxes(1, 2)
  k = k.swapaxes(1, 2)
  v = v.swapaxes(1, 2)

  def attend_in_row(q, k, v, ids):
    row_kernel = _within_segments(kernel, shared_blocks(ids, block))
    return row_kernel(q, k, v, splash_attention.SegmentIds(ids, ids))

  return jax.vmap(attend_in_row)(q, k, v, segment_ids).swapaxes(1, 2)


def shared_blocks(segment_ids: jax.Array, block: int) -> jax.Array:
  """Returns which blocks of a packed row contain a token pair to attend to.

  Args:
    segment_ids: int `[T]`; padding at the end is a segment too.
    block: tokens of a block, a divisor of T.

  Returns:
    bool `[T / block, T / block]` by block of queries and block of keys: the
    keys are not after the queries, and both have tokens of one segment.
  """
  starts = jnp.diff(segment_ids, prepend=segment_ids[:1]) != 0
  number = jnp.cumsum(starts).reshape(-1, block)
  first = number[:, :1]
  last = number[:, -1]
  # Segments are contiguous: an earlier block of keys shares a segment with a
  # block of queries if its last segment is the first one of the queries.
  n = len(number)
  return jnp.tril(first == last, -1) | jnp.eye(n, dtype=bool)


def _within_segments(kernel: Any, shared: jax.Array) -> Any:
  """Returns a splash kernel that skips all blocks that are not `shared`.

  JAX's kernel skips blocks by tables that it makes of a mask, and masks
  segments only inside the blocks that it computes. The tables are arguments, so
  those of a row can follow from its segments. The kernel is that of a causal
  mask, with blocks of one size.
  """

  def next_blocks(shared):
    """Returns the next block of the row to compute, which is prefetched."""
    n = len(shared)
    order = jnp.where(shared.reshape(-1), jnp.arange(n * n), n * n)
    return jax.lax.cummin(order, reverse=True).reshape(n, n) % n

  def with_blocks(info, next_blocks):
    return info._replace(
      data_next=next_blocks[None].astype(info.data_next.dtype),
      block_mask=jnp.where(shared, info.block_mask, 0),
    )

  by_queries = next_blocks(shared)
  # The kernel for the gradients of keys and values loops over queries inside.
  by_keys = next_blocks(shared.T).T
  return type(kernel)(
    with_blocks(kernel.fwd_mask_info, by_queries),
    with_blocks(kernel.dq_mask_info, by_queries),
    with_blocks(kernel.dkv_mask_info, by_keys),
    **kernel.kwargs,
  )
