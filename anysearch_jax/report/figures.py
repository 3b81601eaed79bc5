"""Every figure of a study as SVG: for the page, or as a file of its own.

Colours are drawn as placeholders and become CSS variables, so that a figure
follows the page's theme and works on light and on dark backgrounds; text stays
text. Each row also has its own marker and dash, so nothing depends on colour
alone. A file of its own has no style sheet, so its colours have enough contrast
with both backgrounds: 4:1 for text, 3:1 for lines and markers (defined in
https://www.w3.org/TR/WCAG22/#contrast-minimum).
"""

from __future__ import annotations

import functools
import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import markupsafe
import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib import figure, lines, ticker
from matplotlib.backends import backend_svg

from anysearch_jax.evaluation import metrics
from anysearch_jax.report import study as study_lib

# Number of series colours in page.css, and of bands; then others follow.
SERIES = 9
_GLYPHS = "●■▲◆▼✚✖★◄"
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")
_DASHES = ("-", "--", "-.", ":", (0, (6, 1)), (0, (3, 1, 1, 1, 1, 1)))
_SIZE = 4.6, 3.1  # Of a figure, in inches.
# Placeholders; "#0N00IJ" is colour IJ of family N, from 4 on.
_INK, _RULE, _SHADE = "#010101", "#020202", "#030303"
_FAMILIES = ("series", "band")
_VARIABLES = {
  _INK: "currentColor",
  _RULE: "var(--rule)",
  _SHADE: "var(--shade)",
}
# Colours of a file of its own, by the variable that they stand for. As those in
# page.css, they are as far apart as nine can be for colour-blind readers too,
# by OKLab's distance after https://doi.org/10.1109/TVCG.2009.113
INK = "#757575"
COLORS = tuple(
  "#625bf2 #df7388 #62a018 #9e35b5 #b04102 #2398fe #b071c8 #606a58 "
  "#d72d89".split()
)
_ALONE = {
  "currentColor": INK,
  "var(--rule)": "#80808066",
  "var(--shade)": "#8080802e",
  **{f"var(--series-{i})": color for i, color in enumerate(COLORS)},
}
_WORDS = study_lib.WORDS
# Logged quantities with a name of their own between two fixed parts.
_NAMED = (
  ("reward/", "", "reward term"),
  ("engine/server/", "/fingerprint", "fingerprint gap"),
)
# Of the page's first figures.
MAIN = ("accuracy", "searches")


def _color(family: str, index: int) -> str:
  """Returns the placeholder of a colour; each family has `SERIES`."""
  return f"#0{4 + _FAMILIES.index(family)}00{index % SERIES:02x}"


def line_style(index: int) -> dict[str, Any]:
  """Returns colour, marker and dash of a row, for matplotlib."""
  return {
    "color": _color("series", index),
    "marker": _MARKERS[_shape(index)],
    "linestyle": _DASHES[index % len(_DASHES)],
  }


def glyph(index: int) -> str:
  """Returns the marker of a row as a character, for legends and tables."""
  return _GLYPHS[_shape(index)]


