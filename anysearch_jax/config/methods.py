"""Which system runs; `config` re-exports this class."""

from __future__ import annotations

import dataclasses

from anysearch_jax.config.settings import (
  POSITIVE,
  identity,
  learning,
  placement,
)


@dataclasses.dataclass(frozen=True)
class MethodConfig:
  """Which of the compared systems runs, and its own settings."""

  name: str = identity("anysearch")
  """The system, or `file.py:NAME` of yours (docs/methods.md)."""
  judge: str = learning("")
  """`module:NAME` or `file.py:NAME` of a function that measures a trajectory in
  place of the system's judge; "": the system's, docs/methods.md."""
  options: tuple[str, ...] = learning(())
  """`NAME=VALUE` of the system's options, which its file lists; the others have
  their defaults, those of its paper or its authors' scripts."""
  measure_deadline: float = placement(120.0, POSITIVE)
  """Seconds in which a judge's measures of one trajectory are due; a trajectory
  without them counts as failed."""
