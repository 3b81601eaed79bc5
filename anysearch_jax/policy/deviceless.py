"""Programs for accelerators that are not there: what lowering asks of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from jax._src.cudnn import fused_attention_stablehlo as fused

# What JAX's CUDA plugins ask for at least, 9.10.2, as cuDNN counts.
_CUDNN_VERSION = 91002


@contextlib.contextmanager
def cudnn(compute_capability: float) -> Iterator[None]:
  """Lowers cuDNN attention as if a device of this capability were there.

  JAX asks the first local device otherwise, also where the program is for a
  topology without devices.

  Args:
    compute_capability: of the devices compiled for, as 9.0.
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