def _shape(index: int) -> int:
  """Returns the marker's index; each cycle of colours shifts the markers."""
  return (index + index // SERIES) % SERIES


# Styles what the decorated function draws.
_styled = matplotlib.rc_context(_WORDS["style"])


def _axes(title: str, x_label: str, y_label: str, axes: Any = None) -> Any:
  """Returns titled axes, by default those of a figure of the page's size.

  They have no type: matplotlib's own refuses lists that it draws.
  """
  if axes is None:
    axes = figure.Figure(figsize=_SIZE).add_subplot()
  axes.set_title(title, pad=16)
  axes.set_xlabel(x_label)
  axes.set_ylabel(y_label)
  return axes


def _note(axes: Any, text: str, at: Any, shift: tuple, **how: Any) -> None:
  """Writes text beside a point, `shift` points away from it."""
  axes.annotate(text, at, xytext=shift, textcoords="offset points", **how)


def _svg(drawn: figure.Figure, name: str) -> markupsafe.Markup:
  """Returns a figure as an `<svg>` element, its text escaped by matplotlib."""
  buffer = io.StringIO()
  # A fixed salt makes the ids, and thus the bytes, equal in every run; a
  # different salt for each figure keeps ids on one page unique.
  with matplotlib.rc_context({"svg.hashsalt": name}):
    # `savefig` would draw every figure twice, the first time for its layout
    # only; drawing with the layout engine on arranges the figure as well.
    backend_svg.FigureCanvasSVG(drawn).print_svg(buffer)
  text = buffer.getvalue()
  text = text[text.index("<svg") :]
  # A style sheet inside a figure would apply to the whole page, and the page's
  # security policy allows page.css only, which contains the figure's rule.
  for element in ("metadata", "style"):
    text = re.sub(rf"<{element}\b.*?</{element}>", "", text, flags=re.DOTALL)
  text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
  text = re.sub(r' id="[\w.]+_\d+"', "", text)
  text = re.sub(
    r"#0([45])00(0\d)",
    lambda m: f"var(--{_FAMILIES[int(m[1]) - 4]}-{int(m[2])})",
    text,
  )
  for placeholder, variable in _VARIABLES.items():
    text = text.replace(placeholder, variable)
  title = " and ".join(axes.get_title("left") for axes in drawn.axes)
  label = f'<svg role="img" aria-label="{html.escape(title)}"'
  return markupsafe.Markup(text.replace("<svg", label, 1))


def _line(axes: Any, index: int, points: Iterable, shift: float = 0.0) -> None:
  """Draws (x, estimate) in order, without those of an undefined value."""
  defined = [(x, e) for x, e in points if None not in (x, e.value)]
  bars = [
    (0.0, 0.0) if low is None else (max(0.0, at - low), max(0.0, high - at))
    for _, (at, low, high) in defined
  ]
  axes.errorbar(
    [x + shift for x, _ in defined],
    [e.value for _, e in defined],
    yerr=np.transpose(bars) if np.any(bars) else None,
    elinewidth=0.9,
    **line_style(index),
  )


def against_budget(
  axes: Any,
  measure: str,
  found: Sequence[metrics.Curve],
  index: Mapping[str, int],
  trained: int,
) -> None:
  """Draws a measure of rows against the budget.

  With `searches`, a dotted line is their upper bound; with `accuracy`, the best
  agent's where it is known. Budgets above `trained` are shaded.
  """
  budgets = sorted({b for curve in found for b in curve.points})
  dotted = {"color": _INK, "linestyle": (0, (1, 2))}
  if measure == "searches" and budgets:
    ends = [budgets[0], budgets[-1]]
    axes.plot(ends, ends, linewidth=0.8, **dotted)
    _note(axes, "searches = B", ends[1:] * 2, (-14, 0), ha="right", va="top")
  # Of the first row that has it; its regret is that accuracy minus its own.
  known: list[list[tuple[int, float]]] = [
    [
      (budget, p.accuracy.value + p.regret.value)
      for budget, p in c.points.items()
      if p.accuracy.value is not None and p.regret.value is not None
    ]
    for c in found
    if measure == "accuracy"
  ]
  optimum = next(filter(None, known), [])
  if optimum:
    axes.plot(*zip(*optimum), linewidth=1.1, **dotted)
    _note(axes, "optimum", optimum[-2:][0], (-6, 3), ha="right", va="bottom")
  # Shift the rows slightly, so that their error bars do not overlap.
  step = 0.4 / max(SERIES, len(found))
  lows = [0.0]  # Regret may be negative.
  for place, c in enumerate(found):
    shown = [(budget, getattr(p, measure)) for budget, p in c.points.items()]
    lows += [x for _, e in shown for x in e[:2] if x is not None]
    _line(axes, index[c.label], shown, (place - (len(found) - 1) / 2) * step)
  axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  axes.set_ylim(bottom=min(lows))
  if budgets and budgets[-1] > trained:
    axes.axvspan(trained + 0.5, budgets[-1] + 0.4, color=_SHADE, zorder=0)
    at = (trained + budgets[-1] + 0.9) / 2, 1.0
    where = axes.get_xaxis_transform()
    _note(axes, "never trained", at, (0, 0), xycoords=where, ha="center")


@_styled
def curves(
  found: Sequence[metrics.Curve],
  measure: str,
  index: Mapping[str, int],
  *,
  name: str,
  trained: int,
  title: str = "",
) -> markupsafe.Markup:
  """Draws a measure of rows against the budget.

  `measure` is accuracy, searches, tp, total_tokens or regret, and `index` has
  the colour of each label. `name` is unique on the page; `title` replaces the
  measure's own.
  """
  own, y_label = _WORDS["curves"][measure]
  axes = _axes(title or own, "search budget B", y_label)
  against_budget(axes, measure, found, index, trained)
  return _svg(axes.figure, f"{name}-{measure}-{title}")


def front(offers: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
  """Returns the Pareto front of (price, accuracy), by ascending price.

  No other offer is at least as accurate for no more, unless it is equal.
  """
  best: list[tuple[float, float]] = []
  for offer in sorted(offers, key=lambda offer: (offer[0], -offer[1])):
    if not best or offer[1] > best[-1][1] or offer == best[-1]:
      best.append(offer)
  return best


@_styled
def prices(
  found: Sequence[metrics.Curve], index: Mapping[str, int], *, name: str
) -> list[markupsafe.Markup]:
  """Draws accuracy over each price, with rings around the Pareto front."""
  drawn = []
  for price, (title, x_label) in _WORDS["prices"].items():
    lines = {
      curve.label: [
        (getattr(part, price).value, part.accuracy)
        for part in curve.points.values()
      ]
      for curve in found
    }
    offers = [
      (paid, accuracy.value)
      for points in lines.values()
      for paid, accuracy in points
      if paid is not None and accuracy.value is not None
    ]
    if price == "cost" and not any(paid for paid, _ in offers):
      continue
    axes = _axes(f"Accuracy for its {title}", x_label, "exact match")
    for label, points in lines.items():
      _line(axes, index[label], points)
    ring = {"markersize": 11, "markerfacecolor": "none", "markeredgewidth": 0.9}
    axes.plot(*zip(*front(offers)), "o", markeredgecolor=_INK, **ring)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6))
    axes.set_ylim(bottom=0)
    drawn.append(_svg(axes.figure, f"{name}-{price}"))
  return drawn


