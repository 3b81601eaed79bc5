"""The figures' canvas: colours and marks of series, and inline SVG.

Colours are drawn as placeholders and become CSS variables, so that a figure
follows the page's theme and works on light and on dark backgrounds; text stays
text. Each series also has its own marker and dash, so nothing depends on colour
alone.
"""

from __future__ import annotations

import html
import io
import re
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib import figure
from matplotlib.backends import backend_svg

if TYPE_CHECKING:
  from matplotlib import typing as mpl_typing

SERIES = 8  # Number of series colours in page.css; then other markers follow.
_BANDS = 8  # Number of colours of stacked bars in page.css.
_GLYPHS = "●■▲◆▼✚✖★"
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("-", "--", "-.", ":", (0, (6, 1)), (0, (3, 1, 1, 1, 1, 1)))

INK, _RULE, SHADE = "#010101", "#020202", "#030303"
_FAMILIES = {"4": "series", "5": "band", "6": "on-band"}
_VARIABLES = {
  INK: "currentColor",
  _RULE: "var(--rule)",
  SHADE: "var(--shade)",
}

STYLE: dict[mpl_typing.RcKeyType, Any] = {
  "svg.fonttype": "none",
  "font.size": 9,
  "text.color": INK,
  "text.parse_math": False,
  "axes.labelcolor": INK,
  "axes.edgecolor": _RULE,
  "axes.facecolor": "none",
  "axes.grid": True,
  "axes.formatter.useoffset": False,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.titlesize": 10,
  "axes.titlelocation": "left",
  "figure.facecolor": "none",
  "figure.constrained_layout.use": True,
  "grid.color": _RULE,
  "grid.linewidth": 0.5,
  "xtick.color": INK,
  "ytick.color": INK,
  "lines.linewidth": 1.5,
  "lines.markersize": 5,
}


def color(index: int) -> str:
  """Returns the placeholder that becomes `var(--series-<index>)`."""
  return f"#0400{index % SERIES:02x}"


def band(index: int) -> str:
  """Returns the placeholder that becomes `var(--band-<index>)`."""
  return f"#0500{index % _BANDS:02x}"


def on_band(index: int) -> str:
  """Returns the placeholder that becomes `var(--on-band-<index>)`."""
  return f"#0600{index % _BANDS:02x}"


def line_style(index: int) -> dict[str, Any]:
  """Returns colour, marker and dash of a series, for matplotlib."""
  return {
    "color": color(index),
    "marker": _MARKERS[_shape(index)],
    "linestyle": _DASHES[index % len(_DASHES)],
  }


def glyph(index: int) -> str:
  """Returns the marker of a series as a character, for legends and tables."""
  return _GLYPHS[_shape(index)]


def _shape(index: int) -> int:
  """Returns the marker's index; each cycle of colours shifts the markers."""
  return (index + index // SERIES) % SERIES


def axes(title: str, x_label: str, y_label: str) -> tuple[figure.Figure, Any]:
  """Returns a figure of the page's size and its axes; call within `STYLE`.

  The axes have no type, because matplotlib's own refuse lists that they draw.
  """
  fig = figure.Figure(figsize=(4.6, 3.1))
  found = fig.add_subplot()
  found.set_title(title, pad=16)
  found.set_xlabel(x_label)
  found.set_ylabel(y_label)
  return fig, found


def svg(fig: figure.Figure, name: str, title: str) -> str:
  """Returns the figure as an `<svg>` element, without an XML header.

  Args:
    fig: the figure; drawn within `STYLE`.
    name: name that is unique on the page; it seeds the ids inside the SVG.
    title: what the figure shows, for screen readers.
  """
  buffer = io.StringIO()
  # A fixed salt makes the ids, and thus the bytes, equal in every run; a
  # different salt for each figure keeps ids on one page unique.
  with matplotlib.rc_context({"svg.hashsalt": name}):
    # `savefig` would draw every figure twice, the first time for its layout
    # only; drawing with the layout engine on arranges the figure as well.
    backend_svg.FigureCanvasSVG(fig).print_svg(buffer)
  text = buffer.getvalue()
  text = text[text.index("<svg") :]
  # A style sheet inside a figure would apply to the whole page, and the page's
  # security policy allows page.css only, which contains the figure's rule.
  for element in ("metadata", "style"):
    text = re.sub(rf"<{element}\b.*?</{element}>", "", text, flags=re.DOTALL)
  text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
  text = re.sub(r' id="[\w.]+_\d+"', "", text)
  text = re.sub(
    r"#0([456])00(0\d)",
    lambda m: f"var(--{_FAMILIES[m[1]]}-{int(m[2])})",
    text,
  )
  for placeholder, variable in _VARIABLES.items():
    text = text.replace(placeholder, variable)
  label = html.escape(title)
  return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
