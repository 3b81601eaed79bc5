"""How often a policy searches for what it remembers, by reliability and budget.

The first fact of a chain is the only one that every episode reaches with its
whole budget, so only that one is counted.
"""

from __future__ import annotations

import numpy as np

from anysearch_jax.evaluation import columns, inference, intervals, measures

# By reliability of the memory, then by budget.
Found = dict[float, dict[int, intervals.Estimate]]


def searched(measured: columns.Measured) -> Found:
  """Returns P(first fact searched | memory holds it), with 95 % intervals.

  Args:
    measured: the episodes of a row; failed ones are left out.

  Returns:
    Ascending reliabilities and budgets of at least 1; empty if no question
    tells how reliable memory is.
  """
  table = columns.of(measured).scored()
  table = table.where((table.budget >= 1) & ~np.isnan(table.reliability))
  return {
    float(reliability): {
      budget: _rate(part)
      for budget, part in columns.by_budget(
        table.where(table.reliability == reliability)
      ).items()
    }
    for reliability in np.unique(table.reliability)
  }


def _rate(table: columns.Columns) -> intervals.Estimate:
  found = measures.ratios(table, [table.asked], [np.ones(len(table))])
  (rate,) = inference.rates(found, [len(table)])
  return rate.estimate
