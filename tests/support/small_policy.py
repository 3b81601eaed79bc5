"""Policies of one layer, their parameters, and an optimizer for gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from anysearch_jax.policy import architecture as architecture_lib

# An optimizer whose state is the last gradient that it received.
KEEP = optax.trace(0.0)


def architecture(vocab_size, **changes):
  """Returns a Qwen2 of one layer, or with other values."""
  values = {"family": "qwen2", "d_model": 16, "mlp_dim": 24, "layers": 1}
  values |= {"heads": 2, "kv_heads": 1, "head_dim": 8}
  values |= {"qkv_bias": True, "vocab_size": vocab_size} | changes
  return architecture_lib.Architecture(**values)


def qwen3(vocab_size, **changes):
  """Returns a Qwen3 with a tied head."""
  of_qwen3 = {"family": "qwen3", "qkv_bias": False, "qk_norm": True}
  return architecture(vocab_size, **of_qwen3 | {"tied": True} | changes)


def noisy(params, seed, scale=0.1):
  """Returns float32 parameters near these, none with its initial value."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda p: jnp.asarray(p + scale * rng.normal(size=p.shape), jnp.float32),
    params,
  )
