"""How often a policy checks what a passage says, by budget.

A check is another search although the policy could have answered; it is counted
only where a search was left.
"""

from __future__ import annotations

import numpy as np

from anysearch_jax.evaluation import columns, inference, intervals, measures

# By what passages said, in words: how many times, and how many were checked.
KINDS = {
  "a right answer": ("shown", "verified"),
  "two values of a fact": ("contradicted", "resolved"),
}
# By kind, then by budget.
Found = dict[str, dict[int, intervals.Estimate]]


def checked(measured: columns.Measured) -> Found:
  """Returns P(another search | passages said it, a search is left).

  After a right answer any other search is a check; after two values of a fact,
  one that names the fact's entity (generated world only).

  Args:
    measured: the episodes of a row; only those that ended with an answer count.

  Returns:
    Shares with 95 % intervals; only kinds and budgets that occur.
  """
  table = columns.of(measured).scored()
  found: Found = {}
  for kind, (said, followed) in KINDS.items():
    of_kind = {
      budget: _rate(part, getattr(part, followed), getattr(part, said))
      for budget, part in columns.by_budget(
        table.where(getattr(table, said) > 0)
      ).items()
    }
    if of_kind:
      found[kind] = of_kind
  return found


def _rate(
  table: columns.Columns, followed: np.ndarray, said: np.ndarray
) -> intervals.Estimate:
  found = measures.ratios(table, [followed], [said])
  (rate,) = inference.rates(found, [float(said.sum())])
  return rate.estimate
