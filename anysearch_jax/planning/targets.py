"""Targets to plan for, and compile-only stand-ins for their devices.

The hardware need not be present: XLA compiles for a description of it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
from typing import Any, NamedTuple

import jax

from anysearch_jax.host import hardware as hardware_lib
from anysearch_jax.training import throughput

# GPUs of one host; with more, collectives use the network.
_GPUS_A_HOST = 8


@dataclasses.dataclass(frozen=True)
class Target:
  """Devices of one kind; `shape` is that of a TPU slice, or (GPUs,)."""

  hardware: hardware_lib.Hardware
  shape: tuple[int, ...]

  @property
  def count(self) -> int:
    return math.prod(self.shape)

  @property
  def hosts(self) -> int:
    """Number of hosts that the network connects; a TPU slice counts as one."""
    if isinstance(self.hardware, hardware_lib.Tpu):
      return 1
    return -(-self.count // _GPUS_A_HOST)

  @property
  def capacity(self) -> int:
    """Bytes that programs may fill on a device."""
    return int(self.hardware.head_room * self.hardware.memory)

  def __str__(self) -> str:
    return f"{self.hardware.name}:{'x'.join(map(str, self.shape))}"


def parse(text: str) -> Target:
  """Parses a target such as `h100:4`, or a TPU slice such as `v5p:2x2x1`.

  Raises:
    ValueError: the name or the shape is unknown.
  """
  name, _, shape = text.strip().lower().partition(":")
  if name not in hardware_lib.HARDWARE:
    names = ", ".join(hardware_lib.HARDWARE)
    raise ValueError(
      f"target: found {text!r}, expected one of {names}, a colon and how many, "
      "as in h100:4 or v5p:2x2x1."
    )
  hardware = hardware_lib.HARDWARE[name]
  sizes = tuple(int(n) if n.isdecimal() else 0 for n in shape.split("x"))
  if isinstance(hardware, hardware_lib.Tpu):
    if len(sizes) != hardware.dimensions or not all(sizes):
      raise ValueError(
        f"target: found {text!r}, expected the shape of a slice in "
        f"{hardware.dimensions} dimensions, for example "
        f"{_known_slices(hardware)}."
      )
  elif len(sizes) != 1 or not all(sizes):
    raise ValueError(
      f"target: found {text!r}, expected a count of GPUs, as in {name}:4."
    )
  elif sizes[0] > _GPUS_A_HOST and sizes[0] % _GPUS_A_HOST:
    raise ValueError(
      f"target: found {sizes[0]} GPUs, expected at most {_GPUS_A_HOST} (one "
      f"host) or a multiple of {_GPUS_A_HOST}."
    )
  return Target(hardware, sizes)


def devices(target: Target) -> list[jax.Device]:
  """Returns compile-only devices, which cannot hold arrays or run programs.

  Raises:
    ValueError: the TPU compiler does not know the slice, or JAX did not load
      its CUDA plug-in.
    ModuleNotFoundError: an optional package is missing; says how to install it.
  """
  # Imported here because it loads the compilers, which only plans need.
  from jax.experimental import topologies

  hardware = target.hardware
  _require(hardware)
  options: dict[str, Any] = {"platform": hardware.platform}
  if isinstance(hardware, hardware_lib.Gpu):
    options["target_config"] = target_config(hardware)
    options["topology"] = f"1x{target.hosts}x{target.count // target.hosts}"
  else:
    # libtpu refuses a second process, to protect a TPU; here it uses none.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    options["topology_name"] = str(target)
    # The compiler takes a host to have four chips. A single chip is its own
    # host.
    if target.count == 1:
      options["chips_per_host_bounds"] = (1, 1, 1)
  try:
    return topologies.get_topology_desc(**options).devices
  except NotImplementedError as error:
    raise ValueError(
      "JAX did not load its CUDA plug-in, which wants a driver unless "
      "JAX_PLATFORMS=cpu is set before JAX starts; set it."
    ) from error
  except jax.errors.JaxRuntimeError as error:
    if hardware.platform != "tpu":
      raise
    raise ValueError(
      f"target: {target} is no slice that its compiler knows ({error}); try "
      f"one of {_known_slices(hardware)}."
    ) from error


def _known_slices(hardware: hardware_lib.Hardware) -> str:
  """Returns examples of slices."""
  shapes = hardware.shapes if isinstance(hardware, hardware_lib.Tpu) else ()
  return ", ".join(f"{hardware.name}:{shape}" for shape in shapes)


def target_config(gpu: hardware_lib.Gpu) -> str:
  """Returns the GPU as XLA's GpuTargetConfigProto in text format."""
  major, minor = gpu.capability
  feature = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
  return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory}
  threads_per_core_limit: {gpu.threads_a_core}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.units_a_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(gpu.memory_bandwidth)}
  l2_cache_size: {gpu.l2}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  shared_memory_per_block_optin: {gpu.shared_memory - 1024}
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: {feature}
  }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 2 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{gpu.description}"
