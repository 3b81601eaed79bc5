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


def _card(
  name: str,
  device: str,
  gib: float,
  tflops: float,
  gbytes: float,
  capability: tuple[int, int],
  cores: int,
  clock_ghz: float,
  l2_mib: int,
  pcie: int = 4,
) -> Gpu:
  """Returns a GPU without NVLink; lanes of PCIe send 2 GB/s in version 4."""
  link = 2e9 * 2 ** (pcie - 4) * 16
  return Gpu(
    name=name,
    memory=int(gib * GIB),
    # GeForce cards multiply at half their rate when they add in float32, as
    # XLA has them do.
    flops=tflops * 1e12,
    memory_bandwidth=gbytes * 1e9,
    link_bandwidth=link,
    network_bandwidth=12.5e9,
    host_bandwidth=link,
    source=(
      f"NVIDIA's data sheet or white paper of the {device}: {tflops:g} TFLOP/s "
      f"dense with float32 accumulation, {gbytes:,g} GB/s, PCIe {pcie}.0 x16 "
      "without NVLink; 100 Gb/s network assumed"
    ),
    capability=capability,
    description=f"NVIDIA {device}",
    cores=cores,
    clock_ghz=clock_ghz,
    shared_memory=100 * 1024,
    l2=l2_mib * 2**20,
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
  # GiB, TFLOP/s, GB/s, capability, multiprocessors, GHz, MiB of L2, PCIe.
  _card("rtx3090", "GeForce RTX 3090", 23.6, 71, 936, (8, 6), 82, 1.695, 6),
  _card(
    "rtx4090", "GeForce RTX 4090", 23.6, 165.2, 1008, (8, 9), 128, 2.52, 72
  ),
  _card(
    "rtx5090", "GeForce RTX 5090", 31.3, 209.5, 1792, (12, 0), 170, 2.407, 96, 5
  ),
  _card("a10g", "A10G", 22.0, 70, 600, (8, 6), 80, 1.71, 6),
  _card("l4", "L4", 22.0, 121, 300, (8, 9), 58, 2.04, 48),
  _card("l40s", "L40S", 44.3, 362, 864, (8, 9), 142, 2.52, 96),
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
