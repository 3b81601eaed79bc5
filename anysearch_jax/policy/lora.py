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
  expert_targets = {"gate", "up", "down"} & {*config.targets}
  if a.experts and expert_targets:
    raise ValueError(
      f"lora.targets: found {', '.join(sorted(expert_targets))}, of which this "
      f"policy has {a.experts} in each layer; expected targets among q, k, v "
      "and o."
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
  """Returns one layer of a base row, merged with its adapter if it has one.

  A merged layer is float32; any other keeps its dtype.

  Args:
    params: the parameters, adapters included.
    a: the architecture, adapters included.
    row: the base row.
    i: as for `parameters.layer_slice`.
  """
  weight = weights.layer_slice(params, row, i)
  key = row.path[-1]
  if a.lora is None or not row.stacked or key not in a.lora.targets:
    return weight
  layers = params[table.LAYERS]
  lora_a = weights.index(layers[f"{key}_lora_a"], i)
  lora_b = weights.index(layers[f"{key}_lora_b"], i)
  out_axes_first = table.projections(a)[key].out_axes_first
  return _merge(weight, lora_a, lora_b, a.lora.scale, out_axes_first)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _merge(
  weight: jax.Array,
  lora_a: jax.Array,
  lora_b: jax.Array,
  scale: float,
  out_axes_first: bool,
) -> jax.Array:
  """Returns W + scale * A B in float32."""
  lora_a = lora_a.astype(jnp.float32)
  lora_b = lora_b.astype(jnp.float32)
  product = (
    jnp.tensordot(lora_b, lora_a, (0, -1))
    if out_axes_first
    else jnp.tensordot(lora_a, lora_b, 1)
  )
  return weight.astype(jnp.float32) + scale * product
