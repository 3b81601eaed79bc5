"""How a decoder is cut over a device mesh."""

from __future__ import annotations

import jax

from anysearch_jax import weights
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import table

AXES = ("data", "fsdp", "tensor")
# Logical axes of the table to mesh axes.
RULES = {
  "layers": None,
  "vocab": "tensor",
  "model": "fsdp",
  "heads": "tensor",
  "kv_heads": "tensor",
  "head_dim": None,
  "mlp": "tensor",
}


def mesh(*, data: int = 1, fsdp: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
  """A mesh of the first `data * fsdp * tensor` devices.

  Raises:
    ValueError: there are fewer devices.
  """
  shape = (data, fsdp, tensor)
  wanted = data * fsdp * tensor
  devices = jax.devices()
  if wanted > len(devices):
    raise ValueError(
      f"A mesh of data {data} x fsdp {fsdp} x tensor {tensor} needs {wanted} "
      f"devices; found {len(devices)}."
    )
  return jax.make_mesh(
    shape,
    AXES,
    axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
    devices=devices[:wanted],
  )


def shardings(
  a: architecture_lib.Architecture, mesh: jax.sharding.Mesh
) -> dict:
  """The nested dict of each parameter's sharding, adapters included."""
  return weights.shardings(table.rows(a), mesh, RULES)
