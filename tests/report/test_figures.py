"""Figures: rows are told apart, and one stands alone on light and dark."""

from __future__ import annotations

import re
import types
from xml.etree import ElementTree

import pytest
import study
from matplotlib import figure

from anysearch_jax.evaluation import inference, metrics
from anysearch_jax.report import figures
from anysearch_jax.report import study as study_lib


@pytest.fixture(scope="module")
def rows():
  size = {"questions": 12, "budgets": (0, 1, 3, 6)}
  return [
    study.row("AnySearch", **size),
    study.row("γ<0 & more", thrift=0.8, **size),
  ]


@pytest.fixture(scope="module")
def text(rows):
  return figures.standalone_file(rows, trained=5)


def test_picture_is_one_valid_file_with_every_row(text):
  root = ElementTree.fromstring(text)
  assert root.tag == "{http://www.w3.org/2000/svg}svg"
  assert root.get("aria-label") == "Accuracy and Searches made"
  words = "".join(root.itertext())
  for label in ("AnySearch", "γ<0 & more", "never trained", "searches = B"):
    assert label in words
  ids = [element.get("id") for element in root.iter() if element.get("id")]
  assert len(ids) == len(set(ids))


def test_picture_needs_no_page_around_it(text):
  assert "var(" not in text and "currentColor" not in text
  assert not re.search(r"#0[1-6]0[0-6]0", text)  # Placeholders of `figures`.
  linked = re.findall(r'xlink:href="([^"]*)"', text)
  assert linked and all(f'id="{link[1:]}"' in text for link in linked)


def test_equal_rows_give_equal_bytes(rows, text):
  assert figures.standalone_file(rows, trained=5) == text


def test_the_picture_lies_beside_the_page(rows, tmp_path):
  study.write(tmp_path / "report.html", rows)
  written = (tmp_path / "curves.svg").read_text("utf-8")
  assert written == figures.standalone_file(rows, trained=5)


def test_twelve_rows_are_distinguishable_and_near_their_budget():
  marks = {
    (figures.line_style(i)["color"], figures.glyph(i)) for i in range(24)
  }
  assert len(marks) == 24
  same = inference.Estimate(0.5, 0.4, 0.6)
  points = dict.fromkeys((1, 2), types.SimpleNamespace(tp=same))
  rows = [metrics.Curve(str(i), points, same) for i in range(24)]
  axes = figure.Figure().add_subplot()
  index = {row.label: int(row.label) for row in rows}
  figures.against_budget(axes, "tp", rows, index, 5)
  places = [x for line in axes.lines for x in line.get_xdata()]
  assert len(places) == 2 * 24
  # No row's points are near the middle between two budgets.
  first, last = min(places), max(places)
  assert not [x for x in places if 0.3 < (x - first) / (last - first) < 0.7]


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
  return study_lib.Training("A", records)


@pytest.mark.parametrize(
  ("phase", "counts"),
  [
    (1, {1: 0, 2: 0, 3: 8, 4: 0, 5: 0}),  # Phase I plays one budget.
    (2, {0: 8, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0}),  # A fixed budget of 0.
    (2, {1: 0, 2: 0, 7: 8}),  # A fixed budget above the curriculum's.
    (2, {1: 3, 2: 5}),
  ],
)
def test_the_sampling_figure_shows_played_budgets(phase, counts):
  svg = figures.sampling(_played(phase, counts), name="x")
  for b in range(9):
    assert (f">B = {b}<" in svg) == bool(counts.get(b))
  # Probabilities are not played budgets.
  assert figures.sampling(_played(phase, {}), name="x") is None


def test_the_front_by_hand():
  front = [(0.0, 0.2), (0.0, 0.2), (0.8, 0.5), (2.0, 0.6)]
  dominated = [(0.8, 0.4), (1.0, 0.5), (2.0, 0.5)]
  assert figures.front([*dominated, *front]) == front
