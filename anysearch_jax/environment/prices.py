"""The cost of an episode in US dollars."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import numpy as np

# The counts of one episode, or arrays of the counts of many.
Counts = TypeVar("Counts", float, np.ndarray)


@dataclasses.dataclass(frozen=True)
class Prices:
  """Prices in US dollars.

  Attributes:
    search: of 1,000 searches.
    input: of a million tokens that the policy reads.
    output: of a million tokens that the policy writes.
  """

  search: float = 0.0
  input: float = 0.0
  output: float = 0.0

  def __bool__(self) -> bool:
    return any(dataclasses.astuple(self))

  def dollars(
    self, *, searches: Counts, input_tokens: Counts, output_tokens: Counts
  ) -> Counts | float:
    """Returns the cost of these counts; 0 if nothing has a price.

    A count without a price adds nothing, even if it is unknown (nan).
    """
    cost: Counts | float = 0.0
    for price, unit, count in (
      (self.search, 1e3, searches),
      (self.input, 1e6, input_tokens),
      (self.output, 1e6, output_tokens),
    ):
      if price:
        cost = cost + count * price / unit
    return cost
