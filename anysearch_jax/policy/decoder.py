"""The decoder as a thin, stateless Flax module over a plain nested dict.

`forward` computes whole sequences, for training and scoring, by one `nn.scan`
over stacked layers, on one device or sharded over a mesh. `serving` runs the
same layers over KV caches.
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
from anysearch_jax.policy import embedding, experts, sharding, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy.attention import masks as attention
from anysearch_jax.policy.attention import self_attention

Params = dict[str, Any]
Rotary = tuple[jax.Array, ...]  # Cos and sin of the angles.

# What each remat policy saves of a layer for the backward pass, besides the
# layer's input.
REMAT = {
  # Attention's kernels are no products that JAX knows.
  "dots": jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    self_attention.saves,
  ),
  "attention": self_attention.saves,
  "full": jax.checkpoint_policies.nothing_saveable,
}
_UNROLLED_LAYERS = 4
_ZEROS = nn.initializers.zeros_init()


@dataclasses.dataclass(frozen=True)
class Compute:
  """How `forward` computes; only `replays` changes more than rounding does.

  dtype: of activations and matrix products; parameters keep their own.
  remat: `none`, or a key of `REMAT`: what the backward pass need not recompute.
  attention, attention_chunk, max_segments: see `self_attention`.
  logprob_chunk: positions of each row whose logits are in memory at a time.
  layout: how activations are sharded; None means one device.
  replays: whether recorded experts are used, or only compared with the own.
  """

  dtype: Any = jnp.float32
  remat: str = "none"
  attention: str = "xla"
  attention_chunk: int = 512
  max_segments: int = 64
  logprob_chunk: int = 512
  layout: sharding.Layout | None = None
  replays: bool = True


def rms_norm(
  x: jax.Array,
  scale: jax.Array,
  a: architecture_lib.Architecture,
  axes: int | tuple[int, ...] = -1,
) -> jax.Array:
  """Returns the root-mean-square norm over the last axes, in float32.

  The result has the dtype of `x` (https://arxiv.org/abs/1910.07467).
  """
  x32 = x.astype(jnp.float32)
  mean = jnp.mean(jnp.square(x32), axes, keepdims=True)
  x32 *= jax.lax.rsqrt(mean + a.norm_eps)
  scale = scale + a.norm_offset if a.norm_offset else scale
  return (x32 * scale).astype(x.dtype)


def scale_embeddings(
  x: jax.Array, a: architecture_lib.Architecture
) -> jax.Array:
  """Returns the input of the first layer, of embeddings `[B, T, D]`."""
  return x * jnp.asarray(a.d_model**0.5, x.dtype) if a.scaled else x


class Block(nn.Module):
  """One layer: attention and SwiGLU, each with a norm and a residual.

  Attention runs over the sequence itself, or over a cache if `cached` is given.
  `over` is how experts and their tokens are sharded; None: as all else.
  """

  a: architecture_lib.Architecture
  compute: Compute = Compute()
  over: sharding.Layout | None = None

  def _weights(self, dtype: Any) -> dict[str, jax.Array]:
    """Declares this layer's parameters by the table; casts and gathers them."""
    layout, out = self.compute.layout, {}
    for row in table.rows(self.a):
      if not row.stacked:
        continue
      key = row.path[-1]
      weight = self.param(key, _ZEROS, row.layer_shape)
      # Norm scales (init None) stay float32, because norms are computed in it.
      weight = weight if row.init is None else weight.astype(dtype)
      out[key] = weight if layout is None else layout.gather(weight, row)
    return out

  def _stands(self, x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains the sharding of x `[B, ...]`, if there is a mesh."""
    layout = self.compute.layout
    return x if layout is None else layout.constrain(x, *axes)

  def _project(
    self, w: dict[str, jax.Array], key: str, x: jax.Array
  ) -> jax.Array:
    """Applies a projection with its adapter and its bias."""
    a = self.a
    p = table.projections(a)[key]
    axes = len(p.takes)
    last = (tuple(range(-axes, 0)),) * 2
    y = jnp.tensordot(x, w[key], last if p.gives_first else axes)
    if a.lora is not None and key in a.lora.targets:
      low = jnp.tensordot(x, w[key + "_lora_a"], axes)
      y += a.lora.scale * jnp.tensordot(low, w[key + "_lora_b"], 1)
    if key + "_bias" in w:
      y += w[key + "_bias"]
    return y

  def _heads(
    self, w: dict[str, jax.Array], y: jax.Array, rotary: Rotary
  ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns queries `[B, T, N, H]`, keys and values `[B, T, K, H]`."""
    a = self.a
    q, k, v = (
      self._stands(self._project(w, key, y), "positions", axis, None)
      for key, axis in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))
    )
    if a.qk_norm:
      axes = (-2, -1) if a.joint_norm else -1
      q = rms_norm(q, w["q_norm"], a, axes) * a.query_scale
      k = rms_norm(k, w["k_norm"], a, axes)
    return attention.rotate(q, *rotary), attention.rotate(k, *rotary), v

  def _gated(self, w: dict[str, jax.Array], y: jax.Array) -> jax.Array:
    """Returns the input of `down` (SwiGLU, https://arxiv.org/abs/2002.05202)."""
    gate, up = (self._project(w, key, y) for key in ("gate", "up"))
    return self._active(gate) * up

  def _active(self, x: jax.Array) -> jax.Array:
    return nn.gelu(x, approximate=True) if self.a.gelu else nn.silu(x)

  def _routed(
    self, w: dict[str, jax.Array], y: jax.Array, replayed: jax.Array | None
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns experts' outputs, the router's softmax, and who was chosen."""
    a = self.a
    shares = jnp.tensordot(y, w["router"], 1)
    shares += w["router_bias"] if a.clamped else 0
    shares = jax.nn.softmax(shares.astype(jnp.float32), axis=-1)
    kept, chosen = experts.route(shares, a, replayed)
    own = experts.Weights(w["gate"], w.get("up"), w["down"], w.get("gate_bias"))
    y = experts.apply(y, own, kept, chosen, self.compute.layout or self.over)
    if a.clamped:  # Added once here: `apply` sums over devices.
      weighted = experts.dense_weights(kept, chosen, a.experts)
      y += (weighted @ w["down_bias"]).astype(y.dtype)
    return y, shares, chosen

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    rotary: Rotary,
    segment_ids: jax.Array | None,
    layer: attention.Layer = attention.Layer(),  # noqa: B008
    recorded: jax.Array | None = None,
    cached: Callable[..., tuple[jax.Array, Any]] | None = None,
  ) -> tuple[jax.Array, Any]:
    """Returns the layer's output and, if it has experts, their `Use`.

    With `cached`, it returns a pair instead of the latter: the new cache, and
    the ids of the chosen experts `[B, T, K]` (None without experts).

    Args:
      x: `[B, T, D]`.
      rotary: cos and sin of the rotary angles, see `attention.rotary`.
      segment_ids: int `[B, T]`; unused with `cached`.
      layer: what this layer differs in.
      recorded: experts that were chosen before, `[B, T, K]`, see `experts`.
      cached: maps q, k, v and sinks to the attention output and new cache.
    """
    a, c, w = self.a, self.compute, self._weights(x.dtype)
    rotary = attention.of_layer(rotary, layer)
    layout, stands = c.layout, self._stands

    def normed(key: str, x: jax.Array) -> jax.Array:
      return rms_norm(x, w[key], a) if key in w else x

    y = stands(normed("attention_norm", x), "positions", None)
    heads = self._heads(w, y, rotary)
    cache, use, chosen = None, None, None
    if cached is not None:
      out, cache = cached(*heads, w.get("sinks"))
    else:
      attend: Callable[..., jax.Array] = functools.partial(
        self_attention.self_attention,
        implementation=c.attention,
        chunk=c.attention_chunk,
        max_segments=c.max_segments,
      )
      if layout is not None:
        # Each device computes its own rows and heads.
        attend = layout.over_heads(attend, a)
      out = attend(*heads, segment_ids, layer.window, w.get("sinks"))
    out = normed("attention_end_norm", self._project(w, "o", out))
    x += stands(out, "between", None)

    y = stands(normed("mlp_norm", x), "positions", None)
    if a.experts:
      y, shares, chosen = self._routed(w, y, recorded if c.replays else None)
      if segment_ids is not None:
        use = experts.measure_use(shares, chosen, recorded, segment_ids > 0)
    else:
      if layout is None:
        # Merge [B, T] into one axis: XLA's CPU matmul is twice as fast then.
        y = y.reshape(-1, a.d_model)
      y = stands(self._gated(w, y), "positions", "mlp")
      y = self._project(w, "down", y).reshape(x.shape)
    x += stands(normed("mlp_end_norm", y), "between", None)
    return x, use if cached is None else (cache, chosen)


class Transformer(nn.Module):
  """Maps token ids to final hidden states; parameters follow `table.rows`."""

  a: architecture_lib.Architecture
  compute: Compute = Compute()

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    recorded: jax.Array | None = None,
  ) -> tuple[jax.Array, experts.Use | None]:
    a, c = self.a, self.compute
    chex.assert_equal_shape([tokens, positions, segment_ids])
    params = {
      row.path[0]: self.param(row.path[0], _ZEROS, row.shape)
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
      in_axes=(nn.broadcast, nn.broadcast, 0, 0),
      length=a.layers,
      # A loop saves compile time, which matters only for deep stacks.
      unroll=a.layers if a.layers <= _UNROLLED_LAYERS else 1,
    )(a, c, name=table.LAYERS)
    x = embedding.lookup(
      params["embed"], tokens, dtype=c.dtype, layout=c.layout
    )
    x = scale_embeddings(x, a)
    if recorded is not None:
      recorded = jnp.moveaxis(recorded, 2, 0)
    rotary, differ = attention.rotary(a, positions), attention.layers(a)
    x, use = layers(x, rotary, segment_ids, differ, recorded)
    return rms_norm(x, params["norm"], a), use


def forward(
  params: Params,
  a: architecture_lib.Architecture,
  tokens: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  *,
  compute: Compute = Compute(),  # noqa: B008
) -> jax.Array:
  """Returns the final hidden states of packed rows.

  Args:
    params: nested dict laid out by `table.rows(a)`.
    tokens: int `[B, T]`; on a mesh, B is a multiple of data x fsdp x expert,
      and T of context.
    positions: int `[B, T]`, counted from 0 in each segment.
    segment_ids: int `[B, T]`, >= 1; 0 is padding. Attention is causal and
      stays inside a segment.

  Returns:
    `[B, T, D]` after the final norm; `logits` projects them to the vocabulary.
  """
  inputs = tokens, positions, segment_ids
  return forward_with_use(params, a, *inputs, compute=compute)[0]


def forward_with_use(
  params: Params,
  a: architecture_lib.Architecture,
  *inputs: jax.Array | None,
  compute: Compute,
) -> tuple[jax.Array, experts.Use | None]:
  """Returns what `forward` does, and how experts are used, `[L, ...]` each.

  The latter is None without experts. `inputs` are tokens, positions, ids of
  segments and perhaps recorded experts, int `[B, T, L, K]` (`experts.record`).
  """
  model = Transformer(a, compute)
  params = {k: v for k, v in params.items() if k != "head" or not a.tied}
  found: Any = model.apply({"params": params}, *inputs)
  return found


def head(params: Params) -> jax.Array:
  """Returns the output projection `[V, D]`, or the embedding if it is tied."""
  return params["head"] if "head" in params else params["embed"]


def project(hidden: jax.Array, head: jax.Array) -> jax.Array:
  """Returns float32 logits `[..., V]` of hidden states `[..., D]`."""
  return jnp.einsum(
    "...d,vd->...v",
    hidden,
    head.astype(hidden.dtype),
    preferred_element_type=jnp.float32,
  )


def logits(params: Params, hidden: jax.Array) -> jax.Array:
  """Returns float32 logits `[..., V]` of hidden states by the policy's head."""
  return project(hidden, head(params))


def initialize(a: architecture_lib.Architecture, seed: int) -> Params:
  """Returns initial float32 parameters, deterministic by seed."""
  return weights.initialize(table.rows(a), seed)
