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

  platform: JAX's name of the platform.
  memory: bytes.
  head_room: share of the memory that programs may use.
  flops: operations per second.
  memory_bandwidth: bytes per second.
  host_bandwidth: bytes per second between a device and its host's memory.
  source: where the numbers are from.
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


def _gpu(
  name: str,
  device: str,
  gib: float,
  tflops: float,
  gbytes: float,
  capability: tuple[int, int],
  cores: int,
  clock_ghz: float,
  l2_mib: int,
  *,
  threads: int = 1536,
  pcie: int = 4,
  shared_kib: int = 100,
  units: int = 128,
) -> Gpu:
  """Returns a GPU; `threads` are those of a multiprocessor.

  Each of the 16 lanes of PCIe to the host sends 2 GB/s in version 4. Of GeForce
  cards the rate with sums in float32 counts, as XLA has them do; it is half of
  their own.
  """
  host = 2e9 * 2 ** (pcie - 4) * 16
  return Gpu(
    name=name,
    memory=int(gib * GIB),
    flops=tflops * 1e12,
    memory_bandwidth=gbytes * 1e9,
    host_bandwidth=host,
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
_ALL: tuple[Hardware, ...] = (
  # GiB, TFLOP/s, GB/s, capability, multiprocessors, GHz, MiB of L2.
  _sxm("h100", "H100 80GB HBM3", 79.1, 989.4, 3350, (9, 0), 132, 1.98, 50),
  # Its own name is in `_KINDS`: it computes as an H100.
  _sxm("h800", "H100 80GB HBM3", 79.1, 989.4, 3350, (9, 0), 132, 1.98, 50),
  _sxm("h200", "H200", 139.8, 989.4, 4800, (9, 0), 132, 1.98, 50),
  _gpu(
    *("a100", "A100-SXM4-80GB", 79.25, 312, 2039, (8, 0), 108, 1.41, 40),
    threads=2048,
    shared_kib=164,
    units=64,
  ),
  # An eighth of an HGX B200.
  _sxm("b200", "B200", 178.3, 2250, 8000, (10, 0), 148, 1.965, 126),
  _gpu("rtx3090", "GeForce RTX 3090", 23.6, 71, 936, (8, 6), 82, 1.695, 6),
  _gpu("rtx4090", "GeForce RTX 4090", 23.6, 165.2, 1008, (8, 9), 128, 2.52, 72),
  _gpu(
    *("rtx5090", "GeForce RTX 5090", 31.3, 209.5, 1792, (12, 0), 170),
    *(2.407, 96),
    pcie=5,
  ),
  _gpu("a10g", "A10G", 22.0, 70, 600, (8, 6), 80, 1.71, 6),
  _gpu("l4", "L4", 22.0, 121, 300, (8, 9), 58, 2.04, 48),
  _gpu("l40s", "L40S", 44.3, 362, 864, (8, 9), 142, 2.52, 96),
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
