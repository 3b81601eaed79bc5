"""Figures: series are told apart, and means leave out what was not logged."""

from __future__ import annotations

import re

from anysearch_jax.evaluation import intervals
from anysearch_jax.report import canvas, plots


def test_twelve_rows_are_distinguishable_and_near_their_budget():
  marks = {(canvas.color(i), canvas.glyph(i)) for i in range(24)}
  assert len(marks) == 24
  point = intervals.Estimate(0.5, 0.4, 0.6)
  svg = plots.against_budget(
    [plots.Series(i, [(1, point), (2, point)]) for i in range(24)],
    name="many",
    title="many",
    y_label="",
  )
  marker = r'<use [^>]*x="([\d.]+)"[^>]*var\(--series'
  places = [float(x) for x in re.findall(marker, svg)]
  assert len(places) == 2 * 24
  # No row's points are near the middle between two budgets.
  first, last = min(places), max(places)
  assert not [x for x in places if 0.3 < (x - first) / (last - first) < 0.7]


def test_trailing_mean():
  nan = float("nan")
  found = plots.trailing_mean([2.0, 4.0, nan, 6.0, nan, nan], 2)
  assert [None if x != x else float(x) for x in found] == [
    2.0, 3.0, 4.0, 6.0, 6.0, None,
  ]  # fmt: skip
