"""Accelerators by name, with the numbers of their data sheets.

Peaks are of dense bfloat16 matrix products. Bandwidths of links count one
direction. The memory of a GPU is what CUDA reports, that of a TPU is what its
compiler leaves to programs.
"""

from __future__ import annotations

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
  """One kind of device.

  platform: JAX's name of the platform.
  memory: bytes.
  head_room: share of the memory that programs may use.
  flops: operations per second.
  memory_bandwidth: bytes per second.
  link_bandwidth: bytes per second between the devices of a host or slice.
  network_bandwidth: bytes per second between hosts; a TPU slice is one host.
  host_bandwidth: bytes per second between a device and its host's memory.
  source: where the numbers are from.
  """

  name: str
  platform: str
  memory: int
  head_room: float
  flops: float
  memory_bandwidth: float
  link_bandwidth: float
  network_bandwidth: float = 0.0
  host_bandwidth: float
  source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu(Hardware):
  """A GPU.

  capability: CUDA compute capability.

  The other values describe the chip to XLA's compiler: description (its name),
  cores (multiprocessors), units_a_core (FP32 units of one), clock_ghz,
  shared_memory (bytes of a multiprocessor, of which a thread block can have all
  but 1 KiB) and l2 (bytes).
  """

  platform: str = "cuda"
  head_room: float = 0.92
  capability: tuple[int, int]
  description: str
  cores: int
  units_a_core: int = 128
  clock_ghz: float
  shared_memory: int
  l2: int
  threads_a_core: int = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu(Hardware):
  """A TPU.

  dimensions: of its torus.
  shapes: examples of slices that exist.
  """

  platform: str = "tpu"
  head_room: float = 1.0
  # No data sheet says it; PCIe 3.0 x16 is assumed.
  host_bandwidth: float = 16e9
  dimensions: int = 2
  shapes: tuple[str, ...] = ("1x1", "2x2", "2x4", "4x4")


