"""Bytes a device, by kind, from abstract arrays and their shardings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from anysearch_jax.planning import program as program_lib

GRADIENTS = "gradients"
ACTIVATIONS = "activations"


def on_device(tree: Any) -> int:
  """Bytes of a tree of arrays on the device that holds most of it.

  Leaves may be abstract. Without a sharding an array is whole.
  """
  leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
  return sum(map(_shard_bytes, leaves))


def _shard_bytes(x: Any) -> int:
  sharding = getattr(x, "sharding", None)
  shape = sharding.shard_shape(x.shape) if sharding is not None else x.shape
  if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
    return math.prod(shape) * jax.random.key_data(jax.random.key(0)).nbytes
  return math.prod(shape) * x.dtype.itemsize
