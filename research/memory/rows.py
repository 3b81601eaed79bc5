"""The rows of the memory experiment, for `research.study --study=memory`.

Each row is the configuration with these changes, in both forms of the
experiment. Every training is also evaluated greedily.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anysearch_jax as aj
from research.claims import Claim, Row

TITLE = "Memories of known reliability in a language model"
_BATCH = {"objective": {"normalize": "batch"}}
_OFF = {"reward": {"gamma_mode": "off"}}
_PRICE = {"gamma_mode": "fixed", "gamma_fixed": 0.1, "use_rel": False}
CHANGES: dict[str, Mapping[str, Mapping[str, Any]]] = {
  "anysearch": {},
  "batch_anysearch": _BATCH,
  "batch_no_tool": {**_OFF, **_BATCH},
  "no_tool": _OFF,
  "priced": {"reward": _PRICE, **_BATCH},
}
LABELS = {
  "anysearch": "AnySearch",
  "batch_anysearch": "AnySearch, batch",
  "batch_no_tool": "No tool reward, batch",
  "no_tool": "No tool reward",
  "priced": "Priced",
}
GREEDY = "_greedy"


def rows(base: aj.ExperimentConfig) -> tuple[Row, ...]:
  """Returns the trained rows, and the same policies played greedily."""
  trained = [
    Row(name, LABELS[name], "sampled", _overrides(changes))
    for name, changes in CHANGES.items()
  ]
  greedy = [
    Row(
      row.name + GREEDY,
      f"{row.label}, greedy",
      "greedy",
      evaluation=("sampling.temperature=0.0",),
      policy_of=row.name,
    )
    for row in trained
  ]
  return (*trained, *greedy)


def _overrides(changes: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
  """Returns changes as a user writes them after `--config.`."""
  return tuple(
    f"{group}.{name}={value}"
    for group, values in changes.items()
    for name, value in values.items()
  )


# `research.memory.results` decides the claims by form, which these are not.
CLAIMS: dict[str, tuple[Claim, ...]] = {}
