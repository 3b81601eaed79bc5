"""Compiles a program for a target and measures it by the compiler's report.

Ahead-of-time compilation: https://docs.jax.dev/en/latest/aot.html.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from anysearch_jax.host import captured_stderr, hardware
from anysearch_jax.planning import programs as programs_lib
from anysearch_jax.planning import targets
from anysearch_jax.policy.attention import cudnn

# A number of bytes, such as 15.75G, in the compiler's messages.
_SIZE = r"\(?([\d.]+)([KMGT]?)\)?"
# Errors of the TPU compiler for a program that exceeds the memory.
_REFUSALS = (
  re.compile(rf"required[^()]*{_SIZE} exceeds available HBM {_SIZE}"),
  re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Part:
  """A measured program of a plan; bytes are those of one device.

  Attributes:
    name: of the program.
    devices: number of devices.
    kinds: bytes of its arguments, by kind.
    held: bytes that other programs keep on the device meanwhile, by kind.
    arguments: bytes of its arguments, by the compiler.
    temporary: temporary bytes, by the compiler.
    peak: peak bytes, by the compiler or by its refusal.
    refused: whether the compiler refused the program as too large.
    offloaded: bytes of other programs that are in host memory meanwhile.
  """

  name: str
  devices: int
  kinds: Mapping[str, int]
  held: Mapping[str, int]
  arguments: int
  temporary: int
  peak: int
  refused: bool = False
  offloaded: int = 0

  @property
  def gradients(self) -> int:
    """Bytes of gradients: one buffer, of the size of the trained parameters."""
    if "moments" not in self.kinds:
      return 0
    return self.kinds.get("masters", 0) + self.kinds.get("critic", 0)

  @property
  def activations(self) -> int:
    """Temporary bytes other than gradients."""
    return max(0, self.temporary - self.gradients)

  @property
  def total(self) -> int:
    """Peak bytes in use, those of other programs included."""
    return self.peak + sum(self.held.values())

  def fits(self, target: targets.Target) -> bool:
    return not self.refused and self.total <= target.capacity


def compile_program(
  program: programs_lib.Program,
  target: targets.Target,
  **options: Any,
) -> tuple[Any, int | None]:
  """Compiles a program for devices that this machine need not have.

  Args:
    program: to compile.
    target: the hardware that its arrays are on.
    **options: more options of the compiler.

  Returns:
    The `jax.stages.Compiled` and None, or None and the bytes that a program
    needs that the compiler refused.

  Raises:
    jax.errors.JaxRuntimeError: the compiler failed for another reason than
      memory.
  """
  platform = target.hardware.platform
  lowering: contextlib.AbstractContextManager = contextlib.nullcontext()
  if isinstance(target.hardware, hardware.Gpu):
    major, minor = target.hardware.capability
    lowering = cudnn.lowering(major + minor / 10)
  if platform == "cuda":
    # XLA chooses tiles of Triton products by timing them, and without timing
    # some sizes have no tiles. So cuBLAS computes all products, and its
    # workspace counts as memory.
    options = {"xla_gpu_enable_triton_gemm": False, **options}
  executable = None
  needed = None
  with lowering, jax.sharding.use_abstract_mesh(_mesh(program)):
    traced = program.fn.trace(*program.args, **program.kwargs)
    with captured_stderr.standard_error():
      lowered = traced.lower(lowering_platforms=(platform,))
      try:
        executable = lowered.compile(compiler_options=options)
      except jax.errors.JaxRuntimeError as error:
        needed = refused_bytes(str(error))
        if needed is None:
          raise
  return executable, needed


def _mesh(program: programs_lib.Program) -> jax.sharding.AbstractMesh:
  """Returns the mesh of a program, which names its devices to kernels.

  Pallas asks it, or else a device of this machine, for what it lowers to.
  """
  return next(
    x.sharding.mesh.abstract_mesh
    for x in jax.tree.leaves(program.args)
    if isinstance(x.sharding, jax.NamedSharding)
  )


def refused_bytes(message: str) -> int | None:
  """Returns the bytes that a refused program needs; None for other errors."""
  for pattern in _REFUSALS:
    match = pattern.search(message)
    if match:
      return int(float(match[1]) * _UNITS[match[2]])
  return None


def measure(
  program: programs_lib.Program,
  all_programs: Sequence[programs_lib.Program],
  target: targets.Target,
) -> Part:
  """Compiles and measures a program.

  Args:
    program: the program.
    all_programs: all programs of the run, which share the devices.
    target: the hardware that its arrays are on.

  Raises:
    jax.errors.JaxRuntimeError: the compiler failed for another reason than
      memory.
  """
  executable, needed = compile_program(program, target)
  platform = target.hardware.platform
  if executable is None:
    assert needed is not None  # The compiler said what it needs.
    peak = needed
    arguments = on_device(program.args)
    temporary = peak - arguments
  else:
    analysis = executable.memory_analysis()
    arguments = analysis.argument_size_in_bytes
    temporary = analysis.temp_size_in_bytes
    peak = analysis.peak_memory_in_bytes
    if platform == "cpu":
      # XLA's own figure excludes temporaries. It predicts no accelerator's: a
      # CPU's matrix products convert bfloat16 to float32.
      outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
      peak = arguments + outputs + temporary
  return Part(
    name=program.name,
    devices=len(devices(program)),
    kinds=kinds(program),
    held=held_by_others(program, all_programs),
    offloaded=offloaded(program, all_programs),
    arguments=arguments,
    temporary=temporary,
    peak=peak,
    refused=executable is None,
  )


def hand_over(
  all_programs: Sequence[programs_lib.Program], *, itemsize: int
) -> Part:
  """Measures a hand-over of new weights to the engine by its arrays.

  A hand-over runs a program for each layer, so no single program can be
  compiled for it. The trainer publishes a cast copy; the engine drops its old
  weights before it makes new ones from that copy.

  Args:
    all_programs: the programs of the run; training is first and decode last.
    itemsize: bytes of a number of the compute type.
  """
  trained = all_programs[0]
  sampled = all_programs[-1]
  program = programs_lib.Program(
    "hand-over",
    None,
    (),
    {},
    kinds={"engine weights": sampled.kinds["engine weights"]},
    # As in training: the training state is still on the device.
    freed=trained.freed,
  )
  masters = kinds(trained)["masters"]
  weights = kinds(sampled)["engine weights"]
  cast = 0 if itemsize == 4 else masters * itemsize // 4
  if not devices(trained) & devices(sampled):
    cast = weights
  return Part(
    name=program.name,
    devices=len(devices(program)),
    kinds=kinds(program),
    held=held_by_others(program, all_programs),
    arguments=weights,
    temporary=cast,
    peak=cast + weights,
  )


def kinds(program: programs_lib.Program) -> dict[str, int]:
  """Returns the bytes on a device of each non-empty kind of a program."""
  sizes = {name: on_device(tree) for name, tree in program.kinds.items()}
  return {name: size for name, size in sizes.items() if size}


def held_by_others(
  program: programs_lib.Program, all_programs: Iterable[programs_lib.Program]
) -> dict[str, int]:
  """Returns the bytes, by kind, that other programs keep on a device meanwhile.

  Kinds that the program itself has are excluded: they are the same arrays. So
  are those that are freed or in host memory while it runs.
  """
  away = program.freed | program.offloaded
  others = _other_kinds(program, all_programs)
  return {name: size for name, size in others.items() if name not in away}


def offloaded(
  program: programs_lib.Program, all_programs: Iterable[programs_lib.Program]
) -> int:
  """Returns a device's bytes that are in host memory while a program runs."""
  others = _other_kinds(program, all_programs)
  return sum(others.get(name, 0) for name in program.offloaded)


def _other_kinds(
  program: programs_lib.Program, all_programs: Iterable[programs_lib.Program]
) -> dict[str, int]:
  """Returns the bytes on a device, by kind, that only other programs have."""
  program_kinds = kinds(program)
  program_devices = devices(program)
  sizes: dict[str, int] = {}
  for other in all_programs:
    if not program_devices & devices(other):
      continue
    for name, size in kinds(other).items():
      if name != programs_lib.BATCH and name not in program_kinds:
        sizes[name] = max(size, sizes.get(name, 0))
  return sizes


def devices(program: programs_lib.Program) -> frozenset[jax.Device]:
  """Returns the devices of a program's arrays."""
  arrays = jax.tree.leaves((program.args, dict(program.kinds)))
  placed = (x.sharding for x in arrays)
  return frozenset().union(*(s.device_set for s in placed if s is not None))


def on_device(tree: Any) -> int:
  """Returns the bytes on one device of a tree of arrays, abstract or not.

  An array without a sharding counts in full.
  """

  def size(x: jax.Array | jax.ShapeDtypeStruct) -> int:
    shape = x.shape
    if x.sharding is not None:
      shape = x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize

  return sum(map(size, jax.tree.leaves(tree)))
