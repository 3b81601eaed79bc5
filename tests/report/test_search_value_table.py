"""The table of what one more search was worth."""

from __future__ import annotations

import study

from anysearch_jax.report import build as report


def _ends(worth, low, high, **by):
  estimate = {"value": worth, "low": low, "high": high}
  counts = {"ends": 10, "failed": 2, "cuts": 4}
  return counts | {"gained": 0.5, "lost": 0.25, "worth": estimate} | by


def test_search_value_is_shown_if_measured():
  rows = [study.row("A", questions=4, budgets=(1,))]
  part = _ends(None, None, None)
  bounds = {"low": -0.5, "high": 0.75}
  own = {"worth_bounds": bounds, "gain_bounds": bounds, "cuts_reached": 3}
  asks = {"value": 0.2, "low": 0.1, "high": 0.3}
  summary = {
    "stop": _ends(0.25, 0.1, 0.4, by_hops={"2": part}),
    "continue": _ends(0.25, 0.1, 0.4, gain=asks, asks=asks, **own),
  }
  data = report.build(rows, search_values={"A": summary}).data
  unasked, whole, of_two = data["tables"]["worth"]["lines"]
  assert unasked["keys"] == ("A", "answered with budget left", "all")
  assert [cell["value"] for cell in unasked["cells"]] == [
    0.25, 0.5, 0.25, 0.2, -0.5, 0.75, -0.5, 0.75, 0.2, 0.75,
  ]  # fmt: skip
  assert whole["keys"] == ("A", "searched", "all")
  assert whole["cells"][0] == {"value": 0.25, "low": 0.1, "high": 0.4, "n": 4}
  assert whole["cells"][3] is whole["cells"][-1] is None  # Always reached.
  assert of_two["keys"][2] == "hops 2"
  assert of_two["cells"][0]["value"] is None
  unasked = report.build(rows, search_values={"A": {}}).data
  assert unasked["tables"]["worth"]["lines"] == ()
