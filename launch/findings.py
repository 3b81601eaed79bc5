"""The findings of the checks of `doctor`: ok, a warning, or a problem."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

OK = "ok"
WARNING = "warning"
PROBLEM = "problem"


class Finding(NamedTuple):
  """The result of a check.

  level: `OK`, `WARNING` or `PROBLEM`.
  found: sentence or phrase about the state that was found.
  todo: remedy; "": none is needed.
  """

  level: str
  found: str
  todo: str = ""


ok = functools.partial(Finding, OK)
warning = functools.partial(Finding, WARNING)
problem = functools.partial(Finding, PROBLEM)  # Prevents a run.
Check = Callable[[], Finding | Iterable[Finding]]


def size(count: float) -> str:
  """Formats a number of bytes for people, as "1.5 GB"."""
  for unit in ("B", "KB", "MB"):
    if count < 1000:
      return f"{count:.3g} {unit}"
    count /= 1000
  return f"{count:,.1f} GB"
