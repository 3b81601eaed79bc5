"""Throughput, padding and model FLOPs utilization (MFU) of training.

Model FLOPs are those of the mathematics, as in PaLM
(https://arxiv.org/abs/2204.02311, appendix B): they exclude recomputation,
padding and masked (query, key) pairs. For n tokens, m of them with a weight in
the loss, with P the parameters of the matrices that multiply a token, T the
trained ones of these, V those of the head, which multiplies only the m, and s
the (query, key) pairs inside causal segments and windows, the layers' mean:

    forward              2 P n + 2 V m +  4 L N H s
    step                 4 P n + 2 T n + 6 V m + 12 L N H s

A step is a forward pass and the gradients of activations and of weights. Either
all of a policy is trained (T = P) or only its adapters, which P then includes;
the head then takes 4 V m. Every other pass over the same tokens adds one
forward pass. A critic adds a step and a forward pass, both without the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from anysearch_jax.host import hardware
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import table
from anysearch_jax.training import batching


class Work(NamedTuple):
  """The amount of work in batches.

  tokens: number of predictions. scored: of them, those with a weight, whose
  log-probabilities are computed. positions: tokens and padding of the
  micro-batches that run. pairs: (query, key) pairs, the layers' mean.
  """

  tokens: int
  scored: int
  positions: int
  pairs: float


def count(
  batches: Iterable[batching.HostBatch], a: architecture_lib.Architecture
) -> Work:
  """Counts the work in batches that are still on the host."""
  tokens, scored, positions, pairs = 0, 0, 0, 0.0
  for rows in (rows for batch in batches for rows in batch):
    used = slice(0, int(rows.used))
    real = rows.segment_ids[used] > 0
    tokens += int(np.count_nonzero(real))
    scored += int(np.count_nonzero(rows.weight[used]))
    positions += real.size
    seen = rows.positions[used][real] + 1
    contexts, times = np.unique(seen, return_counts=True)
    pairs += float(np.dot(times, [a.mean_attended(each) for each in contexts]))
  return Work(tokens, scored, positions, pairs)


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
    forwards: passes without a gradient in every step, such as the reference's,
      which has no adapters.
    first_forwards: the same in the first epoch only, such as for old log-probs.
    critic: whether a critic is trained too; it scores in the first epoch only.
    epochs: how often `work` contains the same tokens.
  """
  base, adapters, trained = (
    sum(
      # A token uses some of the experts.
      math.prod(row.shape)
      * (a.active / a.experts if "experts" in row.axes else 1)
      for row in rows(a)
      # The embedding is a lookup.
      if len(row.file_shape) > 1 and row.path not in (("embed",), ("head",))
    )
    for rows in (table.base_rows, table.adapter_rows, table.trainable_rows)
  )
  head = 2 * a.vocab_size * a.d_model * work.scored
  attention = 4 * a.layers * a.heads * a.head_dim * work.pairs
  body = (4 * (base + adapters) + 2 * trained) * work.tokens + 3 * attention
  passes = forwards + first_forwards / epochs
  forward = 2 * base * work.tokens + attention
  total = body + (2 if adapters else 3) * head + passes * (forward + head)
  if critic:
    total += body + (forward + 2 * adapters * work.tokens) / epochs
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
