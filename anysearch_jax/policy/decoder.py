"""The decoder as a thin, stateless Flax module over a plain nested dict.

`forward` computes whole sequences, for training and scoring, by one `nn.scan`
over stacked layers, on one device or sharded over a mesh. `serving` runs the
same layers over KV caches.

`a` is the architecture everywhere, and capitals are the shape legend of
`types`: a hidden state is `[B, T, D]`, queries are `[B, T, N, H]`, keys and
values `[B, T, K, H]`.
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
from anysearch_jax.policy import (
  cpu_bfloat16,
  embedding,
  experts,
  sharding,
  table,
)
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy.attention import layer_options as layer_options_lib
from anysearch_jax.policy.attention import rotary, self_attention

Params = dict[str, Any]

# The values of a layer that each remat policy saves for the backward pass,
# besides the layer's input.
REMAT = {
  # JAX's policy saves matrix products; attention's kernels are none to it.
  "dots": jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    self_attention.saves,
  ),
  "attention": self_attention.saves,
  "full": jax.checkpoint_policies.nothing_saveable,
}
# Stacks of at most this many layers are unrolled. A loop compiles its body
# once, which matters only for deep stacks.
_UNROLLED_LAYERS = 4
_ZEROS = nn.initializers.zeros_init()


@dataclasses.dataclass(frozen=True)
class Compute:
  """How `forward` computes; only `replays` changes more than rounding.

  Attributes:
    dtype: type of activations and matrix products; parameters keep theirs.
    remat: `none`, or a key of `REMAT`: the values that the backward pass does
      not recompute.
    attention: implementation of `self_attention`.
    attention_chunk: its `chunk`.
    max_segments: its `max_segments`.
    logprob_chunk: positions of each row whose logits are in memory at a time.
    layout: how activations are sharded; None means one device.
    replays: whether recorded experts are used, or only compared with the
      router's own choice.
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
  """Computes RMSNorm in float32 (https://arxiv.org/abs/1910.07467).

  Args:
    x: `[..., D]`, or `[..., heads, H]` for norms of queries and keys.
    scale: the learned scale; its shape is that of the normed axes.
    a: the architecture, whose `norm_offset` is added to the scale.
    axes: the axes to norm over.

  Returns:
    The normed values in the dtype of `x`.
  """
  x32 = x.astype(jnp.float32)
  mean = jnp.mean(jnp.square(x32), axes, keepdims=True)
  x32 *= jax.lax.rsqrt(mean + a.norm_eps)
  scale = scale + a.norm_offset if a.norm_offset else scale
  return (x32 * scale).astype(x.dtype)


def scale_embeddings(
  x: jax.Array, a: architecture_lib.Architecture
) -> jax.Array:
  """Multiplies embeddings `[B, T, D]` by sqrt(D) if the architecture does."""
  return x * jnp.asarray(a.d_model**0.5, x.dtype) if a.scaled else x


