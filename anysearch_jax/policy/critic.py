"""The critic: a network like the policy, with a number where that has a head.

Its body starts as the policy's and is trained as the policy is: all of it, or
adapters of its own beside the same frozen base. It is cut over a mesh by the
same rows (`table.critic_rows`).
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
  """The critic of a policy: no value differs from 0 yet.

  Args:
    trained: of the policy, its weights or its adapters; the critic has the
      same arrays.
    a: the policy's architecture, with its adapters.
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
  """The value of each state of packed rows.

  Args:
    critic: as `table.critic_rows` lays it out.
    base: the frozen weights that adapters stand beside; else not looked at.
    a: the policy's architecture, with its adapters.
    tokens: int `[B, T]`.
    positions: int `[B, T]`.
    segment_ids: int `[B, T]`, 0 is padding.
    compute: how.

  Returns:
    float32 `[B, T]`: at index t that of the state `tokens[..t]`, which the
    token after it is sampled in; garbage at padding.
  """
  body = {name: x for name, x in critic.items() if name != "value"}
  if a.lora is not None:
    body = lora.combine(base, body)
  hidden = decoder.forward(
    body, table.headless(a), tokens, positions, segment_ids, compute=compute
  )
  # A sum, not a product of matrices: float32 on every device.
  value = jnp.sum(hidden.astype(jnp.float32) * critic["value"], -1)
  layout = compute.layout
  return value if layout is None else layout.constrain(value, None)
