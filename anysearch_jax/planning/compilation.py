"""Compiles a program for a target and measures it by the compiler's report.

Ahead-of-time compilation: https://docs.jax.dev/en/latest/aot.html.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from anysearch_jax.host import captured_stderr, hardware
from anysearch_jax.planning import collectives, flops, targets
from anysearch_jax.planning import programs as programs_lib
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
class Part:
  """A measured program of a plan; bytes are those of one device.

  Attributes:
    name: of the program.
    devices: number of devices.
    tokens: that a call processes.
    read: bytes that a call reads from memory at least.
    kinds: bytes of its arguments by kind.
    held: bytes that other programs keep meanwhile, by kind.
    offloaded: bytes of other programs that are in host memory meanwhile.
    arguments, temporary: bytes, by the compiler.
    peak: peak bytes, or those in the compiler's refusal.
    traffic: collectives of a call by kind; None if the compiler refused the
      program as too large.
    predicted: seconds of a call; None if the compiler refused it.
    flops: of a call, over all devices.
    replications: number of arrays that the partitioner had to replicate
      ("involuntary full rematerialization"); None if the compiler does not
      report them (TPU).
  """

  name: str
  devices: int
  tokens: int
  read: int
  kinds: Mapping[str, int]
  held: Mapping[str, int]
  arguments: int
  temporary: int
  peak: int
  traffic: Mapping[str, collectives.Traffic] | None
  predicted: targets.Prediction | None
  offloaded: int = 0
  flops: int = 0
  replications: int | None = None

  @property
  def trains(self) -> bool:
    return "moments" in self.kinds

  @property
  def gradients(self) -> int:
    """Bytes of gradients: one buffer, of the size of the trained parameters."""
    if not self.trains:
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

  @property
  def tokens_per_second(self) -> float | None:
    """Predicted tokens a second; None for a program without tokens."""
    if not self.predicted or not self.tokens:
      return None
    return self.tokens / self.predicted.total

  def fits(self, target: targets.Target) -> bool:
    return self.traffic is not None and self.total <= target.capacity


def compiled(
  program: programs_lib.Program, target: targets.Target
) -> tuple[Any, str, Any, int | None, str]:
  """Compiles a program for devices that this machine need not have.

  Returns:
    The jaxpr, the optimized HLO, the analysis of its memory, the bytes that a
    refused program needs (which has neither), and what the compiler wrote to
    standard error.
  """
  platform = target.hardware.platform
  lowering: contextlib.AbstractContextManager = contextlib.nullcontext()
  if isinstance(target.hardware, hardware.Gpu):
    major, minor = target.hardware.capability
    lowering = cudnn.lowering(major + minor / 10)
  text, analysis, needed = "", None, None
  with (
    lowering,
    jax.sharding.use_abstract_mesh(_mesh(program)),
    tempfile.TemporaryDirectory() as folder,
  ):
    traced = program.fn.trace(*program.args, **program.kwargs)
    with captured_stderr.standard_error() as errors:
      lowered = traced.lower(lowering_platforms=(platform,))
      try:
        found = lowered.compile(compiler_options=_options(platform, folder))
      except jax.errors.JaxRuntimeError as error:
        needed = refused_bytes(str(error))
        if needed is None:
          raise
    if needed is None:
      analysis = found.memory_analysis()
      if platform != "tpu":
        text = found.as_text() or ""
      else:
        # The dump also has small modules; the program's own is the longest.
        dumps = pathlib.Path(folder).glob("*.after_optimizations.txt")
        text = max((path.read_text() for path in dumps), key=len)
  return traced.jaxpr, text, analysis, needed, errors.getvalue()


def _mesh(program: programs_lib.Program) -> jax.sharding.AbstractMesh:
  """Returns the mesh of a program, which names its devices to kernels.

  Pallas asks it, or else a device of this machine, for what it lowers to.
  """
  return next(
    x.sharding.mesh.abstract_mesh
    for x in jax.tree.leaves(program.args)
    if isinstance(x.sharding, jax.NamedSharding)
  )


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


def refused_bytes(message: str) -> int | None:
  """Returns the bytes that a refused program needs; None for other errors."""
  for pattern in _REFUSALS:
    found = pattern.search(message)
    if found:
      return int(float(found[1]) * _UNITS[found[2]])
  return None


def measure(
  program: programs_lib.Program,
  together: Sequence[programs_lib.Program],
  target: targets.Target,
) -> Part:
  """Compiles and measures a program; `together` are all programs of the run.

  Raises:
    jax.errors.JaxRuntimeError: the compiler failed for another reason than
      memory.
  """
  jaxpr, text, analysis, needed, errors = compiled(program, target)
  platform, count = target.hardware.platform, len(devices(program))
  work = flops.count(jaxpr, segment=program.segment, **program.loops)
  reads = program.args if program.reads is None else program.reads
  read = program.trips * on_device(reads)
  traffic = predicted = None
  if needed is not None:
    peak, arguments = needed, on_device(program.args)
    temporary = peak - arguments
  else:
    traffic = collectives.count(text, trips=program.trips)
    predicted = targets.predict(
      target, flops=work / count, read=read, traffic=traffic
    )
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
    devices=count,
    tokens=program.tokens,
    read=read,
    kinds=kinds(program),
    held=held(program, together),
    offloaded=offloaded(program, together),
    arguments=arguments,
    temporary=temporary,
    peak=peak,
    traffic=traffic,
    predicted=predicted,
    flops=work,
    replications=(None if platform == "tpu" else errors.count(_REPLICATED)),
  )


def hand_over(
  together: Sequence[programs_lib.Program],
  target: targets.Target,
  *,
  itemsize: int,
  adapters: bool,
) -> Part:
  """Measures a hand-over of new weights to the engine by its arrays.

  It is a program for each layer, so there is none to compile for the whole. The
  trainer publishes a cast copy; the engine drops its old weights before it
  makes new ones of that copy. Of the programs of the run, `together`, training
  is first and decode is last; `itemsize` is that of the compute type, and with
  `adapters` only these are trained.
  """
  trained, sampled = together[0], together[-1]
  program = programs_lib.Program(
    "hand-over",
    None,
    (),
    {},
    tokens=0,
    trips=1,
    kinds={"engine weights": sampled.kinds["engine weights"]},
    # Still that of training: the state is on the device.
    freed=trained.freed,
  )
  masters = kinds(trained)["masters"]
  weights = kinds(sampled)["engine weights"]
  cast = 0 if itemsize == 4 else masters * itemsize // 4
  if not devices(trained) & devices(sampled):
    cast, masters = weights, 0
  frozen = weights if adapters else 0
  moved = masters + 2 * cast + frozen + weights
  return Part(
    name=program.name,
    devices=len(devices(program)),
    tokens=0,
    read=moved,
    kinds=kinds(program),
    held=held(program, together),
    arguments=weights,
    temporary=cast,
    peak=cast + weights,
    traffic={},
    predicted=targets.predict(target, flops=0, read=moved, traffic={}),
  )


def kinds(program: programs_lib.Program) -> dict[str, int]:
  """Returns the bytes on a device of each non-empty kind of a program."""
  found = {name: on_device(tree) for name, tree in program.kinds.items()}
  return {name: size for name, size in found.items() if size}


def held(
  program: programs_lib.Program, together: Iterable[programs_lib.Program]
) -> dict[str, int]:
  """Returns the bytes, by kind, that other programs keep on a device meanwhile.

  Kinds that the program itself has are excluded: they are the same arrays. So
  are those that are freed or in host memory while it runs.
  """
  away = program.freed | program.offloaded
  others = _others(program, together)
  return {name: size for name, size in others.items() if name not in away}


def offloaded(
  program: programs_lib.Program, together: Iterable[programs_lib.Program]
) -> int:
  """Returns a device's bytes that are in host memory while a program runs."""
  others = _others(program, together)
  return sum(others.get(name, 0) for name in program.offloaded)


def _others(
  program: programs_lib.Program, together: Iterable[programs_lib.Program]
) -> dict[str, int]:
  """Returns the bytes on a device, by kind, that only other programs have."""
  own, where = kinds(program), devices(program)
  out: dict[str, int] = {}
  for other in together:
    if not where & devices(other):
      continue
    for name, size in kinds(other).items():
      if name != programs_lib.BATCH and name not in own:
        out[name] = max(size, out.get(name, 0))
  return out


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
    cut = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(cut) * x.dtype.itemsize

  return sum(map(size, jax.tree.leaves(tree)))
