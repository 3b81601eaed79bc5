"""The rows of a study."""

from __future__ import annotations

import dataclasses

# As `policy_of`: the policy of the base configuration, before training.
UNTRAINED = "untrained"


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of a table.

  Attributes:
    name: name in paths.
    label: label in the paper and the report.
    table: table of the report.
    overrides: `path=value` overrides of the training configuration.
    evaluation: `path=value` overrides of the evaluation only.
    config: configuration file of training and evaluation; "" is the study's.
    policy_of: the row whose policy this row evaluates, or `UNTRAINED`; "" means
      that this row trains its own.
    scaffold: whether the scaffold stays on at inference.
  """

  name: str
  label: str
  table: str
  overrides: tuple[str, ...] = ()
  evaluation: tuple[str, ...] = ()
  config: str = ""
  policy_of: str = ""
  scaffold: bool = False
