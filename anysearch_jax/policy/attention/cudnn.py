"""cuDNN's attention over packed rows, through a private module of JAX.

`jax.nn.dot_product_attention` offers cuDNN for rows that hold one sequence
each, but not for several sequences in a row (the packed, or THD, layout, see
"Attention" in https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/).
JAX implements it in a private module, which only this file imports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src.cudnn import fused_attention_stablehlo as _fused

# 9.10.2 in cuDNN's encoding: the minimum that JAX's CUDA plugins require.
_CUDNN_VERSION = 91002


def packed_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  lengths: jax.Array,
  offsets: jax.Array,
) -> jax.Array:
  """Computes causal attention inside the sequences of each row.

  Memory that belongs to no sequence is not written and may contain NaN.

  Args:
    q: `[B, T, N, H]`, float16 or bfloat16.
    k: as `q`.
    v: as `q`.
    lengths: int32 `[B, M]`, tokens of each sequence; -1 if there are fewer.
    offsets: int32 `[B, M + 1]`, position of each sequence's first token in its
      row; -1 after the last one. M must be at least 2: otherwise JAX does not
      treat the row as packed.

  Returns:
    `[B, T, N, H]`, dtype of `q`.
  """
  return _fused.dot_product_attention(
    q,
    k,
    v,
    q_seqlen=lengths,
    kv_seqlen=lengths,
    q_offsets=offsets,
    kv_offsets=offsets,
    scale=q.shape[-1] ** -0.5,
    mask_type=_fused.MaskType.PADDING_CAUSAL,
  )


def is_forward(primitive: Any) -> bool:
  """Returns whether a JAX primitive is the forward pass of this attention.

  A `jax.checkpoint` policy asks this: the softmax statistics, which the
  backward pass reads, cannot be given a checkpoint name.
  """
  return primitive.name == _fused._dot_product_attention_fwd_p_wrapper.name


@contextlib.contextmanager
def lowering(compute_capability: float) -> Iterator[None]:
  """Lowers cuDNN attention as if a device of this capability were present.

  Without this, JAX asks the first local device, even if the program is for a
  topology without devices.

  Args:
    compute_capability: of the target devices, such as 9.0.
  """
  answers: dict[str, Callable[..., Any]] = {
    "check_cudnn_version": lambda: _CUDNN_VERSION,
    "check_compute_capability": lambda least: (
      compute_capability >= float(least)
    ),
    "is_cuda_compute_capability_equal": lambda other: (
      compute_capability == float(other)
    ),
  }
  originals = {name: getattr(_fused, name) for name in answers}
  try:
    vars(_fused).update(answers)
    yield
  finally:
    vars(_fused).update(originals)
