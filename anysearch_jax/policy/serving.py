"""The decoder as an engine runs it: weights prepared once, cached sequences.

`prepare` is called once a policy version. It merges adapters, casts, unstacks
the layers and fuses matrices that multiply the same input, so that decode,
which reads every weight in every step, never writes one. `extend` appends
tokens to cached sequences, for prefill and for decode, with the layer that
training uses. A test holds it within 1e-5 of `decoder.forward`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, experts, lora, sharding, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy.attention import masks as attention

C = TypeVar("C")  # The cache of one layer.
_Maybe = jax.Array | None
# Maps queries, keys and values of new tokens, a layer's cache, positions, the
# mask of real tokens, the layer's window (None: it sees all tokens) and sinks
# to the attention output and the new cache. A fused layer's queries are all
# three, the others None: see `Paged.__call__`.
Attend = Callable[
  [jax.Array, _Maybe, _Maybe, C, jax.Array, jax.Array, int | None, _Maybe],
  tuple[jax.Array, C],
]


class FusedBlock(decoder.Block):
  """A layer with one matrix for q, k and v, or for gate and up, or both."""

  def _weights(self, dtype: Any) -> dict[str, jax.Array]:
    del dtype  # `prepare` has cast them.
    return dict(self.variables["params"])

  def _heads(
    self, w: dict[str, jax.Array], y: jax.Array, rotary: decoder.Rotary
  ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns `[B, T, K, G + 2, H]`, and None twice, for `Attend`."""
    if "qkv" not in w:
      return super()._heads(w, y, rotary)
    a, group = self.a, self.a.heads // self.a.kv_heads
    x = jnp.tensordot(y, w["qkv"], 1)
    if "qkv_bias" in w:
      x += w["qkv_bias"]
    # One kernel on a GPU norms and turns all heads, if it need not also split
    # the axis of the product's columns.
    turned = x = jax.lax.optimization_barrier(x)
    head = jnp.arange(group + 2)[:, None]
    if a.qk_norm:
      scale = jnp.where(head < group, w["q_norm"], w["k_norm"])
      turned = decoder.rms_norm(x, scale, a)
      turned *= jnp.where(head < group, a.query_scale, 1.0)
    turned = attention.rotate(turned, *(each[..., None, :] for each in rotary))
    return jnp.where(head <= group, turned, x), None, None

  def _gated(self, w: dict[str, jax.Array], y: jax.Array) -> jax.Array:
    x = jnp.tensordot(y, w["gate_up"], 1)
    if "gate_up_bias" in w:
      x += w["gate_up_bias"]
    return self._active(x[..., 0, :]) * x[..., 1, :]


def prepare(
  params: decoder.Params,
  a: architecture_lib.Architecture,
  *,
  dtype: Any,
  fused: bool,
  mesh: jax.sharding.Mesh | None = None,
) -> decoder.Params:
  """Returns parameters as `extend` reads them.

  Args:
    params: laid out by `table.rows(a)`.
    a: the architecture, adapters included.
    dtype: compute type; scales of norms stay float32.
    fused: whether to fuse q, k and v, and gate and up. A fused product may sum
      in another order, so its last bits may differ.
    mesh: of `params`; None means one device.

  Returns:
    The parameters of `a.without_lora()`, with a list of layers.
  """
  layers = [
    _layer(params[table.LAYERS], i, a=a, dtype=dtype, fused=fused, mesh=mesh)
    for i in range(a.layers)
  ]
  others = {
    row.path[0]: _cast(params[row.path[0]], row, dtype)
    for row in table.base_rows(a)
    if not row.stacked
  }
  return others | {table.LAYERS: layers}


def shardings(
  a: architecture_lib.Architecture, mesh: jax.sharding.Mesh, *, fused: bool
) -> decoder.Params:
  """Returns the sharding of each array that `prepare` returns."""

  def stands(shape, names) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(
      mesh, weights.spec(shape, names, mesh, sharding.RULES)
    )

  rows = table.base_rows(a)
  whole = {r.path[0]: stands(r.shape, r.axes) for r in rows if not r.stacked}
  axes = _axes(a, fused=fused)
  layer = {key: stands(*found) for key, found in axes.items()}
  return whole | {table.LAYERS: [layer] * a.layers}


