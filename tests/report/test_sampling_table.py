"""Tests that the sampling table counts the budgets that were played."""

from __future__ import annotations

import pytest
import study

from anysearch_jax.evaluation import metrics
from anysearch_jax.report import build as report
from anysearch_jax.report import figures


@pytest.fixture(scope="module")
def rows():
  return [study.row("A", questions=6, budgets=(0, 2, 5))]


def _played(phase, counts, *, rollouts=4):
  """Builds a run whose rollouts played these budgets; adds probabilities."""
  records = tuple(
    {
      "rollout": rollout,
      "step": 5 * rollout,
      "phase": phase,
      **{f"curriculum/p{b}": 0.2 for b in range(1, 6)},
      **{f"curriculum/count{b}": n for b, n in counts.items()},
    }
    for rollout in range(rollouts)
  )
  return metrics.Training("A", records)


@pytest.mark.parametrize(
  ("phase", "counts"),
  [
    (1, {1: 0, 2: 0, 3: 8, 4: 0, 5: 0}),  # Phase I plays one budget.
    (2, {1: 0, 2: 0, 3: 0, 4: 0, 5: 8}),  # A fixed budget of 5.
    (2, {0: 8, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0}),  # A fixed budget of 0.
    (2, {1: 0, 2: 0, 7: 8}),  # A fixed budget above the curriculum's.
    (2, {1: 3, 2: 5}),
  ],
)
def test_sampling_table_shows_played_budgets(rows, phase, counts):
  run = _played(phase, counts)
  table = report.build(rows[:1], training=[run]).data["tables"]["sampling"]
  played = {b: n for b, n in counts.items() if n}
  assert [c["full_name"] for c in table["columns"]] == [
    *(f"questions B = {b}" for b in played),
    *(f"share B = {b}" for b in played),
  ]
  first, *rest = (
    [cell["value"] for cell in line["cells"]] for line in table["lines"]
  )
  assert first == [*played.values(), *(n / 8 for n in played.values())]
  assert len(rest) == 3 and all(cells == first for cells in rest)
  phases = {line["keys"][1] for line in table["lines"]}
  assert phases == {"I" if phase == 1 else "II"}
  svg = figures.sampling(run, name="x")
  for b in range(9):
    assert (f">B = {b}<" in svg) == (b in played)


def test_probabilities_are_not_shown_as_played_budgets(rows):
  run = _played(2, {})
  assert figures.sampling(run, name="x") is None
  data = report.build(rows[:1], training=[run]).data
  assert data["tables"]["sampling"]["lines"] == ()
