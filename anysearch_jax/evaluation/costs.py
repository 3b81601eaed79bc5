"""The costs of evaluated episodes in US dollars, from a table of prices."""

from __future__ import annotations

import dataclasses

import numpy as np

from anysearch_jax import budgets as budgets_lib
from anysearch_jax.evaluation import columns


def dollars(table: columns.Columns, prices: budgets_lib.Prices) -> np.ndarray:
  """Returns the cost of each episode, float `[P]`.

  The cost is nan if a count with a price above 0 is unknown (files of older
  versions do not record the number of tokens read).
  """
  return np.zeros(len(table)) + prices.dollars(
    searches=table.searches,
    input_tokens=table.input_tokens,
    output_tokens=table.generated_tokens,
  )


def priced(
  table: columns.Columns, prices: budgets_lib.Prices
) -> columns.Columns:
  """Returns the episodes with their costs recomputed from `prices`."""
  return dataclasses.replace(table, cost=dollars(table, prices))
