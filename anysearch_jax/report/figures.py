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

# Number of colours of each family in page.css; more rows reuse them.
SERIES = 9
_GLYPHS = "●■▲◆▼✚✖★◄"
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")
_DASHES = ("-", "--", "-.", ":", (0, (6, 1)), (0, (3, 1, 1, 1, 1, 1)))
# Size of a figure, in inches.
_WIDTH = 4.6
_HEIGHT = 3.1
# Placeholders of colours. "#0N00IJ" is colour IJ of family N - 4.
_INK = "#010101"  # Text, axes and reference lines.
_RULE = "#020202"  # The grid.
_SHADE = "#030303"  # The background of budgets that were never trained.
_FAMILIES = ("series", "band")
_VARIABLES = {
  _INK: "currentColor",
  _RULE: "var(--rule)",
  _SHADE: "var(--shade)",
}
# Colours of a standalone file. As in page.css, they are as far apart as nine
# colours can be, for colour-blind readers too, by OKLab's distance after
# https://doi.org/10.1109/TVCG.2009.113
INK = "#757575"
COLORS = (
  "#625bf2",
  "#df7388",
  "#62a018",
  "#9e35b5",
  "#b04102",
  "#2398fe",
  "#b071c8",
  "#606a58",
  "#d72d89",
)
# The colours of a standalone file, by the CSS variables that they replace.
_STANDALONE_COLORS = {
  "currentColor": INK,
  "var(--rule)": "#80808066",
  "var(--shade)": "#8080802e",
}
_STANDALONE_COLORS |= {
  f"var(--series-{i})": color for i, color in enumerate(COLORS)
}
_WORDS = study_lib.WORDS
# Logged quantities whose keys hold a user's name: prefix, suffix and title.
_USER_KEYS = (
  ("reward/", "", "reward term"),
  ("engine/server/", "/fingerprint", "fingerprint gap"),
)
# Measures of the page's first figures.
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
    axes = figure.Figure(figsize=(_WIDTH, _HEIGHT)).add_subplot()
  axes.set_title(title, pad=16)
  axes.set_xlabel(x_label)
  axes.set_ylabel(y_label)
  return axes


def _note(
  axes: Any, text: str, point: Any, shift: tuple[float, float], **style: Any
) -> None:
  """Writes text beside a point of the axes, `shift` typographic points away."""
  axes.annotate(text, point, xytext=shift, textcoords="offset points", **style)


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
  """Draws (x, estimate) in order, without points of an undefined value.

  Args:
    axes: the axes to draw on.
    index: colour index of the row.
    points: (x, estimate) pairs.
    shift: offset of all points along x.
  """
  defined = [(x, e) for x, e in points if None not in (x, e.value)]
  bars = [
    (0.0, 0.0) if low is None else (max(0.0, y - low), max(0.0, high - y))
    for _, (y, low, high) in defined
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
  rows: Sequence[metrics.Curve],
  index: Mapping[str, int],
  trained: int,
) -> None:
  """Draws a measure of rows against the budget.

  With `searches`, a dotted line is their upper bound; with `accuracy`, the best
  agent's where it is known.

  Args:
    axes: the axes to draw on.
    measure: a key of `measures.MEASURES`.
    rows: the curve of each row.
    index: colour index of each label.
    trained: the largest budget of training; larger ones are shaded.
  """
  budgets = sorted({budget for row in rows for budget in row.points})
  dotted = {"color": _INK, "linestyle": (0, (1, 2))}
  if measure == "searches" and budgets:
    ends = [budgets[0], budgets[-1]]
    axes.plot(ends, ends, linewidth=0.8, **dotted)
    corner = (budgets[-1], budgets[-1])
    _note(axes, "searches = B", corner, (-14, 0), ha="right", va="top")
  optimum = _optimum(rows) if measure == "accuracy" else []
  if optimum:
    axes.plot(*zip(*optimum), linewidth=1.1, **dotted)
    _note(axes, "optimum", optimum[-2:][0], (-6, 3), ha="right", va="bottom")
  # Shift the rows slightly, so that their error bars do not overlap.
  step = 0.4 / max(SERIES, len(rows))
  lows = [0.0]  # Regret may be negative.
  for i, row in enumerate(rows):
    points = [(b, getattr(part, measure)) for b, part in row.points.items()]
    lows += [x for _, e in points for x in e[:2] if x is not None]
    _line(axes, index[row.label], points, (i - (len(rows) - 1) / 2) * step)
  axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  axes.set_ylim(bottom=min(lows))
  if budgets and budgets[-1] > trained:
    axes.axvspan(trained + 0.5, budgets[-1] + 0.4, color=_SHADE, zorder=0)
    top = (trained + budgets[-1] + 0.9) / 2, 1.0
    transform = axes.get_xaxis_transform()
    _note(axes, "never trained", top, (0, 0), xycoords=transform, ha="center")


