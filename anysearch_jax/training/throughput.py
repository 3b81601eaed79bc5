"""How much a rollout trained on, how fast, and how well the devices were used.

Model FLOPs count what the mathematics asks for, however it is computed: no
recomputation, no padding, no key that a query may not see. For n tokens, with
P the parameters of the matrices that a token passes (the head among them, the
embedding not: it is looked up), T the trained ones of these, and s the (query,
key) pairs inside causal segments:

    forward              2 P n +  4 L N H s
    step                 4 P n + 2 T n + 12 L N H s

A step is a forward pass, the gradient of activations and that of weights; all
of a policy is trained (6 P n) or its adapters (then P holds those as well).
Every other pass over the same tokens is one forward more. A critic takes a step
and a forward pass of the same, without the head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from anysearch_jax.host import hardware
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import table
from anysearch_jax.training import batching

# `jax.Device.device_kind` to the name of its peak.
_KINDS = {
  "NVIDIA A100-SXM4-40GB": "a100",
  "NVIDIA A100-SXM4-80GB": "a100",
  "NVIDIA H100 80GB HBM3": "h100",
  "NVIDIA H200": "h200",
  "NVIDIA H800": "h800",
  "TPU v5 lite": "v5e",
  "TPU v5": "v5p",
  "TPU v5p": "v5p",
  "TPU v6 lite": "v6e",
}


class Work(NamedTuple):
  """What batches hold.

  tokens: predictions. positions: of the micro-batches that run, padding too.
  pairs: (query, key) inside causal segments.
  """

  tokens: int
  positions: int
  pairs: int


def count(batches: Iterable[batching.TrainBatch]) -> Work:
  """The work in batches that are still on the host."""
  tokens = positions = pairs = 0
  for rows in (rows for batch in batches for rows in batch):
    used = slice(0, int(rows.used))
    real = rows.segment_ids[used] > 0
    tokens += int(np.count_nonzero(real))
    positions += real.size
    pairs += int(np.sum(rows.positions[used] + 1, where=real, dtype=np.int64))
  return Work(tokens, positions, pairs)


def model_flops(
  a: architecture_lib.Architecture,
  work: Work,
  *,
  forwards: int = 0,
  critic: bool = False,
) -> float:
  """Model FLOPs of training on some work, see the top of this file.

  Args:
    a: the policy, with its adapters.
    work: what its batches hold.
    forwards: passes without a gradient over the same tokens: the reference's,
      the one for old log-probs. Adapters are left out of them.
    critic: there is one.
  """
  base = _matrices(a, table.base_rows(a))
  adapters = _matrices(a, table.adapter_rows(a))
  trained = _matrices(a, table.trainable_rows(a))
  attention = 4 * a.layers * a.heads * a.head_dim * work.pairs
  step = (4 * (base + adapters) + 2 * trained) * work.tokens + 3 * attention
  total = step + forwards * (2 * base * work.tokens + attention)
  if critic:
    head = a.vocab_size * a.d_model
    fewer = 6 * head + (0 if adapters else 2 * head)
    forward = 2 * (base + adapters) * work.tokens + attention
    total += step + forward - fewer * work.tokens
  return total


def metrics(
  work: Work,
  flops: float,
  *,
  seconds: float,
  devices: Sequence[jax.Device],
) -> dict[str, float]:
  """Speed, padding and, where the devices' peak is known, its share in use.

  Args:
    work: of some training.
    flops: `model_flops` of it.
    seconds: that it took, host and devices.
    devices: that trained, of one kind. The peak is that of bfloat16.
  """
  out = {
    "train/tokens_per_second": work.tokens / seconds,
    "train/padding": 1 - work.tokens / max(work.positions, 1),
  }
  name = _KINDS.get(devices[0].device_kind)
  if name is not None:
    peak = hardware.HARDWARE[name].flops * len(devices)
    out["train/mfu"] = flops / seconds / peak
  return out


def memory(devices: Iterable[jax.Device]) -> dict[str, int]:
  """The most bytes that one of the devices held, where they tell."""
  peaks = [(d.memory_stats() or {}).get("peak_bytes_in_use") for d in devices]
  if None in peaks:
    return {}
  return {"device/memory_peak_bytes": max(peaks)}


def _matrices(
  a: architecture_lib.Architecture, rows: Iterable[weights.Weight]
) -> int:
  """Parameters that multiply a token."""
  looked_up = () if a.tied else (("embed",),)
  return sum(
    math.prod(row.shape)
    for row in rows
    if len(row.file_shape) > 1 and row.path not in looked_up
  )