class Block(nn.Module):
  """One layer: attention and SwiGLU, each with a norm and a residual.

  Attributes:
    a: the architecture.
    compute: how to compute, for all layers alike.
    expert_layout: how experts and their tokens are sharded if nothing else is,
      as in decode; None means as all else.
  """

  a: architecture_lib.Architecture
  compute: Compute = Compute()
  expert_layout: sharding.Layout | None = None

  def _weights(self, dtype: Any) -> dict[str, jax.Array]:
    """Declares this layer's parameters by the table; casts and gathers them."""
    layout = self.compute.layout
    layer_weights = {}
    for row in table.rows(self.a):
      if not row.stacked:
        continue
      key = row.path[-1]
      weight = self.param(key, _ZEROS, row.layer_shape)
      # Norm scales (init None) stay float32, because norms are computed in it.
      if row.init is not None:
        weight = weight.astype(dtype)
      if layout is not None:
        weight = layout.gather(weight, row)
      layer_weights[key] = weight
    return layer_weights

  def _constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains the sharding of x `[B, ...]`, if there is a mesh."""
    layout = self.compute.layout
    return x if layout is None else layout.constrain(x, *axes)

  def _project(
    self, w: dict[str, jax.Array], key: str, x: jax.Array
  ) -> jax.Array:
    """Applies a projection with its adapter and its bias."""
    a = self.a
    projection = table.projections(a)[key]
    axes = len(projection.in_axes)
    y = cpu_bfloat16.project(
      x, w[key], axes, out_axes_first=projection.out_axes_first
    )
    if a.lora is not None and key in a.lora.targets:
      low_rank = cpu_bfloat16.project(x, w[key + "_lora_a"], axes)
      y += a.lora.scale * cpu_bfloat16.project(low_rank, w[key + "_lora_b"], 1)
    if key + "_bias" in w:
      y += w[key + "_bias"]
    return y

  def _heads(
    self, w: dict[str, jax.Array], y: jax.Array, cos_sin: rotary.CosSin
  ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns queries `[B, T, N, H]`, keys and values `[B, T, K, H]`."""
    a = self.a

    def project(key: str, axis: str) -> jax.Array:
      return self._constrain(self._project(w, key, y), "positions", axis, None)

    q = project("q", "heads")
    k = project("k", "kv_heads")
    v = project("v", "kv_heads")
    if a.qk_norm:
      axes = (-2, -1) if a.joint_norm else -1
      q = rms_norm(q, w["q_norm"], a, axes) * a.query_scale
      k = rms_norm(k, w["k_norm"], a, axes)
    return rotary.rotate(q, *cos_sin), rotary.rotate(k, *cos_sin), v

  def _gated(self, w: dict[str, jax.Array], y: jax.Array) -> jax.Array:
    """Returns the input of `down` (SwiGLU, https://arxiv.org/abs/2002.05202)."""
    gate = self._project(w, "gate", y)
    up = self._project(w, "up", y)
    return self._activation(gate) * up

  def _activation(self, x: jax.Array) -> jax.Array:
    return nn.gelu(x, approximate=True) if self.a.gelu else nn.silu(x)

  def _routed(
    self, w: dict[str, jax.Array], y: jax.Array, recorded_ids: jax.Array | None
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns experts' outputs, the router's softmax, and the experts' ids."""
    a = self.a
    router_logits = jnp.tensordot(y, w["router"], 1)
    router_logits += w["router_bias"] if a.clamped else 0
    probs = jax.nn.softmax(router_logits.astype(jnp.float32), axis=-1)
    top_probs, expert_ids = experts.route(probs, a, recorded_ids)
    matrices = experts.Weights(
      gate=w["gate"], up=w.get("up"), down=w["down"], bias=w.get("gate_bias")
    )
    layout = self.compute.layout or self.expert_layout
    y = experts.apply(y, matrices, top_probs, expert_ids, layout)
    if a.clamped:  # Added here, once: `apply` sums over devices.
      shares = experts.dense_weights(top_probs, expert_ids, a.experts)
      y += (shares @ w["down_bias"]).astype(y.dtype)
    return y, probs, expert_ids

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    cos_sin: rotary.CosSin,
    segment_ids: jax.Array | None,
    options: layer_options_lib.LayerOptions = layer_options_lib.LayerOptions(),  # noqa: B008
    recorded: jax.Array | None = None,
    attend_to_cache: Callable[..., tuple[jax.Array, Any]] | None = None,
  ) -> tuple[jax.Array, Any]:
    """Computes the layer, over its input alone or over a KV cache.

    Args:
      x: `[B, T, D]`.
      cos_sin: cos and sin of the rotary angles, of `rotary.cos_and_sin`.
      segment_ids: int `[B, T]`; unused with `attend_to_cache`.
      options: the options of this layer.
      recorded: ids of experts that were chosen before, int `[B, T, k]`, see
        `experts.record`.
      attend_to_cache: maps q, k, v and sinks to the attention output and the
        new cache; None means attention over the input itself.

    Returns:
      The output `[B, T, D]`, and how the tokens use experts (`experts.Use`,
      None without experts). With `attend_to_cache` the second value is a pair:
      the new cache, and the experts' ids `[B, T, k]` (None without experts).
    """
    a = self.a
    w = self._weights(x.dtype)
    cos_sin = rotary.select_for_layer(cos_sin, options)

    def normed(key: str, x: jax.Array) -> jax.Array:
      return rms_norm(x, w[key], a) if key in w else x

    y = self._constrain(normed("attention_norm", x), "positions", None)
    q_k_v = self._heads(w, y, cos_sin)
    cache = None
    use = None
    expert_ids = None
    if attend_to_cache is not None:
      out, cache = attend_to_cache(*q_k_v, w.get("sinks"))
    else:
      attend = self._self_attention()
      out = attend(*q_k_v, segment_ids, options.window, w.get("sinks"))
    out = normed("attention_end_norm", self._project(w, "o", out))
    x += self._constrain(out, "between", None)

    y = self._constrain(normed("mlp_norm", x), "positions", None)
    if a.experts:
      replayed = recorded if self.compute.replays else None
      y, probs, expert_ids = self._routed(w, y, replayed)
      if segment_ids is not None:
        use = experts.measure_use(probs, expert_ids, recorded, segment_ids > 0)
    else:
      if self.compute.layout is None:
        # Merge [B, T] into one axis: XLA's CPU matmul is twice as fast then.
        y = y.reshape(-1, a.d_model)
      y = self._constrain(self._gated(w, y), "positions", "mlp")
      y = self._project(w, "down", y).reshape(x.shape)
    x += self._constrain(normed("mlp_end_norm", y), "between", None)
    return x, use if attend_to_cache is None else (cache, expert_ids)

  def _self_attention(self) -> Callable[..., jax.Array]:
    """Returns attention over whole rows, each device with its own heads."""
    compute = self.compute
    attend = functools.partial(
      self_attention.self_attention,
      implementation=compute.attention,
      chunk=compute.attention_chunk,
      max_segments=compute.max_segments,
    )
    if compute.layout is None:
      return attend
    return compute.layout.over_heads(attend, self.a)


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
    """Arguments and results are those of `forward_with_use`."""
    a = self.a
    compute = self.compute
    layout = compute.layout
    chex.assert_equal_shape([tokens, positions, segment_ids])
    params = {
      row.path[0]: self.param(row.path[0], _ZEROS, row.shape)
      for row in table.rows(a)
      if not row.stacked
    }
    block = Block
    policy = REMAT.get(compute.remat)
    if policy is None and layout is not None:
      policy = sharding.all_but_gathered
    if policy is not None:
      # In a scan XLA cannot merge the recomputation with the forward pass, so
      # JAX need not prevent it.
      block = nn.remat(Block, prevent_cse=False, policy=policy)
    layers = nn.scan(
      block,
      variable_axes={"params": 0},
      split_rngs={"params": False},
      in_axes=(nn.broadcast, nn.broadcast, 0, 0),
      length=a.layers,
      unroll=a.layers if a.layers <= _UNROLLED_LAYERS else 1,
    )(a, compute, name=table.LAYERS)
    x = embedding.lookup(
      params["embed"], tokens, dtype=compute.dtype, layout=layout
    )
    x = scale_embeddings(x, a)
    if recorded is not None:
      # The scan is over the first axis.
      recorded = jnp.moveaxis(recorded, 2, 0)
    cos_sin = rotary.cos_and_sin(a, positions)
    options = layer_options_lib.layer_options(a)
    x, use = layers(x, cos_sin, segment_ids, options, recorded)
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
    a: the architecture.
    tokens: int `[B, T]`; on a mesh, B is a multiple of data x fsdp x expert,
      and T of context.
    positions: int `[B, T]`, counted from 0 in each segment.
    segment_ids: int `[B, T]`, >= 1; 0 is padding. Attention is causal and
      stays inside a segment.
    compute: how to compute.

  Returns:
    `[B, T, D]` after the final norm; `logits` projects them to the vocabulary.
  """
  hidden, _ = forward_with_use(
    params, a, tokens, positions, segment_ids, compute=compute
  )
  return hidden


def forward_with_use(
  params: Params,
  a: architecture_lib.Architecture,
  *inputs: jax.Array | None,
  compute: Compute,
) -> tuple[jax.Array, experts.Use | None]:
  """Returns the final hidden states of packed rows, and the use of experts.

  Args:
    params: as in `forward`.
    a: the architecture.
    *inputs: tokens, positions and segment ids as in `forward`, and perhaps
      recorded experts, int `[B, T, L, k]` (`experts.record`).
    compute: how to compute.

  Returns:
    Hidden states `[B, T, D]` after the final norm, and how each layer's experts
    are used, `[L, ...]` (None without experts).
  """
  model = Transformer(a, compute)
  params = {k: v for k, v in params.items() if k != "head" or not a.tied}
  hidden_and_use: Any = model.apply({"params": params}, *inputs)
  return hidden_and_use


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
