"""Predicts the seconds of a program from arithmetic, memory and links.

This is a roofline model (https://dl.acm.org/doi/10.1145/1498765.1498785), not a
measurement: each resource is used at an assumed share of its peak. Arithmetic
overlaps with memory reads; collectives overlap with nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from anysearch_jax.planning import collectives, targets


@dataclasses.dataclass(frozen=True)
class Assumptions:
  """Assumed shares of the peaks; `latency` is seconds for each collective."""

  compute: float = 0.4
  memory: float = 0.8
  links: float = 0.8
  latency: float = 10e-6


class Prediction(NamedTuple):
  """Seconds of a call; `total` is not their sum, see `predict`."""

  compute: float
  memory: float
  links: float
  total: float


def predict(
  target: targets.Target,
  *,
  flops: float,
  read: float,
  traffic: Mapping[str, collectives.Traffic],
  assumptions: Assumptions,
) -> Prediction:
  """Predicts the seconds of one call: max(compute, memory) + links.

  Args:
    target: the devices.
    flops: of one device.
    read: bytes that a device reads from its memory.
    traffic: of one device, by kind of collective.
    assumptions: shares of the peaks.
  """
  hardware = target.hardware
  compute = flops / (assumptions.compute * hardware.flops)
  memory = read / (assumptions.memory * hardware.memory_bandwidth)
  operations = sum(t.operations for t in traffic.values())
  links = collectives.total(traffic) / (
    assumptions.links * target.link_bandwidth
  )
  links += assumptions.latency * operations
  return Prediction(compute, memory, links, max(compute, memory) + links)


def sentences(target: targets.Target, assumptions: Assumptions) -> list[str]:
  """Returns sentences that state what a prediction assumes."""
  h = target.hardware
  a = assumptions
  return [
    f"{h.source}.",
    f"Matrix products, recomputed ones included, run at {a.compute:.0%} of "
    f"{h.flops / 1e12:.0f} TFLOP/s a device; masked attention counts in full.",
    f"Memory is read at {a.memory:.0%} of {h.memory_bandwidth / 1e9:.0f} GB/s, "
    "in the shadow of the products.",
    f"Collectives send at {a.links:.0%} of {target.link_bandwidth / 1e9:.0f} "
    f"GB/s a device{' over the network' if target.hosts > 1 else ''}, plus "
    f"{a.latency * 1e6:.0f} us each; none overlaps with anything.",
  ]
