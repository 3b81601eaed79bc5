"""Compiles a program for a target and reads the compiler's report.

Ahead-of-time compilation: https://docs.jax.dev/en/latest/aot.html.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import jax

from anysearch_jax.host import captured_stderr, hardware
from anysearch_jax.planning import collectives, flops, memory, targets
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
  arguments = memory.on_device(program.args)
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
