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
  """Seconds of a call; `total` is not their sum, see `predict`.

  `floor` is what no program with the same FLOPs and bytes can beat: every
  resource is at its peak, and all of them overlap.
  """

  compute: float
  memory: float
  links: float
  total: float
  floor: float


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
  peaks = (
    flops / hardware.flops,
    read / hardware.memory_bandwidth,
    collectives.total(traffic) / target.link_bandwidth,
  )
  compute = peaks[0] / assumptions.compute
  memory = peaks[1] / assumptions.memory
  links = peaks[2] / assumptions.links
  links += assumptions.latency * sum(t.operations for t in traffic.values())
  return Prediction(
    compute, memory, links, max(compute, memory) + links, max(peaks)
  )


def sentences(target: targets.Target, assumptions: Assumptions) -> list[str]:
  """Returns sentences that state what a prediction assumes."""
  h = target.hardware
  a = assumptions
  return [
    f"{h.source}.",
    f"Matrix products, recomputed ones included, run at {a.compute:.0%} of "
    f"{h.flops / 1e12:.0f} TFLOP/s a device.",
    f"Memory is read at {a.memory:.0%} of {h.memory_bandwidth / 1e9:.0f} GB/s, "
    "in the shadow of the products.",
    f"Collectives send at {a.links:.0%} of {target.link_bandwidth / 1e9:.0f} "
    f"GB/s a device{' over the network' if target.hosts > 1 else ''}, plus "
    f"{a.latency * 1e6:.0f} us each; none overlaps with anything.",
    "The floor is the same work with products, memory and links at their peaks "
    "and all at once.",
  ]