_H100 = Gpu(
  name="h100",
  memory=int(79.1 * GIB),
  flops=989.4e12,
  memory_bandwidth=3.35e12,
  link_bandwidth=450e9,
  network_bandwidth=50e9,
  host_bandwidth=64e9,
  source=(
    "NVIDIA H100 80GB SXM data sheet: 989.4 TFLOP/s dense, 3.35 TB/s, "
    "NVLink 900 GB/s both ways; 400 Gb/s network a GPU"
  ),
  capability=(9, 0),
  description="NVIDIA H100 80GB HBM3",
  cores=132,
  clock_ghz=1.98,
  shared_memory=228 * 1024,
  l2=50 * 2**20,
)
_PCIE4 = "PCIe 4.0 x16 without NVLink; 100 Gb/s network assumed"
_RTX4090 = Gpu(
  name="rtx4090",
  memory=int(23.6 * GIB),
  # GeForce cards multiply at half their rate when they add in float32, as
  # XLA has them do.
  flops=165.2e12,
  memory_bandwidth=1.008e12,
  link_bandwidth=32e9,
  network_bandwidth=12.5e9,
  host_bandwidth=32e9,
  source=(
    "NVIDIA Ada GPU architecture white paper, GeForce RTX 4090: 165.2 TFLOP/s "
    f"dense with float32 accumulation, 1,008 GB/s, {_PCIE4}"
  ),
  capability=(8, 9),
  description="NVIDIA GeForce RTX 4090",
  cores=128,
  clock_ghz=2.52,
  shared_memory=100 * 1024,
  l2=72 * 2**20,
  threads_a_core=1536,
)
_ALL: tuple[Hardware, ...] = (
  _H100,
  dataclasses.replace(
    _H100,
    name="h800",
    link_bandwidth=200e9,
    source=(
      "NVIDIA H800 SXM data sheet: an H100 with NVLink 400 GB/s both ways"
    ),
  ),
  dataclasses.replace(
    _H100,
    name="h200",
    memory=int(139.8 * GIB),
    memory_bandwidth=4.8e12,
    description="NVIDIA H200",
    source=(
      "NVIDIA H200 141GB SXM data sheet: 989.4 TFLOP/s dense, 4.8 TB/s, "
      "NVLink 900 GB/s both ways; 400 Gb/s network a GPU"
    ),
  ),
  Gpu(
    name="a100",
    memory=int(79.25 * GIB),
    flops=312e12,
    memory_bandwidth=2.039e12,
    link_bandwidth=300e9,
    network_bandwidth=25e9,
    host_bandwidth=32e9,
    source=(
      "NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s, 2,039 GB/s, NVLink 600 "
      "GB/s both ways; 200 Gb/s network a GPU"
    ),
    capability=(8, 0),
    description="NVIDIA A100-SXM4-80GB",
    cores=108,
    units_a_core=64,
    clock_ghz=1.41,
    shared_memory=164 * 1024,
    l2=40 * 2**20,
  ),
  dataclasses.replace(
    _H100,
    name="b200",
    memory=int(178.3 * GIB),
    flops=2250e12,
    memory_bandwidth=8e12,
    link_bandwidth=900e9,
    source=(
      "NVIDIA HGX and DGX B200 data sheets, an eighth of eight GPUs: 2,250 "
      "TFLOP/s dense, 180 GB at 8 TB/s, NVLink 1,800 GB/s both ways; 400 Gb/s "
      "network a GPU"
    ),
    capability=(10, 0),
    description="NVIDIA B200",
    cores=148,
    clock_ghz=1.965,
    l2=126 * 2**20,
  ),
  _RTX4090,
  dataclasses.replace(
    _RTX4090,
    name="rtx3090",
    flops=71e12,
    memory_bandwidth=936e9,
    source=(
      "NVIDIA Ampere GA102 GPU architecture white paper, GeForce RTX 3090: 71 "
      f"TFLOP/s dense with float32 accumulation, 936 GB/s, {_PCIE4}"
    ),
    capability=(8, 6),
    description="NVIDIA GeForce RTX 3090",
    cores=82,
    clock_ghz=1.695,
    l2=6 * 2**20,
  ),
  dataclasses.replace(
    _RTX4090,
    name="rtx5090",
    memory=int(31.3 * GIB),
    flops=209.5e12,
    memory_bandwidth=1.792e12,
    link_bandwidth=64e9,
    host_bandwidth=64e9,
    source=(
      "NVIDIA RTX Blackwell GPU architecture white paper, GeForce RTX 5090: "
      "209.5 TFLOP/s dense with float32 accumulation, 1,792 GB/s, PCIe 5.0 x16 "
      "without NVLink; 100 Gb/s network assumed"
    ),
    capability=(12, 0),
    description="NVIDIA GeForce RTX 5090",
    cores=170,
    clock_ghz=2.407,
    l2=96 * 2**20,
  ),
  dataclasses.replace(
    _RTX4090,
    name="a10g",
    memory=int(22.0 * GIB),
    flops=70e12,
    memory_bandwidth=600e9,
    source=f"NVIDIA A10G data sheet: 70 TFLOP/s dense, 600 GB/s, {_PCIE4}",
    capability=(8, 6),
    description="NVIDIA A10G",
    cores=80,
    clock_ghz=1.71,
    l2=6 * 2**20,
  ),
  dataclasses.replace(
    _RTX4090,
    name="l4",
    memory=int(22.0 * GIB),
    flops=121e12,
    memory_bandwidth=300e9,
    source=f"NVIDIA L4 data sheet: 121 TFLOP/s dense, 300 GB/s, {_PCIE4}",
    description="NVIDIA L4",
    cores=58,
    clock_ghz=2.04,
    l2=48 * 2**20,
  ),
  dataclasses.replace(
    _RTX4090,
    name="l40s",
    memory=int(44.3 * GIB),
    flops=362e12,
    memory_bandwidth=864e9,
    source=f"NVIDIA L40S data sheet: 362 TFLOP/s dense, 864 GB/s, {_PCIE4}",
    description="NVIDIA L40S",
    cores=142,
    l2=96 * 2**20,
  ),
  Tpu(
    name="v5e",
    memory=int(15.75 * GIB),
    flops=197e12,
    memory_bandwidth=819e9,
    link_bandwidth=100e9,
    source=(
      "Google Cloud TPU v5e page: 197 TFLOP/s, 819 GB/s, 1,600 Gb/s over "
      "four links, of which a ring takes two"
    ),
  ),
  Tpu(
    name="v5p",
    memory=int(95.73 * GIB),
    flops=459e12,
    memory_bandwidth=2.765e12,
    link_bandwidth=200e9,
    dimensions=3,
    shapes=("1x1x1", "2x2x1", "2x2x2", "2x4x4"),
    source=(
      "Google Cloud TPU v5p page: 459 TFLOP/s, 2,765 GB/s, 1,200 GB/s both "
      "ways over six links, of which a ring takes two"
    ),
  ),
  Tpu(
    name="v6e",
    memory=int(31.24 * GIB),
    flops=918e12,
    memory_bandwidth=1.6e12,
    link_bandwidth=200e9,
    source=(
      "Google Cloud TPU v6e page: 918 TFLOP/s, 1,600 GB/s, 3,200 Gb/s over "
      "four links, of which a ring takes two"
    ),
  ),
)

HARDWARE = {hardware.name: hardware for hardware in _ALL}
# `jax.Device.device_kind` -> name in `HARDWARE`.
_KINDS = {
  **{gpu.description: gpu.name for gpu in _ALL if isinstance(gpu, Gpu)},
  "NVIDIA A100-SXM4-40GB": "a100",
  "NVIDIA H100 80GB HBM3": "h100",
  "NVIDIA H800": "h800",
  "TPU v5 lite": "v5e",
  "TPU v5": "v5p",
  "TPU v5p": "v5p",
  "TPU v6 lite": "v6e",
}


def of_kind(kind: str) -> Hardware | None:
  """Returns the hardware of a `jax.Device.device_kind`, None if unknown."""
  return HARDWARE[_KINDS[kind]] if kind in _KINDS else None
