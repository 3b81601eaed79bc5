"""What a study is made of."""

from __future__ import annotations

import dataclasses

# Whose policy is the base's, before any training.
UNTRAINED = "untrained"


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of a table.

  Attributes:
    name: in paths.
    label: the paper's.
    table: of the report.
    overrides: `path=value` of the training configuration.
    evaluation: likewise, of the evaluation alone.
    config: file of both; "" is the study's.
    policy_of: the row whose policy this one evaluates, or `UNTRAINED`; ""
      trains its own.
    scaffold: whether it stays on at inference.
  """

  name: str
  label: str
  table: str
  overrides: tuple[str, ...] = ()
  evaluation: tuple[str, ...] = ()
  config: str = ""
  policy_of: str = ""
  scaffold: bool = False
