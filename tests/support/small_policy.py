"""A policy of one layer, parameters, and gradients that a step keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from anysearch_jax.policy import architecture as architecture_lib

# An optimizer that keeps the gradient it was last given as its state.
KEEP = optax.trace(0.0)


def architecture(vocab_size):
  return architecture_lib.Architecture(
    "qwen2",
    vocab_size=vocab_size,
    d_model=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_dim=24,
    qkv_bias=True,
  )


def noisy(params, seed, scale=0.1):
  """Float32 parameters near these, none of them as it would be born."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda p: jnp.asarray(p + scale * rng.normal(size=p.shape), jnp.float32),
    params,
  )
