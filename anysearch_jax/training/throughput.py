"""Throughput, padding and model FLOPs utilization (MFU) of training.

Model FLOPs are those of the mathematics, as in PaLM
(https://arxiv.org/abs/2204.02311, appendix B): they exclude recomputation,
padding and masked (query, key) pairs. For n tokens, with P the parameters of
the matrices that multiply a token (including the head; the embedding is a
lookup), T the trained ones of these, and s the (query, key) pairs inside causal
segments:

    forward              2 P n +  4 L N H s
    step                 4 P n + 2 T n + 12 L N H s

A step is a forward pass and the gradients of activations and of weights. Either
all of a policy is trained (6 P n) or only its adapters, which P then includes.
Every other pass over the same tokens adds one forward pass. A critic adds a
step and a forward pass, both without the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from anysearch_jax.host import hardware
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import table
from anysearch_jax.training import batching


class Work(NamedTuple):
  """The amount of work in batches.

  tokens: number of predictions. positions: tokens and padding of the
  micro-batches that run. pairs: (query, key) pairs inside causal segments.
  """

  tokens: int
  positions: int
  pairs: int


def count(batches: Iterable[batching.HostBatch]) -> Work:
  """Counts the work in batches that are still on the host."""
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
  first_forwards: float = 0,
  critic: bool = False,
  epochs: int = 1,
) -> float:
  """Returns the model FLOPs of training on some work; see the module docstring.

  Args:
    a: the policy's architecture, with its adapters.
    work: in the policy's batches.
    forwards: passes without a gradient in every step, such as the reference's.
      They exclude adapters, as the next ones do.
    first_forwards: the same in the first epoch only, such as the one for old
      log-probs, which the first of several steps may not need.
    critic: whether a critic is trained too; it scores in the first epoch only.
    epochs: how often `work` contains the same tokens.
  """
  base = _matrices(a, table.base_rows(a))
  adapters = _matrices(a, table.adapter_rows(a))
  trained = _matrices(a, table.trainable_rows(a))
  attention = 4 * a.layers * a.heads * a.head_dim * work.pairs
  step = (4 * (base + adapters) + 2 * trained) * work.tokens + 3 * attention
  passes = forwards + first_forwards / epochs
  total = step + passes * (2 * base * work.tokens + attention)
  if critic:
    head = a.vocab_size * a.d_model
    fewer = 6 * head + (0 if adapters else 2 * head)
    forward = 2 * (base + adapters) * work.tokens + attention
    total += step + forward / epochs - fewer * work.tokens
  return total


def metrics(
  work: Work, flops: float, *, seconds: float, devices: Sequence[jax.Device]
) -> dict[str, float]:
  """Returns speed, padding and, if the devices' peak is known, MFU.

  `seconds` are those of the training, on host and devices. The devices are of
  one kind, whose bfloat16 peak MFU is of.
  """
  out = {
    "train/tokens_per_second": work.tokens / seconds,
    "train/padding": 1 - work.tokens / max(work.positions, 1),
  }
  known = hardware.of_kind(devices[0].device_kind)
  if known is not None:
    out["train/mfu"] = flops / seconds / (known.flops * len(devices))
  return out


def memory(devices: Iterable[jax.Device]) -> dict[str, int]:
  """Returns the largest peak of bytes in use; empty if a device has none."""
  name = "peak_bytes_in_use"
  stats = [device.memory_stats() or {} for device in devices]
  if any(name not in each for each in stats):
    return {}
  return {"device/memory_peak_bytes": max(each[name] for each in stats)}


def programs(jitted: Callable) -> int:
  """Returns the number of programs that a jitted function has compiled."""
  return jitted._cache_size()  # type: ignore[attr-defined]  # Not in stubs.


def _matrices(
  a: architecture_lib.Architecture, rows: Iterable[weights.Weight]
) -> int:
  """Returns the number of parameters in matrices that multiply a token."""
  looked_up = () if a.tied else (("embed",),)
  return sum(
    math.prod(row.shape)
    for row in rows
    if len(row.file_shape) > 1 and row.path not in looked_up
  )