def _optimum(rows: Sequence[metrics.Curve]) -> list[tuple[int, float]]:
  """Returns the best agent's (budget, accuracy) points, if they are known.

  They are those of the first row that has any: its accuracy plus its regret.
  """
  for row in rows:
    points = [
      (budget, part.accuracy.value + part.regret.value)
      for budget, part in row.points.items()
      if part.accuracy.value is not None and part.regret.value is not None
    ]
    if points:
      return points
  return []


@_styled
def curves(
  rows: Sequence[metrics.Curve],
  measure: str,
  index: Mapping[str, int],
  *,
  name: str,
  trained: int,
  title: str = "",
) -> markupsafe.Markup:
  """Draws a measure of rows against the budget.

  Args:
    rows: the curve of each row.
    measure: accuracy, searches, tp, total_tokens or regret.
    index: colour index of each label.
    name: unique on the page.
    trained: the largest budget of training; larger ones are shaded.
    title: replaces the measure's own.
  """
  usual_title, y_label = _WORDS["curves"][measure]
  axes = _axes(title or usual_title, "search budget B", y_label)
  against_budget(axes, measure, rows, index, trained)
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
  rows: Sequence[metrics.Curve], index: Mapping[str, int], *, name: str
) -> list[markupsafe.Markup]:
  """Draws accuracy over each price, with rings around the Pareto front.

  Args:
    rows: the curve of each row.
    index: colour index of each label.
    name: unique on the page.
  """
  figures = []
  for price, (title, x_label) in _WORDS["prices"].items():
    lines = {
      row.label: [
        (getattr(part, price).value, part.accuracy)
        for part in row.points.values()
      ]
      for row in rows
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
    figures.append(_svg(axes.figure, f"{name}-{price}"))
  return figures


@_styled
def sampling(run: study_lib.Training, *, name: str) -> markupsafe.Markup | None:
  """Draws the budgets that each rollout played; None without counts.

  A rollout without a record stays empty.
  """
  # Probabilities (`curriculum/p1`, ...) cannot replace the counts: they are not
  # used in Phase I or with a fixed budget.
  counts = {
    r["rollout"]: {
      int(match[1]): int(count)
      for key, count in r.items()
      if (match := re.fullmatch(r"curriculum/count(\d+)", key))
    }
    for r in run.records
  }
  budgets = sorted(
    {b for by_budget in counts.values() for b, n in by_budget.items() if n}
  )
  if not budgets:
    return None
  rollouts = range(min(counts), max(counts) + 1)
  edges = np.arange(rollouts[0], rollouts[-1] + 2) - 0.5
  axes = _axes("questions of each budget", "rollout", "")
  axes.grid(False)
  heights = np.array(
    [[counts.get(r, {}).get(b, 0) for r in rollouts] for b in budgets]
  )
  axes.hist(
    [rollouts] * len(budgets),
    edges,
    weights=list(heights),
    color=[_color("band", budget - 1) for budget in budgets],
    edgecolor=_INK,
    linewidth=0.5,
    histtype="stepfilled",
    stacked=True,
  )
  last_counts = heights[:, -1]
  tops = last_counts.cumsum()
  for budget, count, top in zip(budgets, last_counts, tops, strict=True):
    if count > 0.03 * tops[-1]:  # A thinner band has no room for its label.
      middle = edges[-1], top - count / 2
      _note(
        axes,
        f"B = {budget}",
        middle,
        (4, 0),
        va="center",
        annotation_clip=False,
      )
  _mark_phases(axes, rollouts[0], _phase2(run), margin=0.5)
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
  figures = []
  for key, title in _titles(training).items():
    histories = {
      run.label: {r["rollout"]: r.get(key) for r in run.records}
      for run in training
      if any(r.get(key) is not None for r in run.records)
    }
    if not histories:
      continue
    axes = _axes(title, "rollout", "")
    for label, values in histories.items():
      xs = list(values)
      ys = np.array(list(values.values()), float)
      style = line_style(index[label]) | {"markersize": 4}
      axes.plot(xs, ys, color=style["color"], linewidth=0.6, alpha=0.4)
      every = max(1, len(xs) // 6)
      axes.plot(xs, trailing_mean(ys, 9), markevery=every, **style)
    low, high = axes.get_ylim()
    if high - low < 1e-6:  # Do not magnify the rounding noise of a constant.
      axes.set_ylim(low - 0.05, high + 0.05)
    _mark_phases(axes, min(map(min, histories.values())), phase2)
    figures.append(_svg(axes.figure, "training-" + key.replace("/", "-")))
  return figures


def _titles(training: Sequence[study_lib.Training]) -> dict[str, str]:
  """Returns the titles of logged quantities, of a user's own ones last."""
  titles: dict[str, str] = dict(_WORDS["histories"])
  logged = {key for run in training for r in run.records for key in r}
  user_keys = sorted(logged - titles.keys())
  for prefix, suffix, title in _USER_KEYS:
    for key in user_keys:
      if key.startswith(prefix) and key.endswith(suffix):
        name = key.removeprefix(prefix).removesuffix(suffix)
        titles[key] = f"{title}: {name}"
  return titles


def trailing_mean(values: npt.ArrayLike, window: int) -> np.ndarray:
  """Returns means of the last `window` values, ignoring any not finite."""
  padding = np.full(window - 1, np.nan)
  padded = np.concatenate([padding, np.asarray(values, dtype=np.float64)])
  recent = np.lib.stride_tricks.sliding_window_view(padded, window)
  return np.ma.masked_invalid(recent).mean(axis=1).filled(np.nan)


def _phase2(run: study_lib.Training) -> float | None:
  """Returns the first rollout of Phase II; None if there is none."""
  return next((r["rollout"] for r in run.records if r.get("phase") == 2), None)


def _mark_phases(
  axes: Any, first: float, phase2: float | None, margin: float = 0.0
) -> None:
  """Marks the first rollout of Phase II by a line.

  Args:
    axes: the axes to draw on.
    first: the first rollout of the figure.
    phase2: the first rollout of Phase II; None: no line.
    margin: distance of the line before this rollout.
  """
  if phase2 is None:
    return
  phase2 -= margin
  axes.axvline(phase2, color=_INK, linewidth=0.8, linestyle=(0, (4, 2)))
  top = (phase2, 1.0)
  transform = axes.get_xaxis_transform()
  if phase2 > first:
    _note(axes, "Phase I", top, (-3, 2), xycoords=transform, ha="right")
  _note(axes, "Phase II", top, (3, 2), xycoords=transform, ha="left")


def page_figures(study: study_lib.Study) -> dict[str, Any]:
  """Returns every figure of the page, by its name in the template.

  `groups` are those of rows that are drawn together, `histories` a list; the
  others are (label of a row or run, figure).
  """
  index = study.index
  groups = []
  for number, (title, rows) in enumerate(study.groups.values()):
    name = f"group-{number}"
    groups.append(
      {
        "title": title,
        "rows": [row.label for row in rows],
        "prices": prices([row.curve for row in rows], index, name=name),
        **_group_curves(rows, index, name=name, trained=study.trained),
      }
    )
  return {
    "groups": groups,
    "samplings": [
      (run.label, sampling(run, name=f"sampling-{number}"))
      for number, run in enumerate(study.training)
    ],
    "histories": histories(study.training, index),
  }


def _group_curves(
  rows: Sequence[metrics.Row],
  index: Mapping[str, int],
  *,
  name: str,
  trained: int,
) -> dict[str, list[markupsafe.Markup]]:
  """Draws the rows of a group against the budget: all sets, then each set."""
  draw = functools.partial(curves, index=index, name=name, trained=trained)
  all_sets = [row.curve for row in rows]
  others = [m for m in _WORDS["curves"] if m not in MAIN]
  if not study_lib.know_optimum(rows):
    others.remove("regret")
  datasets = study_lib.datasets(rows)
  by_dataset = []
  for dataset in datasets if len(datasets) > 1 else ():
    members = [row.curves[dataset] for row in rows if dataset in row.curves]
    by_dataset.append(draw(members, "accuracy", title=f"Accuracy, {dataset}"))
  return {
    "main": [draw(all_sets, measure) for measure in MAIN],
    "curves": [draw(all_sets, measure) for measure in others],
    "sets": by_dataset,
  }


@_styled
def standalone_file(rows: Sequence[metrics.Row], *, trained: int) -> str:
  """Returns an SVG file with accuracy and mean searches of each row.

  Colours and markers are those of the report; budgets above `trained`, the
  largest of training, are shaded. Equal rows give equal bytes.
  """
  row_curves = [row.curve for row in rows]
  index = {row.label: i for i, row in enumerate(rows)}
  whole = figure.Figure(figsize=(2 * _WIDTH, _HEIGHT + 0.4))
  for axes, measure in zip(whole.subplots(1, 2), MAIN, strict=True):
    title, y_label = _WORDS["curves"][measure]
    _axes(title, "search budget B", y_label, axes)
    against_budget(axes, measure, row_curves, index, trained)
  handles = [lines.Line2D([], [], **line_style(i)) for i in index.values()]
  # A label may have an unpaired surrogate, which cannot be drawn.
  labels = [label.encode("utf-8", "replace").decode() for label in index]
  whole.legend(
    handles, labels, loc="outside upper center", ncols=4, frameon=False
  )
  text = str(_svg(whole, "picture"))
  for variable, color in _STANDALONE_COLORS.items():
    text = text.replace(variable, color)
  # The rule is page.css's, for the same look.
  opening = '<svg xmlns="http://www.w3.org/2000/svg"'
  opening += ' xmlns:xlink="http://www.w3.org/1999/xlink"'
  head, _, body = text.replace("<svg", opening, 1).partition(">")
  rule = "svg * { stroke-linejoin: round; stroke-linecap: butt }"
  return f"{head}><style>{rule}</style>{body}"
