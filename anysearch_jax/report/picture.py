"""Draws one SVG file of a study: accuracy and searches against the budget.

It shows two figures of the report side by side. A stand-alone SVG has no style
sheet and appears on light and on dark backgrounds, so every colour here has
enough contrast with both: 4:1 for text, 3:1 for lines and markers (defined in
https://www.w3.org/TR/WCAG22/#contrast-minimum).
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence

from anysearch_jax.evaluation import curves, metrics
from anysearch_jax.report import canvas, plots

INK = "#757575"
SERIES = (
  "#0078bd",
  "#d55e00",
  "#008563",
  "#b05a92",
  "#8f7200",
  "#3d8fc4",
  "#7d6fc0",
  "#757d85",
)
_COLORS = {
  "currentColor": INK,
  "var(--rule)": "#80808066",
  # The background of budgets above the largest training budget.
  "var(--shade)": "#8080802e",
  **{f"var(--series-{i})": color for i, color in enumerate(SERIES)},
}
_PANELS = (
  ("accuracy", "Accuracy", "exact match"),
  ("searches", "Searches made", "mean searches"),
)
_GAP, _LEGEND = 16.0, 26.0


def svg(rows: Sequence[metrics.Row], *, trained: int) -> str:
  """Draws accuracy and mean searches of each row, with 95% intervals.

  Args:
    rows: at least one; colours and markers are those of the report.
    trained: the largest budget of training; larger budgets are shaded.

  Returns:
    The text of an SVG file. Equal rows give equal bytes.
  """
  measured = [
    curves.curve(row.label, row.columns, trained=trained) for row in rows
  ]
  panels = [
    plots.against_budget(
      [
        plots.Series(i, [(p.budget, getattr(p, measure)) for p in c.points])
        for i, c in enumerate(measured)
      ],
      name=f"picture-{measure}",
      title=title,
      y_label=y_label,
      trained=trained,
      diagonal=measure == "searches",
    )
    for measure, title, y_label in _PANELS
  ]
  width, height = _size(panels[0])
  whole = len(panels) * width + (len(panels) - 1) * _GAP
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" '
    f'xmlns:xlink="http://www.w3.org/1999/xlink" '
    f'width="{whole:g}pt" height="{height + _LEGEND:g}pt" '
    f'viewBox="0 0 {whole:g} {height + _LEGEND:g}" font-family="sans-serif">',
    # The same line as in page.css, because `canvas` removes a figure's style.
    "<style>svg * { stroke-linejoin: round; stroke-linecap: butt }</style>",
    *(
      # A nested "pt" would be scaled to 4/3 of a user unit, so drop the unit.
      re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', panel).replace(
        "<svg", f'<svg x="{i * (width + _GAP):g}" y="{_LEGEND:g}"', 1
      )
      for i, panel in enumerate(panels)
    ),
    _legend([row.label for row in rows], whole / 2),
    "</svg>\n",
  ]
  return _colored("\n".join(parts))


def frontier(
  rows: Mapping[str, tuple[float, float]], edge: Sequence[tuple[float, float]]
) -> str:
  """Draws rows below the accuracy that the best agents reach.

  Args:
    rows: accuracy and mean searches of each row, by its label.
    edge: the same of the best agents.

  Returns:
    The text of an SVG file. Equal rows give equal bytes.
  """
  panel = plots.below_frontier(
    rows, edge, name="picture-frontier", title="Accuracy and mean searches"
  )
  return _colored(
    panel.replace(
      "<svg",
      '<svg xmlns="http://www.w3.org/2000/svg" '
      'xmlns:xlink="http://www.w3.org/1999/xlink" font-family="sans-serif"',
      1,
    )
    + "\n"
  )


def _colored(text: str) -> str:
  for variable, color in _COLORS.items():
    text = text.replace(variable, color)
  return text


def _size(panel: str) -> tuple[float, float]:
  """Returns the width and height of a figure."""
  found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', panel)
  if found is None:
    raise ValueError("Found a figure without a viewBox; expected one at 0 0.")
  return float(found[1]), float(found[2])


def _legend(labels: Sequence[str], middle: float) -> str:
  """Returns a centred line with each row's coloured marker and label."""
  entries = "<tspan>\u2003</tspan>".join(
    f'<tspan fill="{SERIES[i % len(SERIES)]}">{canvas.glyph(i)}</tspan>'
    f"<tspan> {html.escape(label)}</tspan>"
    for i, label in enumerate(labels)
  )
  return (
    f'<text x="{middle:g}" y="16" text-anchor="middle" font-size="11" '
    f'fill="{INK}" xml:space="preserve">{entries}</text>'
  )