@_styled
def sampling(run: study_lib.Training, *, name: str) -> markupsafe.Markup | None:
  """Draws the budgets that each rollout played; None without counts.

  A rollout without a record stays empty.
  """
  # Probabilities (`curriculum/p1`, ...) cannot replace the counts: they are not
  # used in Phase I or with a fixed budget.
  counts = {
    r["rollout"]: {
      int(found[1]): int(count)
      for key, count in r.items()
      if (found := re.fullmatch(r"curriculum/count(\d+)", key))
    }
    for r in run.records
  }
  played = {b for found in counts.values() for b, n in found.items() if n}
  if not played:
    return None
  rollouts = range(min(counts), max(counts) + 1)
  edges = np.arange(rollouts[0], rollouts[-1] + 2) - 0.5
  axes = _axes("questions of each budget", "rollout", "")
  axes.grid(False)
  budgets = sorted(played)
  drawn = np.array(
    [[counts.get(r, {}).get(b, 0) for r in rollouts] for b in budgets]
  )
  axes.hist(
    [rollouts] * len(budgets),
    edges,
    weights=list(drawn),
    color=[_color("band", budget - 1) for budget in budgets],
    edgecolor=_INK,
    linewidth=0.5,
    histtype="stepfilled",
    stacked=True,
  )
  tops = drawn[:, -1].cumsum()
  for budget, count, top in zip(budgets, drawn[:, -1], tops, strict=True):
    if count > 0.03 * tops[-1]:
      how = {"va": "center", "annotation_clip": False}
      at = edges[-1], top - count / 2
      _note(axes, f"B = {budget}", at, (4, 0), **how)
  _mark_phases(axes, rollouts[0], _phase2(run), 0.5)
  axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  axes.set_ylim(bottom=0)
  axes.set_xlim(edges[0], edges[-1])
  return _svg(axes.figure, name)


