"""What episodes cost in US dollars, by a table of prices."""

from __future__ import annotations

import dataclasses

import numpy as np

from anysearch_jax.evaluation import columns


@dataclasses.dataclass(frozen=True)
class Prices:
  """US dollars: of a thousand searches, a million tokens read, or written."""

  search: float = 0.0
  input: float = 0.0
  output: float = 0.0

  def __bool__(self) -> bool:
    return any(dataclasses.astuple(self))


def dollars(table: columns.Columns, prices: Prices) -> np.ndarray:
  """What each episode costs, float `[P]`.

  What is free needs no count; nan where a count that is priced is not known
  (files of older versions do not tell what the policy read).
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
  """The same episodes at other prices than they were recorded with."""
  return dataclasses.replace(table, cost=dollars(table, prices))
