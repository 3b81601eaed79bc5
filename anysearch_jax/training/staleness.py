"""Measures and bounds the staleness of sampled tokens.

Version v of the policy is the weights after training on v rollouts. A token of
rollout k that was sampled with version v has age k - v, in rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from anysearch_jax import types


class StaleError(RuntimeError):
  """A rollout holds tokens whose age is out of bounds."""


def ages(rollout: int, groups: Iterable[types.Group | None]) -> np.ndarray:
  """Returns the ages of the tokens that are trained on, int `[tokens]`."""
  versions = [
    t.versions[t.authors == types.Author.MODEL]
    for group in groups
    if group
    for t in group.trajectories
    if not t.failed
  ]
  return rollout - np.concatenate([np.zeros(0, np.int32), *versions])


def holds(rollout: int, ages: np.ndarray, *, bound: int) -> bool:
  """Whether all ages are in [0, bound], and no version is below 0."""
  return bool(np.all((ages >= 0) & (ages <= min(bound, rollout))))


def check(rollout: int, ages: np.ndarray, *, bound: int) -> None:
  """Checks the ages of a rollout's tokens.

  Raises:
    StaleError: an age is out of bounds. It names the oldest version or, if a
      version is newer than the trainer's, the newest.
  """
  if not holds(rollout, ages, bound=bound):
    worst = int(ages.min() if ages.min() < 0 else ages.max())
    raise StaleError(
      f"Rollout {rollout} holds tokens of policy version {rollout - worst}, "
      f"expected {max(0, rollout - bound)} to {rollout} (pipeline.async_level "
      f"{bound}). It was not trained on."
    )


def metrics(ages: np.ndarray) -> dict[str, float]:
  """Returns mean and maximum of the ages; 0 if there is no token."""
  ages = ages if ages.size else np.zeros(1)
  return {
    "policy/staleness_mean": float(ages.mean()),
    "policy/staleness_max": float(ages.max()),
  }
