"""Compiles a program for a target and reads the compiler's report.

Ahead-of-time compilation: https://docs.jax.dev/en/latest/aot.html.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from anysearch_jax.host import captured_stderr, hardware
from anysearch_jax.planning import collectives, flops, targets
from anysearch_jax.planning import program as program_lib
from anysearch_jax.policy.attention import cudnn

_REPLICATED = "Involuntary full rematerialization"
_SIZE = r"\(?([\d.]+)([KMGT]?)\)?"
# Errors of the TPU compiler for a program that exceeds the memory.
_REFUSALS = (
  re.compile(rf"required[^()]*{_SIZE} exceeds available HBM {_SIZE}"),
  re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Compilation:
  """The compiled size and work of one program.

  Attributes:
    traffic: collectives of a call by kind; None if it did not compile.
    arguments, outputs, temporary: bytes on a device; outputs exclude those that
      reuse a donated argument's buffer.
    peak: peak bytes on a device, or those in the compiler's refusal.
    refused: whether the compiler refused the program as too large.
    flops: of a call, over all devices.
    replications: number of arrays that the partitioner had to replicate
      ("involuntary full rematerialization"); None if the compiler does not
      report them (TPU).
    seconds: that compiling took.
  """

  traffic: Mapping[str, collectives.Traffic] | None
  arguments: int
  outputs: int
  temporary: int
  peak: int
  refused: bool
  flops: int = 0
  replications: int | None = None
  seconds: float = 0.0


def compile(
  program: program_lib.Program, target: targets.Target
) -> Compilation:
  """Compiles a program for devices that this machine need not have.

  Args:
    program: its abstract arguments are on devices of `targets.devices`.
    target: the target of those devices.

  Raises:
    jax.errors.JaxRuntimeError: the compiler failed for another reason than
      memory.
  """
  started = time.monotonic()
  platform = target.hardware.platform
  with _lowering(target), tempfile.TemporaryDirectory() as folder:
    traced = program.fn.trace(*program.args, **program.kwargs)
    work = flops.count(traced.jaxpr, segment=program.segment, **program.loops)
    result: jax.stages.Compiled | int
    with captured_stderr.standard_error() as errors:
      lowered = traced.lower(lowering_platforms=(platform,))
      try:
        result = lowered.compile(compiler_options=_options(platform, folder))
      except jax.errors.JaxRuntimeError as error:
        refused = refused_bytes(str(error))
        if refused is None:
          raise
        result = refused
    if isinstance(result, int):
      found = _refusal(program, result)
    else:
      text = _text(result, platform, folder)
      traffic = collectives.count(text, trips=program.trips)
      found = _report(result.memory_analysis(), platform, traffic)
  return dataclasses.replace(
    found,
    flops=work,
    replications=None if platform == "tpu" else errors.text.count(_REPLICATED),
    seconds=time.monotonic() - started,
  )


def _refusal(program: program_lib.Program, needed: int) -> Compilation:
  """Describes a program that the compiler refused as too large."""
  arguments = on_device(program.args)
  return Compilation(
    traffic=None,
    arguments=arguments,
    outputs=0,
    temporary=needed - arguments,
    peak=needed,
    refused=True,
  )


def _report(
  analysis: Any,
  platform: str,
  traffic: Mapping[str, collectives.Traffic],
) -> Compilation:
  """Describes a compiled program by the compiler's memory analysis."""
  return Compilation(
    traffic=traffic,
    arguments=analysis.argument_size_in_bytes,
    outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    temporary=analysis.temp_size_in_bytes,
    peak=_peak(analysis, platform),
    refused=False,
  )


def refused_bytes(message: str) -> int | None:
  """Returns the bytes that a refused program needs; None for other errors."""
  for pattern in _REFUSALS:
    found = pattern.search(message)
    if found:
      return int(float(found[1]) * _UNITS[found[2]])
  return None


def _peak(analysis: Any, platform: str) -> int:
  """Returns the peak bytes; on CPU, XLA's own figure excludes temporaries.

  A CPU's peak does not predict an accelerator's: its matrix products convert
  bfloat16 to float32.
  """
  if platform != "cpu":
    return analysis.peak_memory_in_bytes
  return (
    analysis.argument_size_in_bytes
    + analysis.output_size_in_bytes
    - analysis.alias_size_in_bytes
    + analysis.temp_size_in_bytes
  )


def _lowering(target: targets.Target) -> contextlib.AbstractContextManager:
  if isinstance(target.hardware, hardware.Gpu):
    major, minor = target.hardware.capability
    return cudnn.lowering(major + minor / 10)
  return contextlib.nullcontext()


def _options(platform: str, folder: str) -> dict[str, Any]:
  """Returns the options that each compiler needs without a device.

  CUDA: XLA chooses tiles of Triton products by timing them, and without timing
  some sizes have no tiles. So cuBLAS computes all products, and its workspace
  counts as memory. TPU: the compiler dumps its text, because it is of another
  release than JAX and may write syntax that JAX's parser does not know.
  """
  if platform == "cuda":
    return {"xla_gpu_enable_triton_gemm": False}
  if platform == "tpu":
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
  return {}


def _text(compiled: Any, platform: str, folder: str) -> str:
  if platform != "tpu":
    return compiled.as_text()
  dumps = pathlib.Path(folder).glob("*.after_optimizations.txt")
  # The dump also has small modules; the program's own is the longest.
  return max((path.read_text() for path in dumps), key=len)


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
