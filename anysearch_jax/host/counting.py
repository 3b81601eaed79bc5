"""Parts that count what happens in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Counting(Protocol):
  """A part that counts events in `counters` since they were last cleared."""

  counters: Counter[str]


def counters(part: object) -> Counter[str]:
  """Returns the counters of a part, or empty ones if it does not count."""
  return part.counters if isinstance(part, Counting) else Counter()


def of_parts(parts: Mapping[Any, object]) -> Counter[str]:
  """Returns the counters of several parts, each after its part's name."""
  return Counter(
    {
      f"{part}/{name}": value
      for part in parts
      for name, value in counters(parts[part]).items()
    }
  )
