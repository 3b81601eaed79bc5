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
from anysearch_jax.policy import (
  cpu_bfloat16,
  decoder,
  experts,
  lora,
  sharding,
  table,
)
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy.attention import layer_options as layer_options_lib
from anysearch_jax.policy.attention import rotary

C = TypeVar("C")  # The cache of one layer.
_MaybeArray = jax.Array | None
# Writes new tokens to a layer's cache and attends to it, as `Paged.__call__`.
Attend = Callable[
  [
    jax.Array,  # Queries; of a fused layer queries, keys and values.
    _MaybeArray,  # Keys; None if the layer is fused.
    _MaybeArray,  # Values, alike.
    C,
    jax.Array,  # Positions.
    jax.Array,  # The mask of real tokens.
    int | None,  # The window; None if the layer sees all tokens.
    _MaybeArray,  # Sinks.
  ],
  tuple[jax.Array, C],  # The attention output and the new cache.
]


class FusedBlock(decoder.Block):
  """A layer with one matrix for q, k and v, or for gate and up, or both.

  The axes of every matrix's inputs come first.
  """

  def _weights(self, dtype: Any) -> dict[str, jax.Array]:
    del dtype  # `prepare` has cast them.
    return dict(self.variables["params"])

  def _heads(
    self, w: dict[str, jax.Array], y: jax.Array, cos_sin: rotary.CosSin
  ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns `[B, T, K, G + 2, H]`, and None twice, for `Attend`.

    G is the number of query heads that share a kv head. A kv head's queries
    come first, then its key and its value.
    """
    if "qkv" not in w:
      return super()._heads(w, y, cos_sin)
    a = self.a
    group = a.heads // a.kv_heads
    x = cpu_bfloat16.project(y, w["qkv"], 1)
    if "qkv_bias" in w:
      x += w["qkv_bias"]
    # The barrier lets a GPU norm and rotate all heads in one kernel, which then
    # need not also split the axis of the product's columns.
    x = jax.lax.optimization_barrier(x)
    rotated = x
    head = jnp.arange(group + 2)[:, None]
    if a.qk_norm:
      scale = jnp.where(head < group, w["q_norm"], w["k_norm"])
      rotated = decoder.rms_norm(x, scale, a)
      rotated *= jnp.where(head < group, a.query_scale, 1.0)
    cos, sin = cos_sin
    rotated = rotary.rotate(rotated, cos[..., None, :], sin[..., None, :])
    is_query_or_key = head <= group
    return jnp.where(is_query_or_key, rotated, x), None, None

  def _project(
    self, w: dict[str, jax.Array], key: str, x: jax.Array
  ) -> jax.Array:
    if key not in _inputs_first(self.a):
      return super()._project(w, key, x)
    y = cpu_bfloat16.project(x, w[key], w[key].ndim - 1)
    return y + w[key + "_bias"] if key + "_bias" in w else y

  def _gated(self, w: dict[str, jax.Array], y: jax.Array) -> jax.Array:
    x = cpu_bfloat16.project(y, w["gate_up"], 1)
    if "gate_up_bias" in w:
      x += w["gate_up_bias"]
    return self._activation(x[..., 0, :]) * x[..., 1, :]


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
    fused: whether to fuse q, k and v, and gate and up, and to put the axes of
      inputs first. A fused product may sum in another order, so its last bits
      may differ.
    mesh: of `params`; None means one device.

  Returns:
    The parameters of `a.without_lora()`, with a list of layers.
  """
  layers = [
    _layer(params[table.LAYERS], i, a=a, dtype=dtype, fused=fused, mesh=mesh)
    for i in range(a.layers)
  ]
  unstacked = {
    row.path[0]: _cast(params[row.path[0]], row, dtype)
    for row in table.base_rows(a)
    if not row.stacked
  }
  return unstacked | {table.LAYERS: layers}


def shardings(
  a: architecture_lib.Architecture, mesh: jax.sharding.Mesh, *, fused: bool
) -> decoder.Params:
  """Returns the sharding of each array that `prepare` returns.

  Args:
    a: the architecture.
    mesh: the mesh of the arrays.
    fused: as for `prepare`.
  """

  def named_sharding(shape, axes) -> jax.sharding.NamedSharding:
    spec = weights.spec(shape, axes, mesh, sharding.RULES)
    return jax.sharding.NamedSharding(mesh, spec)

  unstacked = {
    row.path[0]: named_sharding(row.shape, row.axes)
    for row in table.base_rows(a)
    if not row.stacked
  }
  layer = {
    key: named_sharding(shape, axes)
    for key, (shape, axes) in _shapes_and_axes(a, fused=fused).items()
  }
  return unstacked | {table.LAYERS: [layer] * a.layers}


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
    counts: int `[B]`, number of real tokens in each row; others are padding.
    caches: the cache of each layer.
    attend: writes new tokens to a layer's cache, then attends to it.
    dtype: compute type.
    mesh: whose `data` axis the rows are sharded over; None means one device.

  Returns:
    Normed hidden states `[B, T, D]`, the new caches, and the ids of each
    token's experts, `[B, T, L, k]` in the dtype of `experts.record` (None
    without experts). States and experts of padding are meaningless. Several
    rows may be chunks of one sequence, because every layer writes the keys and
    values of all rows before it attends.
  """
  chex.assert_equal_shape([starts, counts])
  step = jnp.arange(tokens.shape[1])[None]
  real = step < counts[:, None]
  # Padding repeats the last position, so that no row reads beyond its cache.
  last_step = jnp.maximum(counts[:, None] - 1, 0)
  positions = starts[:, None] + jnp.minimum(step, last_step)
  cos_sin = rotary.cos_and_sin(a, positions)
  x = decoder.scale_embeddings(
    cpu_bfloat16.rows(params["embed"], tokens).astype(dtype), a
  )
  new_caches: list[C] = []
  expert_ids: list[jax.Array] = []
  layers = zip(params[table.LAYERS], caches, strict=True)
  all_options = layer_options_lib.layer_options(a)
  expert_layout = None if mesh is None else sharding.Layout(mesh)
  for i, (layer, cache) in enumerate(layers):
    options = jax.tree.map(lambda x, i=i: x[i], all_options)

    def attend_to_cache(q, k, v, sinks, cache=cache, window=options.window):
      return attend(q, k, v, cache, positions, real, window, sinks)

    fused = {"qkv", "gate_up"} & layer.keys()
    block_class = FusedBlock if fused else decoder.Block
    block = block_class(a, expert_layout=expert_layout)
    output: Any = block.apply(
      {"params": layer},
      x,
      cos_sin,
      None,
      options,
      attend_to_cache=attend_to_cache,
    )
    x, (new_cache, layer_ids) = output
    new_caches.append(new_cache)
    expert_ids.append(layer_ids)
  hidden = decoder.rms_norm(x, params["norm"], a)
  if not a.experts:
    return hidden, tuple(new_caches), None
  ids = jnp.stack(expert_ids, axis=2).astype(experts.record(a).dtype)
  return hidden, tuple(new_caches), ids


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
  layer_shardings = shardings(a, mesh, fused=fused)[table.LAYERS][0]
  return jax.lax.with_sharding_constraint(layer, layer_shardings)


def _cast(x: jax.Array, row: weights.Weight, dtype: Any) -> jax.Array:
  """Casts a weight, except a norm's scale: norms are computed in float32."""
  keeps_dtype = row.init is None or x.dtype == dtype
  return jnp.asarray(x) if keeps_dtype else jnp.asarray(x, dtype)