def extend(
  params: decoder.Params,
  a: architecture_lib.Architecture,
  tokens: jax.Array,
  starts: jax.Array,
  counts: jax.Array,
  caches: Sequence[C],
  attend: Attend[C],
  *,
  dtype: Any = jnp.float32,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[jax.Array, tuple[C, ...], jax.Array | None]:
  """Appends tokens to cached sequences.

  Args:
    params: as returned by `prepare`.
    a: the architecture, without adapters.
    tokens: int `[B, T]`; token t of a row has position start + t.
    starts: int `[B]`, number of tokens cached for each row.
    counts: int `[B]`, number of real tokens in each row; the rest is padding.
    caches: of every layer.
    attend: writes new tokens to a layer's cache, then attends to it.
    dtype: compute type.
    mesh: whose `data` axis the rows are sharded over; None means one device.

  Returns:
    Normed hidden states `[B, T, D]`, the new caches, and the experts that each
    token chose, `[B, T, L, K]` as `experts.record` has them (None without
    experts). States and experts of padding are meaningless. Several rows may be
    chunks of one sequence, because every layer writes the keys and values of
    all rows before it attends.
  """
  chex.assert_equal_shape([starts, counts])
  step = jnp.arange(tokens.shape[1])[None]
  real = step < counts[:, None]
  # Padding repeats the last position, so that no row reads beyond its cache.
  last = jnp.maximum(counts[:, None] - 1, 0)
  positions = starts[:, None] + jnp.minimum(step, last)
  rotary = attention.rotary(a, positions)
  x = decoder.scale_embeddings(params["embed"][tokens].astype(dtype), a)
  out: list[C] = []
  chosen: list[jax.Array] = []
  layers = zip(params[table.LAYERS], caches, strict=True)
  differ = attention.layers(a)
  for i, (layer, cache) in enumerate(layers):
    own = attention.Layer(*(None if x is None else x[i] for x in differ))

    def cached(q, k, v, sinks, cache=cache, window=own.window):
      return attend(q, k, v, cache, positions, real, window, sinks)

    kind = FusedBlock if {"qkv", "gate_up"} & layer.keys() else decoder.Block
    block = kind(a, over=None if mesh is None else sharding.Layout(mesh))
    found: Any = block.apply(
      {"params": layer}, x, rotary, None, own, cached=cached
    )
    x, (written, ids) = found
    out.append(written)
    chosen.append(ids)
  hidden = decoder.rms_norm(x, params["norm"], a)
  if not a.experts:
    return hidden, tuple(out), None
  ids = jnp.stack(chosen, axis=2)
  return hidden, tuple(out), ids.astype(experts.record(a).dtype)


@functools.partial(jax.jit, static_argnames=("a", "dtype", "fused", "mesh"))
def _layer(
  stacks: dict[str, jax.Array],
  i: jax.Array,
  *,
  a: architecture_lib.Architecture,
  dtype: Any,
  fused: bool,
  mesh: jax.sharding.Mesh | None,
) -> dict[str, jax.Array]:
  """Returns one layer; a single program serves all layers."""
  base = a.without_lora()
  params = {table.LAYERS: stacks}
  layer = {
    row.path[-1]: _cast(lora.merged_weight(params, a, row, (i,)), row, dtype)
    for row in table.base_rows(base)
    if row.stacked
  }
  if fused:
    layer = _fuse(layer, base)
  if mesh is None:
    return layer
  stands = shardings(a, mesh, fused=fused)[table.LAYERS][0]
  return jax.lax.with_sharding_constraint(layer, stands)


def _cast(x: jax.Array, row: weights.Weight, dtype: Any) -> jax.Array:
  """Casts a weight, except a norm's scale: norms are computed in float32."""
  kept = row.init is None or x.dtype == dtype
  return jnp.asarray(x) if kept else jnp.asarray(x, dtype)


def _fuse(
  layer: dict[str, jax.Array], a: architecture_lib.Architecture
) -> dict[str, jax.Array]:
  """Joins the matrices (and biases) that multiply the same input.

  Each kv head's queries, key and value are neighbours, so that sharding over kv
  heads cuts all three alike. Those that are normed over heads stay apart.
  """
  layer = dict(layer)
  for suffix in ("", "_bias"):
    if f"q{suffix}" in layer and not a.joint_norm:
      q, k, v = (layer.pop(f"{key}{suffix}") for key in "qkv")
      *model, _, h = q.shape
      q = q.reshape(*model, a.kv_heads, a.heads // a.kv_heads, h)
      heads = (q, k[..., None, :], v[..., None, :])
      layer[f"qkv{suffix}"] = jnp.concatenate(heads, -2)
    if f"gate{suffix}" in layer and not a.experts:
      both = [layer.pop(f"{key}{suffix}") for key in ("gate", "up")]
      layer[f"gate_up{suffix}"] = jnp.stack(both, -2)
  return layer


def _axes(
  a: architecture_lib.Architecture, *, fused: bool
) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
  """Returns shape and logical axes of each array of a prepared layer."""
  rows = {row.path[-1]: row for row in table.base_rows(a) if row.stacked}
  found = {key: (row.layer_shape, row.axes[1:]) for key, row in rows.items()}
  if not fused:
    return found
  shapes = jax.eval_shape(
    functools.partial(_fuse, a=a),
    {
      key: jax.ShapeDtypeStruct(shape, jnp.float32)
      for key, (shape, _) in found.items()
    },
  )
  ends: dict[str, tuple[str | None, ...]] = {
    "qkv": ("kv_heads", None, "head_dim"),
    "gate_up": (None, "mlp"),
  }
  fused_axes = ends | {f"{key}_bias": axes for key, axes in ends.items()}
  fused_axes |= {key: ("model", *axes) for key, axes in ends.items()}
  return {
    key: (x.shape, fused_axes[key] if key in fused_axes else found[key][1])
    for key, x in shapes.items()
  }
