"""A policy of one layer, its parameters, and an optimizer for gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from anysearch_jax.policy import architecture as architecture_lib

# An optimizer whose state is the last gradient that it received.
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
  """Returns float32 parameters near these, none with its initial value."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda p: jnp.asarray(p + scale * rng.normal(size=p.shape), jnp.float32),
    params,
  )
