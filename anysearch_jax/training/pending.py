"""Serializes rollouts that are played and not trained on, for a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from anysearch_jax import types
from anysearch_jax.training import collection, packed_groups

# Plain fields of `RolloutBatch`, besides groups, places and counters.
_PLAIN = (*collection.COUNTS, "reason", "fingerprint", "fingerprint_max")


class Pending(NamedTuple):
  """Consecutive rollouts, serialized.

  values: JSON. tokens: by name, the arrays of all trajectories, concatenated.
  """

  values: dict[str, Any]
  tokens: dict[str, np.ndarray]


def pack(rollouts: Sequence[collection.RolloutBatch]) -> Pending:
  """Serializes rollouts; `unpack` restores them."""
  packed = packed_groups.pack([g for c in rollouts for g in c.groups])
  values = {
    "groups": packed.values,
    "rollouts": [_rollout(c) for c in rollouts],
  }
  return Pending(values, packed.tokens)


def unpack(
  pending: Pending, question: Callable[[int, int], types.Question]
) -> list[collection.RolloutBatch]:
  """Restores the rollouts that `pack` serialized.

  Args:
    pending: the result of `pack`, after a round trip through JSON.
    question: returns the question at (rollout, index in the rollout).
  """
  packed = packed_groups.Packed(pending.values["groups"], pending.tokens)
  groups = iter(packed_groups.unpack(packed, question))
  return [
    collection.RolloutBatch(
      groups=[next(groups) for _ in values["places"]],
      places=np.asarray(values["places"], np.int64),
      engine=Counter(values["engine"]),
      search=Counter(values["search"]),
      **values["plain"],
    )
    for values in pending.values["rollouts"]
  ]


def _rollout(c: collection.RolloutBatch) -> dict[str, Any]:
  return {
    "places": c.places.tolist(),
    "engine": dict(c.engine),
    "search": dict(c.search),
    "plain": {name: getattr(c, name) for name in _PLAIN},
  }
