"""The cost of episodes in US dollars, from a table of prices."""

from __future__ import annotations

import dataclasses

import numpy as np

from anysearch_jax.evaluation import columns


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


def dollars(table: columns.Columns, prices: Prices) -> np.ndarray:
  """Returns the cost of each episode, float `[P]`.

  The cost is nan if a count with a price above 0 is unknown (files of older
  versions do not record the number of tokens read).
  """
  cost = np.zeros(len(table))
  for price, unit, count in (
    (prices.search, 1e3, table.searches),
    (prices.input, 1e6, table.input_tokens),
    (prices.output, 1e6, table.generated_tokens),
  ):
    if price:
      cost += price / unit * count
  return cost


def priced(table: columns.Columns, prices: Prices) -> columns.Columns:
  """Returns the episodes with their costs recomputed from `prices`."""
  return dataclasses.replace(table, cost=dollars(table, prices))