def _inputs_first(a: architecture_lib.Architecture) -> list[str]:
  """Returns the matrices whose first axis, of outputs, `_fuse` puts last.

  A CPU would copy them to that layout in every step of decode. Experts have
  matrices of their own.
  """
  return [
    key
    for key, projection in table.projections(a).items()
    if projection.out_axes_first and not (a.experts and key == "down")
  ]


def _fuse(
  layer: dict[str, jax.Array], a: architecture_lib.Architecture
) -> dict[str, jax.Array]:
  """Joins the matrices (and biases) that multiply the same input.

  Each kv head's queries, key and value are neighbours, so that sharding over kv
  heads divides all three alike. Queries and keys that are normed over all heads
  together (`joint_norm`) are not fused.
  """
  layer = dict(layer)
  for key in _inputs_first(a):
    layer[key] = jnp.moveaxis(layer[key], 0, -1)
  for suffix in ("", "_bias"):
    if f"q{suffix}" in layer and not a.joint_norm:
      q, k, v = (layer.pop(f"{key}{suffix}") for key in "qkv")
      *model, _, h = q.shape
      q = q.reshape(*model, a.kv_heads, a.heads // a.kv_heads, h)
      heads = (q, k[..., None, :], v[..., None, :])
      layer[f"qkv{suffix}"] = jnp.concatenate(heads, -2)
    if f"gate{suffix}" in layer and not a.experts:
      gate_and_up = [layer.pop(f"{key}{suffix}") for key in ("gate", "up")]
      layer[f"gate_up{suffix}"] = jnp.stack(gate_and_up, -2)
  return layer


def _shapes_and_axes(
  a: architecture_lib.Architecture, *, fused: bool
) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
  """Returns shape and logical axes of each array of a prepared layer."""
  separate = {
    row.path[-1]: (row.layer_shape, row.axes[1:])
    for row in table.base_rows(a)
    if row.stacked
  }
  if not fused:
    return separate
  shapes = jax.eval_shape(
    functools.partial(_fuse, a=a),
    {
      key: jax.ShapeDtypeStruct(shape, jnp.float32)
      for key, (shape, _) in separate.items()
    },
  )
  output_axes: dict[str, tuple[str | None, ...]] = {
    "qkv": ("kv_heads", None, "head_dim"),
    "gate_up": (None, "mlp"),
  }
  fused_axes = {f"{key}_bias": axes for key, axes in output_axes.items()}
  fused_axes |= {key: ("model", *axes) for key, axes in output_axes.items()}
  for key in _inputs_first(a):
    outputs, *inputs = separate[key][1]
    fused_axes[key] = (*inputs, outputs)
  return {
    key: (x.shape, fused_axes[key] if key in fused_axes else separate[key][1])
    for key, x in shapes.items()
  }
