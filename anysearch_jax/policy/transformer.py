"""The decoder as a thin, stateless Flax shell over a plain nested dict.

`forward` is the whole sequence at once (training and scoring: one `nn.scan`
over stacked layers, optional remat). `extend` appends tokens to per-layer KV
caches (prefill and decode: the same block, unrolled). A test holds the two
to 1e-5.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from anysearch_jax import weights
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import attention, table

Params = dict[str, Any]

_UNROLLED_LAYERS = 4


class LayerCache(NamedTuple):
  """Keys and values of one layer, `[B, K, S, H]` each."""

  k: jax.Array
  v: jax.Array


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """Root-mean-square norm over the last axis, computed in float32."""
  x32 = x.astype(jnp.float32)
  x32 *= jax.lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + eps)
  return (x32 * scale).astype(x.dtype)


class Block(nn.Module):
  """One layer: attention and SwiGLU, pre-norm, with residuals.

  Called with a cache, keys and values are written at `starts` and attention
  runs over the cache; without one, over the sequence itself.
  """

  a: architecture_lib.Architecture

  def _weights(self) -> dict[str, jax.Array]:
    """This layer's parameters, declared as the table names them."""
    return {
      row.path[-1]: self.param(
        row.path[-1], nn.initializers.zeros_init(), row.shape[1:]
      )
      for row in table.rows(self.a)
      if row.stacked
    }

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    mask: jax.Array,
    cache: LayerCache | None = None,
    starts: jax.Array | None = None,
  ) -> tuple[jax.Array, LayerCache | None]:
    a, w = self.a, self._weights()

    def project(key: str, x: jax.Array, axes: int = 1) -> jax.Array:
      """Contracts the last `axes` axes of x; adds adapter and bias if any."""

      def times(x: jax.Array, key: str, axes: int) -> jax.Array:
        return jnp.tensordot(x, w[key].astype(x.dtype), axes)

      y = times(x, key, axes)
      if a.lora is not None and key in a.lora.targets:
        low = times(x, key + "_lora_a", axes)
        y += a.lora.scale * times(low, key + "_lora_b", 1)
      if key + "_bias" in w:
        y += w[key + "_bias"].astype(x.dtype)
      return y

    y = rms_norm(x, w["attention_norm"], a.norm_eps)
    # [B, T, D] to [B, T, N or K, H].
    q, k, v = (project(key, y) for key in ("q", "k", "v"))
    if a.qk_norm:
      q = rms_norm(q, w["q_norm"], a.norm_eps)
      k = rms_norm(k, w["k_norm"], a.norm_eps)
    q, k = attention.rotate(q, *rotary), attention.rotate(k, *rotary)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    if cache is not None:
      cache = LayerCache(write(cache.k, k, starts), write(cache.v, v, starts))
      k, v = cache
    out = attention.attend(q, k.astype(q.dtype), v.astype(q.dtype), mask)
    x += project("o", out, axes=2)

    y = rms_norm(x, w["mlp_norm"], a.norm_eps)
    # [B, T] as one axis: XLA's CPU matmul is twice as fast on it.
    y = y.reshape(-1, a.d_model)
    y = project("down", nn.silu(project("gate", y)) * project("up", y))
    x += y.reshape(x.shape)
    return x, cache


def write(cache: jax.Array, new: jax.Array, starts: jax.Array) -> jax.Array:
  """Writes `new` `[B, K, T, H]` into `cache` `[B, K, S, H]` at each start.

  The caller keeps start + T within S: XLA would clamp, not fail.
  """

  def row(cache_row, new_row, start):
    return jax.lax.dynamic_update_slice(
      cache_row, new_row.astype(cache_row.dtype), (0, start, 0)
    )

  return jax.vmap(row)(cache, new, starts)


class Transformer(nn.Module):
  """Token ids to final hidden states; parameters as `table.rows` names them.

  dtype: compute type; parameters keep theirs.
  remat: recompute each layer in the backward pass.
  """

  a: architecture_lib.Architecture
  dtype: Any = jnp.float32
  remat: bool = False

  @nn.compact
  def __call__(
    self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
  ) -> jax.Array:
    a = self.a
    chex.assert_equal_shape([tokens, positions, segment_ids])
    params = {
      row.path[0]: self.param(
        row.path[0], nn.initializers.zeros_init(), row.shape
      )
      for row in table.rows(a)
      if not row.stacked
    }
    block = nn.remat(Block, prevent_cse=False) if self.remat else Block
    layers = nn.scan(
      block,
      variable_axes={"params": 0},
      split_rngs={"params": False},
      in_axes=(nn.broadcast, nn.broadcast),
      length=a.layers,
      # A loop pays for itself in compile time on deep stacks only.
      unroll=a.layers if a.layers <= _UNROLLED_LAYERS else 1,
    )(a, name=table.LAYERS)
    x = params["embed"][tokens].astype(self.dtype)
    rotary = attention.rotary(a, positions)
    x, _ = layers(x, rotary, attention.segment_mask(segment_ids))
    return rms_norm(x, params["norm"], a.norm_eps)


