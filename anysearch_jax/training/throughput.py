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
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import table
from anysearch_jax.training import batching


class Work(NamedTuple):
  """The amount of work in batches.

  Attributes:
    tokens: number of predictions.
    scored: number of predictions with a weight, whose log-probabilities are
      computed.
    positions: tokens and padding of the micro-batches that run.
    pairs: (query, key) pairs, the layers' mean.
  """

  tokens: int
  scored: int
  positions: int
  pairs: float


class Operations(NamedTuple):
  """What a program computes and moves.

  Attributes:
    products: floating-point operations of the products with weights.
    attention: floating-point operations of scores and of their values.
    activations: numbers that the products with weights read and write, their
      weights excluded.
  """

  products: float
  attention: float
  activations: float

  @property
  def flops(self) -> float:
    """All floating-point operations of matrix products."""
    return self.products + self.attention


def count(
  batches: Iterable[batching.HostBatch], a: architecture_lib.Architecture
) -> Work:
  """Counts the work in batches that are still on the host."""
  tokens = 0
  scored = 0
  positions = 0
  pair_count = 0.0
  for rows in (rows for batch in batches for rows in batch):
    used = slice(0, int(rows.used))
    real = rows.segment_ids[used] > 0
    tokens += int(np.count_nonzero(real))
    scored += int(np.count_nonzero(rows.weight[used]))
    positions += real.size
    # A token at position p sees p + 1 keys, if no window cuts them off.
    context_lengths = rows.positions[used][real] + 1
    contexts, counts = np.unique(context_lengths, return_counts=True)
    pair_count += float(
      np.dot(counts, [a.mean_attended(context) for context in contexts])
    )
  return Work(tokens, scored, positions, pair_count)


def operations(
  a: architecture_lib.Architecture,
  work: Work,
  *,
  forwards: float = 0,
  first_forwards: float = 0,
  critic: bool = False,
  epochs: int = 1,
) -> Operations:
  """Returns the operations of training on some work; see the module docstring.

  The gradients read and write as many activations as two forward passes.

  Args:
    a: the policy's architecture, with its adapters.
    work: in the policy's batches.
    forwards: passes without a gradient in every step, such as the reference's,
      which has no adapters.
    first_forwards: the same in the first epoch only, such as for old log-probs.
    critic: whether a critic is trained too; it scores in the first epoch only.
    epochs: how often `work` contains the same tokens.
  """
  base = _multiplied(table.base_rows(a), a)
  adapters = _multiplied(table.adapter_rows(a), a)
  trained = _multiplied(table.trainable_rows(a), a)
  head = 2 * a.vocab_size * a.d_model * work.scored
  head_activations = (a.vocab_size + a.d_model) * work.scored
  attention = 4 * a.layers * a.heads * a.head_dim * work.pairs
  body = (4 * (base + adapters) + 2 * trained) * work.tokens
  body_activations = activations(a) * work.tokens
  forward = 2 * base * work.tokens
  passes = forwards + first_forwards / epochs
  products = body + (2 if adapters else 3) * head + passes * (forward + head)
  steps = 3 + passes
  moved = steps * (body_activations + head_activations)
  if critic:
    products += body + (forward + 2 * adapters * work.tokens) / epochs
    steps += 3 + 1 / epochs
    moved += (3 + 1 / epochs) * body_activations
  return Operations(products, steps * attention, moved)


def activations(a: architecture_lib.Architecture) -> float:
  """Counts what the products with a token's layers read and write, in numbers.

  The head and the adapters are excluded.
  """
  numbers = 0
  for key, projection in table.projections(a).items():
    sizes = (projection.in_axes, projection.out_axes)
    width = sum(math.prod(size for size, _ in axes) for axes in sizes)
    # A token goes to some of the experts.
    repeated = a.active if a.experts and key in ("gate", "up", "down") else 1
    numbers += repeated * width
  return a.layers * numbers


def _multiplied(
  rows: Sequence[weights.Weight], a: architecture_lib.Architecture
) -> float:
  """Counts the parameters that multiply a token, except those of the head."""
  count = 0.0
  for row in rows:
    # The embedding is a lookup, and the head is counted apart.
    if len(row.file_shape) > 1 and row.path not in (("embed",), ("head",)):
      size = math.prod(row.shape)
      # A token uses some of the experts.
      count += size * a.active / a.experts if "experts" in row.axes else size
  return count


def metrics(
  work: Work, flops: float, *, seconds: float, devices: Sequence[jax.Device]
) -> dict[str, float]:
  """Returns speed, padding and, if the devices' peak is known, MFU.

  Args:
    work: the tokens that were trained on.
    flops: its model FLOPs, see `operations`.
    seconds: duration of the training, on host and devices.
    devices: of one kind; MFU is the share of their bfloat16 peak.
  """
  values = {
    "train/tokens_per_second": work.tokens / seconds,
    "train/padding": 1 - work.tokens / max(work.positions, 1),
  }
  accelerator = hardware.of_kind(devices[0].device_kind)
  if accelerator is not None:
    peak = accelerator.flops * len(devices)
    values["train/mfu"] = flops / seconds / peak
  return values


def memory(devices: Iterable[jax.Device]) -> dict[str, int]:
  """Returns the largest peak of bytes in use; empty if a device has none."""
  name = "peak_bytes_in_use"
  statistics = [device.memory_stats() or {} for device in devices]
  if any(name not in values for values in statistics):
    return {}
  return {"device/memory_peak_bytes": max(x[name] for x in statistics)}


def programs(jitted: Callable) -> int:
  """Returns the number of programs that a jitted function has compiled."""
  return jitted._cache_size()  # type: ignore[attr-defined]  # Not in stubs.