"""


def _require(hardware: hardware_lib.Hardware) -> None:
  """Raises ModuleNotFoundError if a package to compile for it is missing."""
  alternatives: tuple[tuple[str, ...], ...] = (("libtpu",),)
  if isinstance(hardware, hardware_lib.Gpu):
    # The plug-in of either CUDA version compiles for all supported GPUs.
    alternatives = (
      ("jax-cuda12-plugin", "jax-cuda13-plugin"),
      ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc"),
    )
  for names in alternatives:
    if not any(map(_installed, names)):
      raise ModuleNotFoundError(
        f"Planning for {hardware.name} needs the package {names[0]}, which is "
        "not installed; pip install -e '.[plan]' in a checkout."
      )


def _installed(name: str) -> bool:
  return any(importlib.metadata.distributions(name=name))


class Efficiency(NamedTuple):
  """How much of a device's peaks programs reach.

  Attributes:
    products: share of the peak that products with weights reach, in (0, 1].
    attention: the same of attention; its backward pass computes the scores
      again, which is not counted.
    memory: share of the memory's bandwidth, in (0, 1].
    passes: how often each number that products read and write goes through
      memory outside of them: in norms, activations, casts and residuals.
  """

  products: float
  attention: float
  memory: float
  passes: float


# `python -m bench.published` fits attention and passes to published steps, of
# MaxText and of prime-rl; products and memory are what their kernels reach
# alone.
MAXTEXT = Efficiency(products=0.7, attention=0.75, memory=0.8, passes=4.7)
PRIME_RL = Efficiency(products=0.7, attention=0.75, memory=0.8, passes=16.5)
# A trainer in JAX as this one; how fast it really is, no GPU has measured yet.
ASSUMED = MAXTEXT


def seconds(
  hardware: hardware_lib.Hardware,
  operations: throughput.Operations,
  *,
  read: float = 0,
  itemsize: int = 2,
  efficiency: Efficiency = ASSUMED,
) -> float:
  """Returns the seconds of some work on one device.

  Args:
    hardware: the device.
    operations: what it computes.
    read: bytes of weights and caches that it reads from memory meanwhile.
    itemsize: bytes of an activation.
    efficiency: assumed shares of the peaks; at `Efficiency(1, 1, 1, 0)` no
      program with the same work is faster.
  """
  bandwidth = efficiency.memory * hardware.memory_bandwidth
  products = operations.products / (efficiency.products * hardware.flops)
  attention = operations.attention / (efficiency.attention * hardware.flops)
  moved = efficiency.passes * operations.activations * itemsize / bandwidth
  return max(products + attention + moved, read / bandwidth)


def sentences(target: Target) -> list[str]:
  """Returns sentences that state what a prediction assumes of a target."""
  hardware = target.hardware
  efficiency = ASSUMED
  return [
    f"{hardware.source}.",
    f"Products with weights run at {efficiency.products:.0%} of "
    f"{hardware.flops / 1e12:.0f} TFLOP/s a device, attention at "
    f"{efficiency.attention:.0%}. What products read and write goes through "
    f"memory {efficiency.passes} times more, at {efficiency.memory:.0%} of "
    f"{hardware.memory_bandwidth / 1e9:.0f} GB/s. Weights and caches are read "
    "meanwhile, and collectives take no time.",
  ]