def forward(
  params: Params,
  a: architecture_lib.Architecture,
  tokens: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  *,
  dtype: Any = jnp.float32,
  remat: bool = False,
) -> jax.Array:
  """Final hidden states of packed rows.

  Args:
    params: nested dict as `table.rows(a)` lays it out.
    a: the architecture.
    tokens: int `[B, T]`.
    positions: int `[B, T]`, each segment's own, from 0.
    segment_ids: int `[B, T]`, >= 1; 0 is padding. Attention is causal and
      stays inside a segment.
    dtype: compute type.
    remat: recompute layers in the backward pass.

  Returns:
    `[B, T, D]`, normed: `logits` takes them to the vocabulary.
  """
  model = Transformer(a, dtype=dtype, remat=remat)
  variables = {
    "params": {k: v for k, v in params.items() if k != "head" or not a.tied}
  }
  return model.apply(variables, tokens, positions, segment_ids)


def head(params: Params) -> jax.Array:
  """The output projection `[V, D]`: its own, or the tied embedding."""
  return params.get("head", params["embed"])


def logits(params: Params, hidden: jax.Array) -> jax.Array:
  """Float32 logits `[..., V]` of hidden states `[..., D]`."""
  return jnp.einsum(
    "...d,vd->...v",
    hidden,
    head(params).astype(hidden.dtype),
    preferred_element_type=jnp.float32,
  )


def layer_params(params: Params, a: architecture_lib.Architecture) -> list:
  """The stacked layers taken apart, for `extend`.

  Done once outside a decode loop, so that no step slices weights again.
  """
  return [
    jax.tree.map(lambda p, i=i: p[i], params[table.LAYERS])
    for i in range(a.layers)
  ]


def empty_caches(
  a: architecture_lib.Architecture,
  rows: int,
  length: int,
  dtype: Any = jnp.float32,
) -> tuple[LayerCache, ...]:
  """Zeroed caches, one `[rows, K, length, H]` pair a layer.

  Layers stay apart: one stacked array would be copied every step.
  """
  shape = (rows, a.kv_heads, length, a.head_dim)
  return tuple(
    LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    for _ in range(a.layers)
  )


def extend(
  params: Params,
  layers: list,
  a: architecture_lib.Architecture,
  tokens: jax.Array,
  starts: jax.Array,
  caches: tuple[LayerCache, ...],
  *,
  dtype: Any = jnp.float32,
) -> tuple[jax.Array, tuple[LayerCache, ...]]:
  """Appends tokens to cached sequences.

  Args:
    params: embedding, final norm and head.
    layers: `layer_params(params, a)`.
    a: the architecture.
    tokens: int `[B, T]`; token t of a row stands at position start + t.
    starts: int `[B]`, tokens already in each row's cache; start + T <= S.
    caches: one a layer, `[B, K, S, H]`.
    dtype: compute type.

  Returns:
    Normed hidden states `[B, T, D]` and the new caches. Positions beyond a
    row's real tokens hold garbage that later writes overwrite and that no
    mask shows before.
  """
  b, t = tokens.shape
  s = caches[0].k.shape[2]
  chex.assert_shape(starts, (b,))
  positions = starts[:, None] + jnp.arange(t)
  mask = jnp.arange(s)[None, None, :] <= positions[:, :, None]
  rotary = attention.rotary(a, positions)
  x = params["embed"][tokens].astype(dtype)
  block, out = Block(a), []
  for layer, cache in zip(layers, caches, strict=True):
    x, cache = block.apply({"params": layer}, x, rotary, mask, cache, starts)
    out.append(cache)
  return rms_norm(x, params["norm"], a.norm_eps), tuple(out)


def initialize(a: architecture_lib.Architecture, seed: int) -> Params:
  """Fresh float32 parameters, deterministic by seed."""
  return weights.initialize(table.rows(a), seed)