@_styled
def histories(
  training: Sequence[study_lib.Training], index: Mapping[str, int]
) -> list[markupsafe.Markup]:
  """Draws a figure for each logged quantity that any of the runs has.

  Logged values are faint, their trailing mean is strong.
  """
  starts = {_phase2(run) for run in training}
  phase2 = starts.pop() if len(starts) == 1 else None
  known: dict[str, str] = _WORDS["histories"]
  logged = {key for run in training for r in run.records for key in r}
  # Such as the parts of a user's reward function.
  others = {
    key: f"{said}: {key.removeprefix(first).removesuffix(last)}"
    for first, last, said in _NAMED
    for key in sorted(logged - known.keys())
    if key.startswith(first) and key.endswith(last)
  }
  found = []
  for key, title in (known | others).items():
    of = {
      run.label: {r["rollout"]: r.get(key) for r in run.records}
      for run in training
      if any(r.get(key) is not None for r in run.records)
    }
    if not of:
      continue
    axes = _axes(title, "rollout", "")
    for label, values in of.items():
      xs, ys = list(values), np.array(list(values.values()), float)
      style = line_style(index[label]) | {"markersize": 4}
      axes.plot(xs, ys, color=style["color"], linewidth=0.6, alpha=0.4)
      every = max(1, len(xs) // 6)
      axes.plot(xs, trailing_mean(ys, 9), markevery=every, **style)
    low, high = axes.get_ylim()
    if high - low < 1e-6:  # Do not magnify the rounding noise of a constant.
      axes.set_ylim(low - 0.05, high + 0.05)
    _mark_phases(axes, min(map(min, of.values())), phase2)
    found.append(_svg(axes.figure, "training-" + key.replace("/", "-")))
  return found


def trailing_mean(values: npt.ArrayLike, window: int) -> np.ndarray:
  """Returns means of the last `window` values, without those not finite."""
  before = np.full(window - 1, np.nan)
  logged = np.concatenate([before, np.asarray(values, dtype=np.float64)])
  recent = np.lib.stride_tricks.sliding_window_view(logged, window)
  return np.ma.masked_invalid(recent).mean(axis=1).filled(np.nan)


def _phase2(run: study_lib.Training) -> float | None:
  """Returns the first rollout of Phase II; None if there is none."""
  return next((r["rollout"] for r in run.records if r.get("phase") == 2), None)


def _mark_phases(
  axes: Any, first: float, phase2: float | None, before: float = 0.0
) -> None:
  """Marks the first rollout of Phase II by a line."""
  if phase2 is None:
    return
  phase2 -= before
  axes.axvline(phase2, color=_INK, linewidth=0.8, linestyle=(0, (4, 2)))
  where = axes.get_xaxis_transform()
  for text, side, shift in (("Phase I", "right", -3), ("Phase II", "left", 3)):
    if side == "left" or phase2 > first:
      _note(axes, text, (phase2, 1.0), (shift, 2), xycoords=where, ha=side)


def page_figures(study: study_lib.Study) -> dict[str, Any]:
  """Returns every figure of the page, by its name in the template.

  `groups` are those of rows that are drawn together, `histories` a list; the
  others are (label of a row or run, figure).
  """
  index = study.index

  def group(
    number: int, title: str, rows: Sequence[metrics.Row]
  ) -> dict[str, Any]:
    whole = [row.curve for row in rows]
    draw = functools.partial(
      curves, index=index, name=f"group-{number}", trained=study.trained
    )
    hidden = () if study_lib.know_optimum(rows) else ("regret",)
    sets = study_lib.datasets(rows)
    return {
      "title": title,
      "rows": [row.label for row in rows],
      "main": [draw(whole, measure) for measure in MAIN],
      "curves": [
        draw(whole, m) for m in _WORDS["curves"] if m not in (*MAIN, *hidden)
      ],
      "sets": [
        draw(
          [row.curves[s] for row in rows if s in row.curves],
          "accuracy",
          title=f"Accuracy, {s}",
        )
        for s in sets
        if len(sets) > 1
      ],
      "prices": prices(whole, index, name=f"group-{number}"),
    }

  return {
    "groups": [
      group(number, *of) for number, of in enumerate(study.groups.values())
    ],
    "samplings": [
      (run.label, sampling(run, name=f"sampling-{number}"))
      for number, run in enumerate(study.training)
    ],
    "histories": histories(study.training, index),
  }


@_styled
def standalone_file(rows: Sequence[metrics.Row], *, trained: int) -> str:
  """Returns an SVG file with accuracy and mean searches of each row.

  Colours and markers are those of the report; budgets above `trained`, the
  largest of training, are shaded. Equal rows give equal bytes.
  """
  measured = [row.curve for row in rows]
  index = {row.label: place for place, row in enumerate(rows)}
  whole = figure.Figure(figsize=(2 * _SIZE[0], _SIZE[1] + 0.4))
  for axes, measure in zip(whole.subplots(1, 2), MAIN, strict=True):
    title, y_label = _WORDS["curves"][measure]
    _axes(title, "search budget B", y_label, axes)
    against_budget(axes, measure, measured, index, trained)
  named = [lines.Line2D([], [], **line_style(i)) for i in index.values()]
  how = {"loc": "outside upper center", "ncols": 4, "frameon": False}
  # A label may have an unpaired surrogate, which cannot be drawn.
  labels = [label.encode("utf-8", "replace").decode() for label in index]
  whole.legend(named, labels, **how)
  text = str(_svg(whole, "picture"))
  for variable, color in _ALONE.items():
    text = text.replace(variable, color)
  # The rule is page.css's, for the same look.
  names = '<svg xmlns="http://www.w3.org/2000/svg"'
  names += ' xmlns:xlink="http://www.w3.org/1999/xlink"'
  head, _, rest = text.replace("<svg", names, 1).partition(">")
  rule = "svg * { stroke-linejoin: round; stroke-linecap: butt }"
  return f"{head}><style>{rule}</style>{rest}"
