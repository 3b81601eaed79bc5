"""The decoder as a thin, stateless Flax shell over a plain nested dict.

`forward` is the whole sequence at once (training and scoring: one `nn.scan`
over stacked layers), on one device or cut over a mesh. `extend` appends tokens
to paged KV caches (prefill and decode: the same block, unrolled). A test holds
the two to 1e-5.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import embedding, sharding, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy.attention import masks as attention
from anysearch_jax.policy.attention import paged_attention, self_attention

Params = dict[str, Any]

# What each remat policy keeps of a layer besides its input.
REMAT = {
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "attention": self_attention.saves,
  "full": jax.checkpoint_policies.nothing_saveable,
}
_UNROLLED_LAYERS = 4


@dataclasses.dataclass(frozen=True)
class Compute:
  """How `forward` computes; none of it changes what.

  dtype: of activations and matrix products; parameters keep theirs.
  remat: `none`, or a key of `REMAT`, what the backward pass need not recompute.
  attention, attention_chunk, max_segments: see `self_attention`.
  logprob_chunk: positions of each row whose logits are held at a time.
  layout: where activations stand on a mesh; None is one device.
  """

  dtype: Any = jnp.float32
  remat: str = "none"
  attention: str = "xla"
  attention_chunk: int = 512
  max_segments: int = 64
  logprob_chunk: int = 512
  layout: sharding.Layout | None = None


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """Root-mean-square norm over the last axis, computed in float32."""
  x32 = x.astype(jnp.float32)
  x32 *= jax.lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + eps)
  return (x32 * scale).astype(x.dtype)


class Block(nn.Module):
  """One layer: attention and SwiGLU, pre-norm, with residuals.

  Attention runs over the sequence itself, or over a cache where `cached` knows
  one.
  """

  a: architecture_lib.Architecture
  compute: Compute = Compute()

  def _weights(self, dtype: Any) -> dict[str, jax.Array]:
    """This layer's parameters, declared as the table names them."""
    layout, out = self.compute.layout, {}
    for row in table.rows(self.a):
      if not row.stacked:
        continue
      key = row.path[-1]
      weight = self.param(key, nn.initializers.zeros_init(), row.layer_shape)
      # Scales of norms are float32, as norms are.
      weight = weight if row.init is None else weight.astype(dtype)
      out[key] = weight if layout is None else layout.gather(weight, row)
    return out

  def _attend(
    self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array
  ) -> jax.Array:
    """Attention inside segments, each device its own rows and heads."""
    c = self.compute
    attend = functools.partial(
      self_attention.self_attention,
      implementation=c.attention,
      chunk=c.attention_chunk,
      max_segments=c.max_segments,
    )
    if c.layout is not None:
      attend = c.layout.over_heads(attend, self.a)
    return attend(q, k, v, segment_ids)

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    segment_ids: jax.Array | None,
    cached: Callable[..., tuple[jax.Array, Any]] | None = None,
  ) -> tuple[jax.Array, Any]:
    """One layer, and the cache that `cached(q, k, v)` hands back, if any."""
    a, w = self.a, self._weights(x.dtype)
    projections = {p.key: p for p in table.projections(a)}
    layout = self.compute.layout

    def stands(x: jax.Array, *axes: str | None) -> jax.Array:
      """Has x `[B, ...]` cut over its logical axes, where there is a mesh."""
      return x if layout is None else layout.constrain(x, *axes)

    def project(key: str, x: jax.Array) -> jax.Array:
      """The projection of that name, its adapter and bias with it."""
      p = projections[key]
      axes = len(p.takes)
      last = (tuple(range(-axes, 0)),) * 2
      y = jnp.tensordot(x, w[key], last if p.gives_first else axes)
      if a.lora is not None and key in a.lora.targets:
        low = jnp.tensordot(x, w[key + "_lora_a"], axes)
        y += a.lora.scale * jnp.tensordot(low, w[key + "_lora_b"], 1)
      if key + "_bias" in w:
        y += w[key + "_bias"]
      return y

    y = stands(rms_norm(x, w["attention_norm"], a.norm_eps), None, None)
    # [B, T, D] to [B, T, N or K, H].
    q, k, v = (
      stands(project(key, y), None, axis, None)
      for key, axis in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))
    )
    if a.qk_norm:
      q = rms_norm(q, w["q_norm"], a.norm_eps)
      k = rms_norm(k, w["k_norm"], a.norm_eps)
    q, k = attention.rotate(q, *rotary), attention.rotate(k, *rotary)
    cache = None
    if cached is None:
      out = self._attend(q, k, v, segment_ids)
    else:
      out, cache = cached(q, k, v)
    x += stands(project("o", out), "between", None)

    y = stands(rms_norm(x, w["mlp_norm"], a.norm_eps), None, None)
    if layout is None:
      # [B, T] as one axis: XLA's CPU matmul is twice as fast on it.
      y = y.reshape(-1, a.d_model)
    y = nn.silu(project("gate", y)) * project("up", y)
    y = project("down", stands(y, None, "mlp")).reshape(x.shape)
    return x + stands(y, "between", None), cache


