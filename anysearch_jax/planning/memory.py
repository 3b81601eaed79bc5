"""Bytes a device, by kind, from abstract arrays and their shardings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from anysearch_jax.planning import program as program_lib


def on_device(tree: Any) -> int:
  """Bytes that a device holds of a tree of arrays, which may be abstract.

  An array without a sharding is whole.
  """
  return sum(map(_shard_bytes, jax.tree.leaves(tree)))


def kinds(program: program_lib.Program) -> dict[str, int]:
  """Bytes a device of each of a program's kinds, empty ones left out."""
  found = {name: on_device(tree) for name, tree in program.kinds.items()}
  return {name: size for name, size in found.items() if size}


def gradients(kinds: Mapping[str, int]) -> int:
  """Bytes of a step's one buffer, as large as what the step changes."""
  if "moments" not in kinds:
    return 0
  return kinds.get("masters", 0) + kinds.get("critic", 0)


def held(
  program: program_lib.Program, others: Iterable[program_lib.Program]
) -> dict[str, int]:
  """Bytes a device, by kind, of what stays there for other programs.

  A kind that the program has itself counts as its own.
  """
  own, where = kinds(program), devices(program)
  out: dict[str, int] = {}
  for other in others:
    if not where & devices(other):
      continue
    for name, size in kinds(other).items():
      if name != program_lib.BATCH and name not in own:
        out[name] = max(size, out.get(name, 0))
  return out


def devices(program: program_lib.Program) -> frozenset[jax.Device]:
  """The devices that a program's arrays lie on."""
  return frozenset().union(
    *(
      x.sharding.device_set
      for x in jax.tree.leaves((program.args, dict(program.kinds)))
      if getattr(x, "sharding", None) is not None
    )
  )


def _shard_bytes(x: Any) -> int:
  sharding = getattr(x, "sharding", None)
  shape = sharding.shard_shape(x.shape) if sharding is not None else x.shape
  return math.prod(shape) * x.dtype.itemsize
