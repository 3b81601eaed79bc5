"""The values of a plan: what a configuration needs on a target.

Bytes are those of one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from anysearch_jax.host import hardware
from anysearch_jax.planning import compilation, roofline, targets


@dataclasses.dataclass(frozen=True)
class Part:
  """One program of a plan.

  devices: number of devices. tokens: that a call processes. read: bytes that a
  call reads from a device's memory at least. kinds: bytes of its arguments by
  kind. gradients: bytes of gradients among the temporary ones. held: bytes that
  other programs keep meanwhile, by kind. predicted: None if it did not compile.
  offloaded: bytes of other programs that are in host memory meanwhile.
  """

  name: str
  devices: int
  tokens: int
  read: int
  kinds: Mapping[str, int]
  gradients: int
  held: Mapping[str, int]
  compiled: compilation.Compilation
  predicted: roofline.Prediction | None
  offloaded: int = 0

  @property
  def activations(self) -> int:
    """Temporary bytes other than gradients."""
    return max(0, self.compiled.temporary - self.gradients)

  @property
  def total(self) -> int:
    """Peak bytes in use, those of other programs included."""
    return self.compiled.peak + sum(self.held.values())

  @property
  def tokens_per_second(self) -> float | None:
    """Predicted tokens a second; None for a program without tokens."""
    if not self.predicted or not self.tokens:
      return None
    return self.tokens / self.predicted.total

  def fits(self, target: targets.Target) -> bool:
    return not self.compiled.refused and self.total <= target.capacity

  def to_dict(self) -> dict[str, Any]:
    c = self.compiled
    kinds = {**self.kinds, "activations": self.activations}
    if self.gradients:
      kinds["gradients"] = self.gradients
    return {
      "devices": self.devices,
      "tokens": self.tokens,
      "kinds_bytes": kinds,
      "held_bytes": dict(self.held),
      "offloaded_bytes": self.offloaded,
      "argument_bytes": c.arguments,
      "temporary_bytes": c.temporary,
      "peak_bytes": c.peak,
      "total_bytes": self.total,
      "refused_by_compiler": c.refused,
      "flops": c.flops,
      "read_bytes": self.read,
      "collectives": {
        kind: traffic._asdict() for kind, traffic in (c.traffic or {}).items()
      },
      "full_rematerializations": c.replications,
      "predicted_seconds": self.predicted and self.predicted._asdict(),
      "predicted_tokens_per_second": self.tokens_per_second,
      "compile_seconds": c.seconds,
    }


class Phase(NamedTuple):
  """Seconds of one phase of a step.

  predicted: as assumed. sixty: with 60 % of every peak. floor: at the peaks.
  """

  name: str
  predicted: float
  sixty: float
  floor: float


@dataclasses.dataclass(frozen=True)
class Step:
  """One optimizer step, with the sampling of its episodes.

  overlapped: whether it samples while it trains.
  """

  sampling: tuple[Phase, ...]
  training: tuple[Phase, ...]
  overlapped: bool

  @property
  def phases(self) -> list[Phase]:
    """All phases, and the whole step as the last one."""
    return [
      *self.sampling,
      *self.training,
      Phase(
        "whole step",
        self._whole(lambda phase: phase.predicted),
        self._whole(lambda phase: phase.sixty),
        self._whole(lambda phase: phase.floor),
      ),
    ]

  def _whole(self, seconds: Callable[[Phase], float]) -> float:
    sampled = sum(map(seconds, self.sampling))
    trained = sum(map(seconds, self.training))
    return max(sampled, trained) if self.overlapped else sampled + trained


@dataclasses.dataclass(frozen=True)
class Plan:
  """A configuration on a target.

  mesh: sizes of the training mesh's axes. own_rollout: whether sampling has its
  own devices. parameters, trained: numbers of all and of trained parameters.
  advice: changes that would make it fit; empty if it fits. step: None if a
  program did not compile.
  """

  name: str
  policy: str
  target: targets.Target
  mesh: Mapping[str, int]
  own_rollout: bool
  parameters: int
  trained: int
  parts: tuple[Part, ...]
  assumptions: tuple[str, ...]
  advice: tuple[str, ...] = ()
  step: Step | None = None

  @property
  def too_large(self) -> list[Part]:
    """The programs that exceed a device's capacity."""
    return [part for part in self.parts if not part.fits(self.target)]

  @property
  def fits(self) -> bool:
    return not self.too_large

  @property
  def verdict(self) -> str:
    """Whether the plan fits, as a sentence."""
    capacity = gib(self.target.capacity)
    if self.fits:
      most = max(self.parts, key=lambda part: part.total)
      return (
        f"fits: at most {gib(most.total)} of {capacity} GiB a device, in the "
        f"{most.name}."
      )
    found = ", ".join(f"{p.name} {gib(p.total)}" for p in self.too_large)
    return f"does not fit: {found} of {capacity} GiB a device."

  def to_dict(self) -> dict[str, Any]:
    """Returns the plan as JSON values; FLOPs are those of all devices."""
    return {
      "name": self.name,
      "policy": self.policy,
      "target": str(self.target),
      "mesh": dict(self.mesh),
      "own_rollout_devices": self.own_rollout,
      "parameters": self.parameters,
      "trained_parameters": self.trained,
      "fits": self.fits,
      "verdict": self.verdict,
      "advice": list(self.advice),
      "memory_bytes": self.target.hardware.memory,
      "capacity_bytes": self.target.capacity,
      "programs": {part.name: part.to_dict() for part in self.parts},
      "step_seconds": self.step
      and {phase.name: phase._asdict() for phase in self.step.phases},
      "assumptions": list(self.assumptions),
    }


def gib(size: float) -> str:
  """Formats bytes in GiB, with one decimal."""
  return f"{size / hardware.GIB:.1f}"
