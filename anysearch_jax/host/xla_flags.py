"""The flags of XLA that matter here, by platform, with why each.

`value` None: left as XLA has it, for the reason given. A flag that the user's
own XLA_FLAGS names is never changed. The values follow from the compiled
programs and from the vendors' guides; none was measured on a device:
https://openxla.org/xla/flags_guidance
https://docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Flag(NamedTuple):
  """A flag, its value, and why it has this value."""

  name: str
  value: str | None
  why: str


# One thread for a process: its arithmetic, and the libraries beside it.
ONE_THREAD = (
  Flag(
    "xla_cpu_multi_thread_eigen",
    "false",
    "Several processes share the cores; each computes on one.",
  ),
)

FLAGS: dict[str, tuple[Flag, ...]] = {
  "cuda": (
    Flag(
      "xla_gpu_enable_latency_hiding_scheduler",
      "true",
      "Gathers the next layer's weights while this one computes; without it "
      "collectives and matrix products take turns. Off by default.",
    ),
    Flag(
      "xla_gpu_enable_triton_gemm",
      "true",
      "XLA times Triton's matrix products against cuBLAS's and takes the "
      "faster. The engine fuses q, k, v and gate, up itself, once a policy "
      "version; otherwise decode with cuBLAS alone would join them in every "
      "step.",
    ),
    Flag(
      "xla_gpu_all_gather_combine_threshold_bytes",
      None,
      "A 7B layer's matrices are 30 to 70 MB a gather, which fills NVLink; "
      "larger gathers would hold more weights and overlap less. Raise it where "
      "fsdp spans hosts.",
    ),
    Flag(
      "xla_gpu_reduce_scatter_combine_threshold_bytes",
      None,
      "As for all-gather.",
    ),
    Flag(
      "xla_gpu_enable_command_buffer",
      None,
      "XLA records kernels as CUDA graphs by default, which decode's many "
      "small kernels need. Set it to nothing if a graph fails or takes too "
      "much memory.",
    ),
  ),
  "tpu": (
    Flag(
      "xla_tpu_enable_latency_hiding_scheduler",
      None,
      "On by default, with asynchronous collectives. libtpu reads its flags "
      "from LIBTPU_INIT_ARGS.",
    ),
  ),
  "cpu": (),
}


def merged(flags: Sequence[Flag], given: str) -> str:
  """Returns the value of XLA_FLAGS: `given`, and the flags that it lacks."""
  names = {part.lstrip("-").partition("=")[0] for part in given.split()}
  added = [
    f"--{flag.name}={flag.value}"
    for flag in flags
    if flag.value is not None and flag.name not in names
  ]
  return " ".join([*given.split(), *added])
