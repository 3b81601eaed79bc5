"""States a budget in the words of an environment.

The texts of units besides searches are in `methods/texts/budget.toml` and
`budget_world.toml`, or in a file of the user (`episode.budget_file`). A budget
of searches alone adds nothing to any text.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping

from anysearch_jax import budgets
from anysearch_jax.environment import spec, wording
from anysearch_jax.host import json_files

_ASSIGNED = wording.Slots(may=("N", "coarse"))
_REMAINING = wording.Slots(may=("N", "R", "U", "coarse"))
_STATED = ("tokens", "dollars", "seconds")
_SLOTS = (
  dict.fromkeys(_STATED, _ASSIGNED)
  | {f"{unit}_left": _REMAINING for unit in _STATED}
  | {"unlimited": wording.LINE}
)
# The generated world has words for few numbers. It counts tokens and seconds in
# tens, and dollars in cents, up to `_LARGEST`.
_COARSE = {"tokens": 0.1, "dollars": 100.0, "seconds": 0.1}
_LARGEST = 20
_BLOCK_END = "</budget>"
# The value of `episode.budget_file` for caps that no text states.
SILENT = "silent"


def state_assigned(file: str, caps: budgets.Budget) -> str:
  """Returns the beginning of a prompt, which states the caps besides searches.

  It is "" without such a cap. `file` has the texts, as
  `spec.Environment.units`.
  """
  return _stated(file, caps, "", dict.fromkeys(_STATED, 0))


def state_remaining(
  line: str, file: str, caps: budgets.Budget, used: Mapping[str, float]
) -> str:
  """Adds what remains of the caps besides searches to the line before a turn.

  Args:
    line: the line, which states the searches; an empty line remains empty.
    file: the file of texts, as `spec.Environment.units`.
    caps: the episode's budget; without caps besides searches the line is
      returned unchanged.
    used: the spent amount, by unit.

  Returns:
    The line, with the texts at the end of its budget block, or after the line
    if it has no block.
  """
  stated = _stated(file, caps, "_left", used)
  if not stated or not line:
    return line
  if _BLOCK_END not in line:
    return f"{line}{stated.strip()}\n"
  return line.replace(_BLOCK_END, stated + _BLOCK_END, 1)


def _stated(
  file: str, caps: budgets.Budget, suffix: str, used: Mapping[str, float]
) -> str:
  """Returns the texts of all caps; a text is named by its unit and `suffix`."""
  parts = []
  for unit, cap in caps.caps:
    if unit not in _STATED:
      continue
    remaining = max(cap - used[unit], 0)
    # The small term is for products such as .29 * 100, just below a number.
    coarse = min(_LARGEST, int(remaining * _COARSE[unit] + 1e-9))
    parts.append(
      texts(file)
      .values[unit + suffix]
      .format(
        N=_number(cap),
        U=_number(used[unit]),
        R=_number(remaining),
        coarse=coarse,
      )
    )
  return "".join(parts)


@functools.cache
def with_budget_file(env: spec.Environment, file: str) -> spec.Environment:
  """Returns an environment that states caps as `episode.budget_file` says.

  Raises ValueError if the file cannot be read, lacks a text, or has an unknown
  one or an unknown placeholder.
  """
  if file == SILENT:
    return dataclasses.replace(env, states_caps=False)
  path = str(pathlib.Path(file).absolute())
  try:
    texts(path)
  except ValueError as error:
    raise ValueError(f"config.episode.budget_file: {error}") from error
  return dataclasses.replace(env, units=path)


@functools.cache
def texts(file: str) -> wording.Texts:
  """Returns the texts of a file, shipped or at a path; a process reads it once.

  Raises ValueError as `with_budget_file`.
  """
  values = wording.read(wording.SHIPPED / file, _SLOTS, shipped="budget.toml")
  return wording.Texts(values, file, json_files.sha256(values))


def _number(value: float) -> str:
  """Returns a number without an exponent or superfluous digits.

  Small numbers have more decimals, so that no number above 0 is stated as 0.
  """
  value = round(value, 12)  # Differences of floats leave dust.
  decimals = max(6, 2 - math.floor(math.log10(value))) if value else 0
  text = f"{value:.{decimals}f}"
  return text.rstrip("0").rstrip(".") if value else text
