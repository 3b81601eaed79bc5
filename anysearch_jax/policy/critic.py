"""The critic: the policy's network with a value head instead of its LM head.

Its body starts with the policy's weights and is trained like the policy: either
all weights, or its own adapters beside the same frozen base. It is sharded by
rows of the same kind (`table.critic_rows`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, lora, table


def initialize(
  trained: decoder.Params, a: architecture_lib.Architecture
) -> decoder.Params:
  """Returns the initial critic of a policy, whose values are all 0.

  Args:
    trained: the policy's trained parameters (weights or adapters). The critic
      refers to the same arrays.
    a: the policy's architecture, adapters included.
  """
  body = {name: x for name, x in trained.items() if name != "head"}
  return body | {"value": np.zeros(a.d_model, np.float32)}


def values(
  critic: decoder.Params,
  base: decoder.Params | None,
  a: architecture_lib.Architecture,
  tokens: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  *,
  compute: decoder.Compute = decoder.Compute(),  # noqa: B008
) -> jax.Array:
  """Returns the value of each state of packed rows.

  Args:
    critic: parameters laid out by `table.critic_rows`.
    base: the frozen weights under the adapters; unused without adapters.
    a: the policy's architecture, adapters included.
    tokens: int `[B, T]`.
    positions: int `[B, T]`.
    segment_ids: int `[B, T]`, 0 is padding.
    compute: dtype, remat, attention and layout.

  Returns:
    float32 `[B, T]`: index t has the value of the state after `tokens[..t]`,
    in which token t + 1 is sampled. Values at padding are meaningless.
  """
  body = {name: x for name, x in critic.items() if name != "value"}
  if a.lora is not None:
    assert base is not None  # Adapters lie beside a base.
    body = lora.combine(base, body)
  hidden = decoder.forward(
    body, table.headless(a), tokens, positions, segment_ids, compute=compute
  )
  # An elementwise product and a sum: accelerators may compute a float32 matrix
  # product at lower precision (TF32, bfloat16).
  value = jnp.sum(hidden.astype(jnp.float32) * critic["value"], -1)
  layout = compute.layout
  return value if layout is None else layout.constrain(value, None)
