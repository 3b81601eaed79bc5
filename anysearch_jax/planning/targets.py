"""Accelerators by name, and compile-only devices of them.

Nothing here needs the hardware: XLA compiles for a description of it. Peaks are
dense bfloat16 products; links count one direction; a GPU's memory is what CUDA
reports of it, a TPU's what its compiler leaves to programs.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
from collections.abc import Sequence

import jax

GIB = 2**30
INSTALL = "pip install -r requirements-plan.txt"
# GPUs of one host, beyond which collectives take the network.
_GPUS_A_HOST = 8


@dataclasses.dataclass(frozen=True)
class Hardware:
  """One kind of device.

  platform: what JAX lowers for. memory: bytes. head_room: the share of it that
    programs may fill. flops: a second. memory_bandwidth, link_bandwidth,
    network_bandwidth: bytes a second, the latter between hosts. source: where
    the numbers are from.
  """

  name: str
  platform: str
  memory: int
  head_room: float
  flops: float
  memory_bandwidth: float
  link_bandwidth: float
  network_bandwidth: float
  source: str


@dataclasses.dataclass(frozen=True)
class Gpu(Hardware):
  """capability: CUDA's. The rest describes the die to the compiler."""

  capability: tuple[int, int]
  description: str
  cores: int
  units_a_core: int
  clock_ghz: float
  shared_memory: int
  shared_memory_block: int
  l2: int


