"""Sets up JAX for a command: devices, flags, memory, the cache of programs.

It also refuses to compute a large policy on a CPU that nobody chose.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from anysearch_jax.host import platforms

if TYPE_CHECKING:
  from anysearch_jax.policy import architecture as architecture_lib


# Flags of XLA by platform; one that the user's own XLA_FLAGS names is never
# changed. The values follow from the compiled programs and the vendors' guides:
# https://openxla.org/xla/flags_guidance
# https://docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance
XLA_FLAGS = {
  "cuda": {
    # Gathers the next layer's weights while this one computes; without it
    # collectives and matrix products take turns. Off by default.
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    # XLA times Triton's matrix products against cuBLAS's and takes the faster.
    # The engine fuses q, k, v and gate, up itself, once a policy version;
    # otherwise decode with cuBLAS alone would join them in every step.
    "xla_gpu_enable_triton_gemm": "true",
    # Left as XLA has them: the thresholds that combine gathers, because the 30
    # to 70 MB of a 7B layer's matrix fill NVLink (raise them where fsdp spans
    # hosts), and command buffers, the CUDA graphs that decode's many small
    # kernels need (set xla_gpu_enable_command_buffer to nothing if one fails).
    # WHILE there would record decode's loop too, so that the host need not read
    # after each step whether to go on. XLA decides that when a device loads the
    # program, and a second call once failed: measure before you set it.
    # https://github.com/openxla/xla/pull/35760
  }
}
# For a trainer whose GPUs servers share. Other allocators keep what is
# freed. This one returns it to the driver, so that servers have it while they
# sample; training calls few large programs, for which it costs little:
# https://docs.jax.dev/en/latest/gpu_memory_allocation.html
SHARED_MEMORY = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
# One thread for a process: several processes share the cores, and each computes
# on one.
ONE_THREAD = {"xla_cpu_multi_thread_eigen": "false"}


def configure(*, threads: int, cache: str, devices: str = "all") -> None:
  """Sets up JAX; call before JAX computes anything.

  Args:
    threads: 1 restricts this process to one CPU thread; any other value leaves
      the choice to XLA.
    cache: folder of compiled programs, shared by processes; "" disables it.
    devices: "cpu" leaves the accelerators to other processes.
  """
  if devices == "cpu":
    os.environ["JAX_PLATFORMS"] = "cpu"
  platform = platforms.expected()
  flags = merge_xla_flags(
    XLA_FLAGS.get(platform, {}), os.environ.get("XLA_FLAGS", "")
  )
  if threads == 1:
    flags = merge_xla_flags(ONE_THREAD, flags)
    # XLA's pool would otherwise have a thread for each core. Kernels that it
    # hands from one to the other cost a decode call a seventh of its time.
    os.environ.setdefault("PJRT_NPROC", "1")
  if flags:
    os.environ["XLA_FLAGS"] = flags
  if threads == 1:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
      os.environ.setdefault(name, "1")
  # By default JAX reserves 75% of a GPU; `anysearch plan` assumes this share:
  # https://docs.jax.dev/en/latest/gpu_memory_allocation.html
  os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
  # XLA pins 64 GB of host memory at most, which `pipeline.offload` may exceed.
  # It is allocated on demand, so the machine's memory is limit enough.
  os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "4096")
  if platform == "cpu":
    _keep_freed_memory()
  if cache:  # JAX warns if it cannot write there.
    _configure_jax(
      {
        "jax_compilation_cache_dir": str(pathlib.Path(cache).absolute()),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
      }
    )


def _configure_jax(settings: Mapping[str, str | int]) -> None:
  """Sets options of JAX, which is imported later, or not at all."""
  for name, value in settings.items():
    os.environ[name.upper()] = str(value)
  if "jax" in sys.modules:
    import jax

    for name, value in settings.items():
      jax.config.update(name, value)


def merge_xla_flags(flags: Mapping[str, str], user_flags: str) -> str:
  """Returns the value of XLA_FLAGS: the user's, and the flags that it lacks."""
  user_names = {
    part.lstrip("-").partition("=")[0] for part in user_flags.split()
  }
  added = [
    f"--{name}={value}"
    for name, value in flags.items()
    if name not in user_names
  ]
  return " ".join([*user_flags.split(), *added])


def _keep_freed_memory() -> None:
  """Makes glibc reuse freed memory instead of returning it to the kernel.

  XLA allocates its temporaries anew for each call. Above 32 MB glibc serves
  them by mmap, which costs a page fault for every page and doubled the time of
  a train step. An accelerator's temporaries are not in this memory, and one
  arena would only make the host's threads wait for each other. Without glibc
  this does nothing. The options are described at
  https://man7.org/linux/man-pages/man3/mallopt.3.html
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError, TypeError):
    return
  # Options of glibc's malloc.h.
  trim_threshold = -1
  mmap_max = -4
  arena_max = -8
  mallopt(trim_threshold, 2**31 - 1)
  mallopt(mmap_max, 0)
  mallopt(arena_max, 1)  # One arena, so threads reuse each other's memory.


# The smallest policy that configs/ trains on a GPU has 494 million parameters,
# and two CPU cores train it at 110 tokens a second (configs/small.py).
_PARAMETERS_FOR_A_GPU = 300_000_000
_PARAMETERS_OF_A_CPU = 1_000_000_000


def cpu_problem(a: architecture_lib.Architecture) -> str:
  """Returns why a policy should not be computed here; "" if it may be.

  If the plug-in of a GPU or TPU fails to load, JAX computes on the CPU after a
  warning, hundreds of times slower. That must not look like a slow run. Where
  there is no such device, a CPU may compute policies of up to a billion
  parameters.
  """
  import jax

  from anysearch_jax.policy import parameters, table

  if jax.default_backend() != "cpu":
    return ""
  platform_names = [
    p.upper() for p in ("cuda", "tpu") if platforms.has_device(p)
  ]
  size = parameters.count(table.rows(a))
  if size < (_PARAMETERS_FOR_A_GPU if platform_names else _PARAMETERS_OF_A_CPU):
    return ""
  device_clause = ""
  if platform_names:
    device_clause = (
      f", although this machine has a {' and a '.join(platform_names)} device"
    )
  return (
    f"found a policy of {size / 1e9:.1f} billion parameters, and JAX computes "
    f"on the CPU{device_clause}; expected a GPU or a TPU"
  )


def refuse_cpu(a: architecture_lib.Architecture, *, allow: bool) -> None:
  """Refuses a policy that is too large for a CPU, as `cpu_problem` says.

  Raises:
    ValueError: JAX computes on the CPU.
  """
  if not allow and (reason := cpu_problem(a)):
    raise ValueError(
      f"{reason}. anysearch doctor says which plug-in is missing or failed "
      "(docs/one_gpu.md has the commands that install it); --allow_cpu "
      "computes on the CPU all the same."
    )
