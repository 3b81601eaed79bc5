"""Counts bytes on a device by kind, from abstract arrays and shardings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from anysearch_jax.planning import program as program_lib


def on_device(tree: Any) -> int:
  """Returns the bytes on one device of a tree of arrays, abstract or not.

  An array without a sharding counts in full.
  """
  return sum(map(_shard_bytes, jax.tree.leaves(tree)))


def kinds(program: program_lib.Program) -> dict[str, int]:
  """Returns the bytes on a device of each non-empty kind of a program."""
  found = {name: on_device(tree) for name, tree in program.kinds.items()}
  return {name: size for name, size in found.items() if size}


def gradients(kinds: Mapping[str, int]) -> int:
  """Returns the bytes of a train step's gradients; 0 for other programs.

  There is one buffer, of the size of the trained parameters.
  """
  if "moments" not in kinds:
    return 0
  return kinds.get("masters", 0) + kinds.get("critic", 0)


def hand_over(
  trained: program_lib.Program,
  sampled: program_lib.Program,
  *,
  itemsize: int,
  adapters: bool,
) -> tuple[int, int]:
  """Returns what a hand-over of new weights to the engine needs on a device.

  Args:
    trained: the train step.
    sampled: decode, with the engine's weights.
    itemsize: bytes of the compute type.
    adapters: whether only adapters are trained.

  Returns:
    The bytes of the cast copy that the trainer publishes, and the bytes that
    are read and written on the way. The engine drops its old weights before it
    makes new ones of that copy.
  """
  masters = kinds(trained)["masters"]
  weights = kinds(sampled)["engine weights"]
  cast = 0 if itemsize == 4 else masters * itemsize // 4
  frozen = weights if adapters else 0
  if not devices(trained) & devices(sampled):
    cast, masters = weights, 0
  return cast, masters + 2 * cast + frozen + weights


def held(
  program: program_lib.Program, others: Iterable[program_lib.Program]
) -> dict[str, int]:
  """Returns the bytes, by kind, that other programs keep on a device meanwhile.

  Kinds that the program itself has are excluded: they are the same arrays. So
  are those that are freed or in host memory while it runs.
  """
  away = program.freed | program.offloaded
  return {
    name: size
    for name, size in _others(program, others).items()
    if name not in away
  }


def offloaded(
  program: program_lib.Program, others: Iterable[program_lib.Program]
) -> int:
  """Returns a device's bytes that are in host memory while a program runs."""
  return sum(
    size
    for name, size in _others(program, others).items()
    if name in program.offloaded
  )


def _others(
  program: program_lib.Program, others: Iterable[program_lib.Program]
) -> dict[str, int]:
  """Returns the bytes on a device, by kind, that only other programs have."""
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
  """Returns the devices of a program's arrays."""
  return frozenset().union(
    *(
      placed.device_set
      for x in jax.tree.leaves((program.args, dict(program.kinds)))
      if (placed := _sharding(x)) is not None
    )
  )


def _shard_bytes(x: Any) -> int:
  sharding = _sharding(x)
  shape = sharding.shard_shape(x.shape) if sharding is not None else x.shape
  return math.prod(shape) * x.dtype.itemsize


def _sharding(x: Any) -> jax.sharding.Sharding | None:
  """Returns where an array is; None for one that is on no device."""
  if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
    return x.sharding
  return None
