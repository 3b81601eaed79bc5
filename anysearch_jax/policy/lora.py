"""Low-rank adapters, beside the weights or merged into them.

An architecture with `lora` has two more parameters, A and B, for each target.
The decoder adds `scale * x A B` to the output of the frozen weight. See Hu et
al. 2021, https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, table
from anysearch_jax.policy import parameters as weights


def attach(
  a: architecture_lib.Architecture, config: config_lib.LoraConfig
) -> architecture_lib.Architecture:
  """Returns `a` with the adapters of `config`; unchanged if the rank is 0.

  Raises:
    ValueError: the rank is too large for this policy, or a target is in its
      experts.
  """
  if not config.rank:
    return a
  inside = {"gate", "up", "down"} & {*config.targets}
  if a.experts and inside:
    raise ValueError(
      f"lora.targets: found {', '.join(sorted(inside))}, of which this policy "
      f"has {a.experts} in each layer; expected targets among q, k, v and o."
    )
  if config.rank > a.d_model:
    raise ValueError(
      f"lora.rank: found {config.rank}, expected at most the policy's width, "
      f"{a.d_model}: no weight has a higher rank."
    )
  adapters = architecture_lib.Lora(config.rank, config.alpha, config.targets)
  return dataclasses.replace(a, lora=adapters)


def base_dtype(config: config_lib.LoraConfig) -> str:
  """Returns the dtype to load the policy in; trained weights are float32."""
  return config.base_dtype if config.rank else "float32"


def initialize(a: architecture_lib.Architecture, seed: int) -> decoder.Params:
  """Returns initial float32 adapters, deterministic by seed.

  B is zero, so they do not change the policy's output.
  """
  return weights.initialize(table.adapter_rows(a), seed)


def combine(base: decoder.Params, adapters: decoder.Params) -> decoder.Params:
  """Returns the parameters of an architecture with adapters."""
  layers = base[table.LAYERS] | adapters[table.LAYERS]
  return base | {table.LAYERS: layers}


def merged_weight(
  params: decoder.Params,
  a: architecture_lib.Architecture,
  row: weights.Weight,
  i: Sequence[int | jax.Array],
) -> jax.Array:
  """Returns a base row at `i`, merged with its adapter if it has one.

  `i` is as for `parameters.part`. A merged layer is float32; any other keeps
  its dtype.
  """
  weight, key = weights.layer_slice(params, row, i), row.path[-1]
  if a.lora is None or not row.stacked or key not in a.lora.targets:
    return weight
  factors = (
    weights.index(params[table.LAYERS][f"{key}_lora_{factor}"], i)
    for factor in "ab"
  )
  out_axes_first = table.projections(a)[key].out_axes_first
  return _added(weight, *factors, a.lora.scale, out_axes_first)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _added(
  weight: jax.Array,
  lora_a: jax.Array,
  lora_b: jax.Array,
  scale: float,
  out_axes_first: bool,
) -> jax.Array:
  lora_a, lora_b = lora_a.astype(jnp.float32), lora_b.astype(jnp.float32)
  product = (
    jnp.tensordot(lora_b, lora_a, (0, -1))
    if out_axes_first
    else jnp.tensordot(lora_a, lora_b, 1)
  )
  return weight.astype(jnp.float32) + scale * product
