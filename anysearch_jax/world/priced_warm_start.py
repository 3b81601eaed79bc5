"""A warm start with two searches: its demonstrations, and what it must show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from anysearch_jax import types
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder
from anysearch_jax.world import priced_demonstrations, warm_start

# The value of `warm_start.expert`.
NAME = "priced"
# The least mean probability of these decisions, on held-out demonstrations.
_LEAST = dict.fromkeys(("nothing", "conflict", "copy", "memory", "money"), 0.95)
# P(recall | known) - P(recall | unknown); the demonstrator's is 0.4.
_GAP = 0.25
# The demonstrator asks both searches about equally often.
_CHEAP = (0.25, 0.75)


def pool(
  questions: Sequence[types.Question],
  setting: priced_demonstrations.Setting,
  *,
  seed: int,
  decision_weight: float,
  on_done: Callable[[int], None] = lambda done: None,
) -> list[warm_start.Demonstration]:
  """Plays a demonstration of each question, with 1 to 20 cents.

  Args:
    questions: of the setting's world.
    setting: the world, its searches and the expert.
    seed: of the budgets and of the expert.
    decision_weight: loss weight of the tokens of decisions.
    on_done: called with the number of demonstrations made.
  """
  rng = np.random.Generator(np.random.PCG64(seed))
  made = []
  for question in questions:
    trajectory, weights = priced_demonstrations.demonstrate(
      question,
      setting,
      money=int(rng.integers(1, priced_demonstrations.MOST_CENTS + 1)),
      rng=rng,
      decision_weight=decision_weight,
    )
    made.append(warm_start.Demonstration(trajectory.token_ids, weights))
    on_done(len(made))
  return made


def probe(
  params: decoder.Params,
  a: architecture_lib.Architecture,
  setting: priced_demonstrations.Setting,
  *,
  count: int,
  seed: int,
) -> dict[str, float]:
  """Returns the mean probability of each kind of decision.

  Args:
    params, a: the policy.
    setting: as for `pool`.
    count: number of held-out demonstrations.
    seed: of these.

  Returns:
    By kind of `priced_demonstrations.KINDS`; `tool` is P(cheap | a search).
  """
  probes = priced_demonstrations.probe_sets(
    setting, "dev", count=count, seed=seed
  )
  p = warm_start.probe(params, a, probes)
  return {
    kind: float(p[probes.kinds == i].mean())
    for i, kind in enumerate(priced_demonstrations.KINDS)
    if np.any(probes.kinds == i)
  }


def gate(found: Mapping[str, float]) -> list[str]:
  """Returns in words what the policy lacks to begin reinforcement learning.

  Args:
    found: the means of `probe`.
  """
  lacks = [
    f"{kind}: found {found[kind]:.4f}, expected at least {least}"
    for kind, least in _LEAST.items()
    if found[kind] < least
  ]
  gap = found["recall_known"] - found["recall_unknown"]
  if gap < _GAP:
    lacks.append(
      f"recall_known - recall_unknown: found {gap:.3f}, expected at least "
      f"{_GAP}"
    )
  low, high = _CHEAP
  if not low <= found["tool"] <= high:
    lacks.append(
      f"tool: found {found['tool']:.3f}, expected {low} to {high}: both "
      "searches must be tried"
    )
  return lacks
