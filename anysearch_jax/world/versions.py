"""The versions of the generated world, which `data.world` names.

* `fixed`: a memory is right or wrong in all snapshots, and nothing tells which;
  a tenth are wrong. A policy can learn by heart which of them to search.
* `graded`: each relation has a reliability. A memory is right in a new snapshot
  with that probability, so that only searching finds out. More facts are known
  and questions are longer, so that budgets bind up to 8.
"""

from __future__ import annotations

import dataclasses

from anysearch_jax.world import world as world_lib

# Relations in the order of `relations.ALL`.
_GRADED = world_lib.WorldConfig(
  known=(
    *(0.5, 0.45, 0.45, 0.6, 0.55, 0.6),
    *(0.5, 0.5, 0.9, 0.75),
  ),
  stale=0.0,
  changes=(
    *(0.0, 0.5, 0.5, 0.0, 0.2, 0.5),
    *(0.2, 0.2, 0.0, 0.0),
  ),
  hop_mix=(0.1, 0.2, 0.25, 0.2, 0.15, 0.1),
)
VERSIONS = {"fixed": world_lib.WorldConfig(), "graded": _GRADED}


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
