"""Where the weights of an encoder are, and in which dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax.host import platforms


class Placed(NamedTuple):
  """Devices of a model.

  Attributes:
    devices: over which the rows of a call are sharded, as axis `data` of
      `mesh`; each has all weights (`whole`).
    dtype: of the weights and the matrix products.
  """

  devices: Sequence[jax.Device]
  mesh: jax.sharding.Mesh
  whole: jax.sharding.Sharding
  dtype: Any


def place(devices: Sequence[jax.Device] | None, dtype: Any) -> Placed:
  """Returns the placement of a model.

  Args:
    devices: None: one CPU device, because accelerators are for the policy.
    dtype: None: bfloat16 on accelerators, float32 on CPUs.
  """
  if devices is None:
    devices = [platforms.cpu()]
  if dtype is None:
    on_cpu = devices[0].platform == "cpu"
    dtype = jnp.float32 if on_cpu else jnp.bfloat16
  mesh = jax.sharding.Mesh(np.asarray(devices), ("data",))
  whole = jax.sharding.NamedSharding(mesh, jax.P())
  return Placed(devices, mesh, whole, dtype)
