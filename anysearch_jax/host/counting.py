"""Parts that count what happens in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


def counters(part: object) -> Counter[str]:
  """Returns the `counters` of a part, or empty ones if it does not count."""
  counted: Counter[str] | None = getattr(part, "counters", None)
  return Counter() if counted is None else counted


def of_parts(parts: Mapping[Any, object]) -> Counter[str]:
  """Returns the counters of several parts, each under `part/counter`."""
  return Counter(
    {
      f"{part}/{name}": value
      for part in parts
      for name, value in counters(parts[part]).items()
    }
  )