@dataclasses.dataclass(frozen=True)
class Tpu(Hardware):
  """dimensions: of its torus. shapes: some slices that exist."""

  dimensions: int
  shapes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Target:
  """Some devices of one kind; shape is a slice's, or a count of GPUs."""

  hardware: Hardware
  shape: tuple[int, ...]

  @property
  def count(self) -> int:
    return math.prod(self.shape)

  @property
  def hosts(self) -> int:
    """Hosts that have links of their own; a slice of TPUs is as one."""
    if isinstance(self.hardware, Tpu):
      return 1
    return -(-self.count // _GPUS_A_HOST)

  @property
  def capacity(self) -> int:
    """Bytes that programs may fill on a device."""
    return int(self.hardware.head_room * self.hardware.memory)

  @property
  def link_bandwidth(self) -> float:
    """Bytes a second that a device sends its neighbours."""
    slow = self.hosts > 1
    return (
      self.hardware.network_bandwidth if slow else self.hardware.link_bandwidth
    )

  def __str__(self) -> str:
    return f"{self.hardware.name}:{'x'.join(map(str, self.shape))}"


def _hopper(
  name: str,
  *,
  memory: float,
  bandwidth: float,
  link: float,
  description: str,
  source: str,
) -> Gpu:
  return Gpu(
    name=name,
    platform="cuda",
    memory=int(memory * GIB),
    head_room=0.92,
    flops=989.4e12,
    memory_bandwidth=bandwidth,
    link_bandwidth=link,
    network_bandwidth=50e9,
    source=source,
    capability=(9, 0),
    description=description,
    cores=132,
    units_a_core=128,
    clock_ghz=1.98,
    shared_memory=228 * 1024,
    shared_memory_block=227 * 1024,
    l2=50 * 2**20,
  )


_A100 = Gpu(
  name="a100",
  platform="cuda",
  memory=int(79.25 * GIB),
  head_room=0.92,
  flops=312e12,
  memory_bandwidth=2.039e12,
  link_bandwidth=300e9,
  network_bandwidth=25e9,
  source=(
    "NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s, 2,039 GB/s, NVLink 600 GB/s "
    "both ways; 200 Gb/s network a GPU"
  ),
  capability=(8, 0),
  description="NVIDIA A100-SXM4-80GB",
  cores=108,
  units_a_core=64,
  clock_ghz=1.41,
  shared_memory=164 * 1024,
  shared_memory_block=163 * 1024,
  l2=40 * 2**20,
)


def _tpu(
  name: str,
  *,
  memory: float,
  flops: float,
  bandwidth: float,
  link: float,
  dimensions: int,
  shapes: Sequence[str],
  source: str,
) -> Tpu:
  return Tpu(
    name=name,
    platform="tpu",
    memory=int(memory * GIB),
    head_room=1.0,
    flops=flops,
    memory_bandwidth=bandwidth,
    link_bandwidth=link,
    network_bandwidth=link,
    source=source,
    dimensions=dimensions,
    shapes=tuple(shapes),
  )


HARDWARE: dict[str, Hardware] = {
  h.name: h
  for h in (
    _hopper(
      "h100",
      memory=79.1,
      bandwidth=3.35e12,
      link=450e9,
      description="NVIDIA H100 80GB HBM3",
      source=(
        "NVIDIA H100 80GB SXM data sheet: 989.4 TFLOP/s dense, 3.35 TB/s, "
        "NVLink 900 GB/s both ways; 400 Gb/s network a GPU"
      ),
    ),
    _hopper(
      "h800",
      memory=79.1,
      bandwidth=3.35e12,
      link=200e9,
      description="NVIDIA H100 80GB HBM3",
      source=(
        "NVIDIA H800 SXM data sheet: an H100 with NVLink 400 GB/s both ways"
      ),
    ),
    _hopper(
      "h200",
      memory=139.8,
      bandwidth=4.8e12,
      link=450e9,
      description="NVIDIA H200",
      source=(
        "NVIDIA H200 141GB SXM data sheet: 989.4 TFLOP/s dense, 4.8 TB/s, "
        "NVLink 900 GB/s both ways; 400 Gb/s network a GPU"
      ),
    ),
    _A100,
    _tpu(
      "v5e",
      memory=15.75,
      flops=197e12,
      bandwidth=819e9,
      link=100e9,
      dimensions=2,
      shapes=("1x1", "2x2", "2x4", "4x4"),
      source=(
        "Google Cloud TPU v5e page: 197 TFLOP/s, 819 GB/s, 1,600 Gb/s over "
        "four links, of which a ring takes two"
      ),
    ),
    _tpu(
      "v5p",
      memory=95.73,
      flops=459e12,
      bandwidth=2.765e12,
      link=200e9,
      dimensions=3,
      shapes=("1x1x1", "2x2x1", "2x2x2", "2x4x4"),
      source=(
        "Google Cloud TPU v5p page: 459 TFLOP/s, 2,765 GB/s, 1,200 GB/s both "
        "ways over six links, of which a ring takes two"
      ),
    ),
    _tpu(
      "v6e",
      memory=31.24,
      flops=918e12,
      bandwidth=1.6e12,
      link=200e9,
      dimensions=2,
      shapes=("1x1", "2x2", "2x4", "4x4"),
      source=(
        "Google Cloud TPU v6e page: 918 TFLOP/s, 1,600 GB/s, 3,200 Gb/s over "
        "four links, of which a ring takes two"
      ),
    ),
  )
}


def parse(text: str) -> Target:
  """`h100:4`, or a TPU with its slice's shape, as `v5p:2x2x1`.

  Raises:
    ValueError: a name or a shape that there is not.
  """
  name, _, shape = text.strip().lower().partition(":")
  if name not in HARDWARE:
    raise ValueError(
      f"target: found {text!r}, expected one of {', '.join(HARDWARE)}, a colon "
      "and how many, as in h100:4 or v5p:2x2x1."
    )
  hardware = HARDWARE[name]
  sizes = tuple(int(n) if n.isdecimal() else 0 for n in shape.split("x"))
  if isinstance(hardware, Tpu):
    if len(sizes) != hardware.dimensions or not all(sizes):
      known = ", ".join(f"{name}:{s}" for s in hardware.shapes)
      raise ValueError(
        f"target: found {text!r}, expected the shape of a slice in "
        f"{hardware.dimensions} dimensions, for example {known}."
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
  """Compile-only devices; they hold no arrays and run nothing.

  Raises:
    ValueError: a slice that the TPU compiler does not know.
    ModuleNotFoundError: an optional package is missing; says how to install it.
  """
  hardware = target.hardware
  _require(hardware)
  # Loads the compilers, which not every run of the library needs.
  from jax.experimental import topologies

  if isinstance(hardware, Gpu):
    hosts = target.hosts
    try:
      return topologies.get_topology_desc(
        platform=hardware.platform,
        target_config=target_config(hardware),
        topology=f"1x{hosts}x{target.count // hosts}",
      ).devices
    except NotImplementedError as error:
      raise ValueError(
        "JAX did not load its CUDA plug-in, which wants a driver unless "
        "JAX_PLATFORMS=cpu is set before JAX starts; set it."
      ) from error
  # Its library wants a TPU for itself, and there is none that could be taken.
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  try:
    return topologies.get_topology_desc(
      platform=hardware.platform, topology_name=str(target)
    ).devices
  except jax.errors.JaxRuntimeError as error:
    shapes = ", ".join(f"{hardware.name}:{s}" for s in hardware.shapes)
    raise ValueError(
      f"target: {target} is no slice that its compiler knows ({error}); try "
      f"one of {shapes}."
    ) from error


def target_config(gpu: Gpu) -> str:
  """The GPU as XLA's GpuTargetConfigProto, in text."""
  major, minor = gpu.capability
  feature = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
  return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {gpu.units_a_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(gpu.memory_bandwidth)}
  l2_cache_size: {gpu.l2}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  shared_memory_per_block_optin: {gpu.shared_memory_block}
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


def _require(hardware: Hardware) -> None:
  """Raises where no package that compiles for it is installed."""
  if isinstance(hardware, Gpu):
    # Either CUDA generation of the plug-in compiles for all of these.
    alternatives = (
      ("jax-cuda12-plugin", "jax-cuda13-plugin"),
      ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc"),
    )
  else:
    alternatives = (("libtpu",),)
  for names in alternatives:
    if not any(map(_installed, names)):
      raise ModuleNotFoundError(
        f"Planning for {hardware.name} needs the package {names[0]}, which is "
        f"not installed; {INSTALL}"
      )


def _installed(name: str) -> bool:
  try:
    importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return False
  return True
