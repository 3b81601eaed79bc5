"""Weights as the engine reads them: merged, cast, fused and sharded."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_models
import small_policy

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import lora, serving, sharding, table

ADAPTED = architecture_lib.Lora(
  rank=2, alpha=4.0, targets=config_lib.LoraConfig().targets
)


def adapted(case):
  """Returns an architecture with adapters, and parameters with B not zero."""
  a = dataclasses.replace(random_models.architecture(case), lora=ADAPTED)
  drawn = small_policy.noisy(lora.initialize(a, 0), 0, scale=1.0)
  base = random_models.params(a.without_lora())
  return a, lora.combine(base, drawn)


def test_weights_are_cast_and_scales_of_norms_are_not():
  a, params = adapted("qwen3")
  found = serving.prepare(params, a, dtype=jnp.bfloat16, fused=True)
  layer = found[table.LAYERS][0]
  scales = {"attention_norm", "mlp_norm", "q_norm", "k_norm"}
  assert {key for key, x in layer.items() if x.dtype == jnp.float32} == scales
  assert found["norm"].dtype == jnp.float32
  assert found["embed"].dtype == jnp.bfloat16


def test_one_program_prepares_all_layers():
  a, params = adapted("qwen2")
  serving._layer.clear_cache()
  serving.prepare(params, a, dtype=jnp.float32, fused=True)
  assert serving._layer._cache_size() == 1


@pytest.mark.parametrize("fused", [False, True])
def test_weights_are_sharded_as_told(fused):
  a, params = adapted("qwen2")
  mesh = sharding.mesh(data=2, tensor=2)
  placed = jax.device_put(params, sharding.shardings(a, mesh))
  found = serving.prepare(placed, a, dtype=jnp.float32, fused=fused, mesh=mesh)
  told = serving.shardings(a, mesh, fused=fused)
  assert jax.tree.structure(found) == jax.tree.structure(told)
  jax.tree.map(
    lambda x, s: s.is_equivalent_to(x.sharding, x.ndim) or pytest.fail(str(s)),
    found,
    told,
  )
  cut = {
    key: x.addressable_shards[0].data.size / x.size
    for key, x in found[table.LAYERS][0].items()
  }
  names = ("qkv", "gate_up") if fused else ("q", "k", "v", "gate", "up")
  assert {cut[name] for name in (*names, "o", "down")} == {0.5}
  alone = serving.prepare(params, a, dtype=jnp.float32, fused=fused)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6),
    found,
    alone,
  )