class Transformer(nn.Module):
  """Token ids to final hidden states; parameters as `table.rows` names them."""

  a: architecture_lib.Architecture
  compute: Compute = Compute()

  @nn.compact
  def __call__(
    self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
  ) -> jax.Array:
    a, c = self.a, self.compute
    chex.assert_equal_shape([tokens, positions, segment_ids])
    params = {
      row.path[0]: self.param(
        row.path[0], nn.initializers.zeros_init(), row.shape
      )
      for row in table.rows(a)
      if not row.stacked
    }
    block = Block
    policy = REMAT.get(c.remat)
    if policy is None and c.layout is not None:
      policy = sharding.all_but_gathered
    if policy is not None:
      block = nn.remat(Block, prevent_cse=False, policy=policy)
    layers = nn.scan(
      block,
      variable_axes={"params": 0},
      split_rngs={"params": False},
      in_axes=(nn.broadcast, nn.broadcast),
      length=a.layers,
      # A loop pays for itself in compile time on deep stacks only.
      unroll=a.layers if a.layers <= _UNROLLED_LAYERS else 1,
    )(a, c, name=table.LAYERS)
    x = embedding.lookup(
      params["embed"], tokens, dtype=c.dtype, layout=c.layout
    )
    x, _ = layers(x, attention.rotary(a, positions), segment_ids)
    return rms_norm(x, params["norm"], a.norm_eps)


def forward(
  params: Params,
  a: architecture_lib.Architecture,
  tokens: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  *,
  compute: Compute = Compute(),  # noqa: B008
) -> jax.Array:
  """Final hidden states of packed rows.

  Args:
    params: nested dict as `table.rows(a)` lays it out.
    a: the architecture.
    tokens: int `[B, T]`; on a mesh, B is a multiple of data x fsdp.
    positions: int `[B, T]`, each segment's own, from 0.
    segment_ids: int `[B, T]`, >= 1; 0 is padding. Attention is causal and
      stays inside a segment.
    compute: how.

  Returns:
    `[B, T, D]`, normed: `logits` takes them to the vocabulary.
  """
  model = Transformer(a, compute)
  variables = {
    "params": {k: v for k, v in params.items() if k != "head" or not a.tied}
  }
  return model.apply(variables, tokens, positions, segment_ids)


def head(params: Params) -> jax.Array:
  """The output projection `[V, D]`: its own, or the tied embedding."""
  return params.get("head", params["embed"])


def project(hidden: jax.Array, head: jax.Array) -> jax.Array:
  """Float32 logits `[..., V]` of hidden states `[..., D]`."""
  return jnp.einsum(
    "...d,vd->...v",
    hidden,
    head.astype(hidden.dtype),
    preferred_element_type=jnp.float32,
  )


def logits(params: Params, hidden: jax.Array) -> jax.Array:
  """`project` by the policy's own head."""
  return project(hidden, head(params))


def apart(params: Params, a: architecture_lib.Architecture) -> Params:
  """Parameters with a list of layers in place of the stack, for `extend`.

  What is sliced inside a decode loop would be copied by every call of it.
  """
  layers = [
    jax.tree.map(lambda p, i=i: p[i], params[table.LAYERS])
    for i in range(a.layers)
  ]
  return params | {table.LAYERS: layers}


def extend(
  params: Params,
  a: architecture_lib.Architecture,
  tokens: jax.Array,
  starts: jax.Array,
  counts: jax.Array,
  pages: paged_attention.Pools,
  page_table: jax.Array,
  *,
  dtype: Any = jnp.float32,
  paged: paged_attention.Paged,
) -> tuple[jax.Array, paged_attention.Pools]:
  """Appends tokens to cached sequences.

  Args:
    params: as `apart` makes them.
    a: the architecture.
    tokens: int `[B, T]`; token t of a row stands at position start + t.
    starts: int `[B]`, tokens that stand in each row's pages.
    counts: int `[B]`, how many of a row's tokens are real; the rest is padding.
    pages: of every layer.
    page_table: int `[B, M]`, see `paged_attention.Paged`; start + count within
      its pages.
    dtype: compute type.
    paged: how cached attention is computed.

  Returns:
    Normed hidden states `[B, T, D]`, garbage at padding, and the new pages.
    Rows may be parts of one sequence: every layer writes before it attends.
  """
  chex.assert_equal_shape([starts, counts])
  step = jnp.arange(tokens.shape[1])[None]
  real = step < counts[:, None]
  # Padding repeats the last position, so that no row looks beyond its pages.
  positions = starts[:, None] + jnp.minimum(
    step, jnp.maximum(counts[:, None] - 1, 0)
  )
  rotary = attention.rotary(a, positions)
  x = params["embed"][tokens].astype(dtype)
  block, out = Block(a), []
  for layer, pool in zip(params[table.LAYERS], pages, strict=True):

    def cached(q, k, v, pool=pool):
      return paged(q, k, v, pool, page_table, positions, real)

    x, pool = block.apply({"params": layer}, x, rotary, None, cached)
    out.append(pool)
  return rms_norm(x, params["norm"], a.norm_eps), tuple(out)


def initialize(a: architecture_lib.Architecture, seed: int) -> Params:
  """Fresh float32 parameters, deterministic by seed."""
  return weights.initialize(table.rows(a), seed)
