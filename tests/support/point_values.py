"""The measures of some episodes without their intervals."""

from __future__ import annotations

import types

from scipy import stats

from anysearch_jax.evaluation import columns, measures


def cell(measured):
  """Returns every measure, `n` scored and `failed` episodes as attributes."""
  table = columns.as_columns(measured)
  n = len(table.scored())
  found = {k: v.value for k, v in measures.estimates(table).items()}
  return types.SimpleNamespace(n=n, failed=len(table) - n, **found)


def by_budget(measured):
  return {b: cell(part) for b, part in columns.by_budget(measured).items()}


def wilson(successes, n, confidence=0.95):
  """Returns SciPy's rate with Wilson's interval."""
  ends = stats.binomtest(successes, n).proportion_ci(
    confidence, method="wilson"
  )
  return successes / n, ends.low, ends.high
