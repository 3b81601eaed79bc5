"""Accelerators by name, with the numbers of their data sheets.

Peaks are of dense bfloat16 matrix products. The memory of a GPU is what CUDA
reports, that of a TPU is what its compiler leaves to programs.
"""

from __future__ import annotations

import dataclasses
import functools

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
  """One kind of device.

  name: its key in `HARDWARE`.
  platform: JAX's name of the platform.
  memory: bytes.
  head_room: share of the memory that programs may use, in (0, 1].
  flops: dense bfloat16 operations per second.
  memory_bandwidth: bytes per second.
  host_bandwidth: bytes per second between a device and its host's memory.
  source: origin of the numbers.
  """

  name: str
  platform: str
  memory: int
  head_room: float
  flops: float
  memory_bandwidth: float
  host_bandwidth: float
  source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu(Hardware):
  """A GPU.

  capability: CUDA compute capability.

  The other values describe the chip to XLA's compiler:

  description: its name.
  cores: number of multiprocessors.
  units_a_core: FP32 units of a multiprocessor.
  clock_ghz: boost clock.
  shared_memory: bytes of a multiprocessor, of which a thread block can have all
    but 1 KiB.
  l2: bytes of the L2 cache.
  threads_a_core: resident threads of a multiprocessor.
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

  dimensions: dimensions of the torus that connects the chips.
  shapes: examples of slices that exist.
  """

  platform: str = "tpu"
  head_room: float = 1.0
  # No data sheet says it; PCIe 3.0 x16 is assumed.
  host_bandwidth: float = 16e9
  dimensions: int = 2
  shapes: tuple[str, ...] = ("1x1", "2x2", "2x4", "4x4")


def _gpu(
  *,
  name: str,
  device: str,
  gib: float,
  tflops: float,
  gbytes: float,
  capability: tuple[int, int],
  cores: int,
  clock_ghz: float,
  l2_mib: int,
  threads: int = 1536,
  pcie: int = 4,
  shared_kib: int = 100,
  units: int = 128,
) -> Gpu:
  """Returns a GPU from the numbers of its data sheet.

  Args:
    name: its key in `HARDWARE`.
    device: the name that its driver reports, without "NVIDIA".
    gib: memory, in GiB.
    tflops: dense bfloat16 TFLOP/s with sums in float32, as XLA computes them;
      of GeForce cards half the highest rate of the data sheet.
    gbytes: memory bandwidth, in GB/s.
    capability: CUDA compute capability.
    cores: number of multiprocessors.
    clock_ghz: boost clock.
    l2_mib: L2 cache, in MiB.
    threads: resident threads of a multiprocessor.
    pcie: version of its link to the host; each of the 16 lanes sends 2 GB/s in
      version 4, and twice as much in the next.
    shared_kib: shared memory of a multiprocessor, in KiB.
    units: FP32 units of a multiprocessor.
  """
  lane_bandwidth = 2e9 * 2 ** (pcie - 4)
  return Gpu(
    name=name,
    memory=int(gib * GIB),
    flops=tflops * 1e12,
    memory_bandwidth=gbytes * 1e9,
    host_bandwidth=lane_bandwidth * 16,
    source=(
      f"NVIDIA's data sheet or white paper of the {device}: {tflops:,g} "
      f"TFLOP/s dense with float32 accumulation, {gbytes:,g} GB/s"
    ),
    capability=capability,
    description=f"NVIDIA {device}",
    cores=cores,
    units_a_core=units,
    clock_ghz=clock_ghz,
    shared_memory=shared_kib * 1024,
    l2=l2_mib * 2**20,
    threads_a_core=threads,
  )


_sxm = functools.partial(_gpu, threads=2048, pcie=5, shared_kib=228)
_H100 = _sxm(
  name="h100",
  device="H100 80GB HBM3",
  gib=79.1,
  tflops=989.4,
  gbytes=3350,
  capability=(9, 0),
  cores=132,
  clock_ghz=1.98,
  l2_mib=50,
)
_ALL: tuple[Hardware, ...] = (
  _H100,
  # Its own name is in `_KINDS`: it computes as an H100.
  dataclasses.replace(_H100, name="h800"),
  _sxm(
    name="h200",
    device="H200",
    gib=139.8,
    tflops=989.4,
    gbytes=4800,
    capability=(9, 0),
    cores=132,
    clock_ghz=1.98,
    l2_mib=50,
  ),
  _gpu(
    name="a100",
    device="A100-SXM4-80GB",
    gib=79.25,
    tflops=312,
    gbytes=2039,
    capability=(8, 0),
    cores=108,
    clock_ghz=1.41,
    l2_mib=40,
    threads=2048,
    shared_kib=164,
    units=64,
  ),
  # An eighth of an HGX B200.
  _sxm(
    name="b200",
    device="B200",
    gib=178.3,
    tflops=2250,
    gbytes=8000,
    capability=(10, 0),
    cores=148,
    clock_ghz=1.965,
    l2_mib=126,
  ),
  _gpu(
    name="rtx3090",
    device="GeForce RTX 3090",
    gib=23.6,
    tflops=71,
    gbytes=936,
    capability=(8, 6),
    cores=82,
    clock_ghz=1.695,
    l2_mib=6,
  ),
  _gpu(
    name="rtx4090",
    device="GeForce RTX 4090",
    gib=23.6,
    tflops=165.2,
    gbytes=1008,
    capability=(8, 9),
    cores=128,
    clock_ghz=2.52,
    l2_mib=72,
  ),
  _gpu(
    name="rtx5090",
    device="GeForce RTX 5090",
    gib=31.3,
    tflops=209.5,
    gbytes=1792,
    capability=(12, 0),
    cores=170,
    clock_ghz=2.407,
    l2_mib=96,
    pcie=5,
  ),
  _gpu(
    name="a10g",
    device="A10G",
    gib=22.0,
    tflops=70,
    gbytes=600,
    capability=(8, 6),
    cores=80,
    clock_ghz=1.71,
    l2_mib=6,
  ),
  _gpu(
    name="l4",
    device="L4",
    gib=22.0,
    tflops=121,
    gbytes=300,
    capability=(8, 9),
    cores=58,
    clock_ghz=2.04,
    l2_mib=48,
  ),
  _gpu(
    name="l40s",
    device="L40S",
    gib=44.3,
    tflops=362,
    gbytes=864,
    capability=(8, 9),
    cores=142,
    clock_ghz=2.52,
    l2_mib=96,
  ),
  Tpu(
    name="v5e",
    memory=int(15.75 * GIB),
    flops=197e12,
    memory_bandwidth=819e9,
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
    source=(
      "Google Cloud TPU v6e page: 918 TFLOP/s, 1,600 GB/s, 3,200 Gb/s over "
      "four links, of which a ring takes two"
    ),
  ),
)

HARDWARE = {hardware.name: hardware for hardware in _ALL}
# `jax.Device.device_kind` -> name in `HARDWARE`.
_KINDS = {gpu.description: gpu.name for gpu in _ALL if isinstance(gpu, Gpu)}
_KINDS |= {
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
