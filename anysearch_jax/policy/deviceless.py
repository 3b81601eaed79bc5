"""Lowering programs for accelerators that this machine does not have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from jax._src.cudnn import fused_attention_stablehlo as fused

# 9.10.2 in cuDNN's encoding: the minimum that JAX's CUDA plugins require.
_CUDNN_VERSION = 91002


@contextlib.contextmanager
def cudnn(compute_capability: float) -> Iterator[None]:
  """Lowers cuDNN attention as if a device of this capability were present.

  Without this, JAX queries the first local device, even if the program is for
  a topology without devices.

  Args:
    compute_capability: of the target devices, such as 9.0.
  """
  with mock.patch.multiple(
    fused,
    check_cudnn_version=lambda: _CUDNN_VERSION,
    check_compute_capability=lambda least: compute_capability >= float(least),
    is_cuda_compute_capability_equal=lambda other: (
      compute_capability == float(other)
    ),
  ):
    yield
