"""The versions of the generated world, which `data.world` names.

* `graded`, the default: each relation has a reliability. A memory is right in a
  new snapshot with that probability, so that only searching finds out. Budgets
  bind up to 8.
* `fixed`: a memory is right or wrong in all snapshots, and nothing tells which;
  a tenth are wrong. A policy can learn by heart which of them to search. Fewer
  facts are known and questions are shorter.
"""

from __future__ import annotations

import dataclasses

from anysearch_jax.world import world as world_lib

# Relations in the order of `relations.ALL`.
_FIXED = world_lib.WorldConfig(
  known=(
    *(0.25, 0.2, 0.2, 0.55, 0.5, 0.5),
    *(0.35, 0.3, 0.9, 0.7),
  ),
  stale=0.1,
  changes=(),
  hop_mix=(0.26, 0.2, 0.17, 0.15, 0.12, 0.1),
)
VERSIONS = {"graded": world_lib.WorldConfig(), "fixed": _FIXED}


def config(version: str, seed: int) -> world_lib.WorldConfig:
  """Returns the constants of a version of the world.

  Args:
    version: one of `VERSIONS`.
    seed: seed of the world, >= 0.

  Raises:
    ValueError: there is no such version.
  """
  if version not in VERSIONS:
    raise ValueError(
      f"data.world: found {version!r}, expected one of {', '.join(VERSIONS)}."
    )
  return dataclasses.replace(VERSIONS[version], seed=seed)
