"""Plots of a report, each drawn as inline SVG on a `canvas`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib import ticker

from anysearch_jax.evaluation import intervals
from anysearch_jax.report import canvas


@dataclasses.dataclass(frozen=True)
class Series:
  """A line; `index` selects its colour, marker and dash.

  `points` are (x, estimate) in order; points with an undefined value are left
  out.
  """

  index: int
  points: Sequence[tuple[float, intervals.Estimate]]


def against_budget(
  series: Sequence[Series],
  *,
  name: str,
  title: str,
  y_label: str,
  x_label: str = "search budget B",
  trained: int | None = None,
  diagonal: bool = False,
  optimum: Mapping[int, float] | None = None,
) -> str:
  """Draws a value with its interval at every budget.

  Args:
    series: the lines; x is the budget.
    name: name that is unique on the page; it seeds the ids inside the SVG.
    title, y_label, x_label: texts of the figure.
    trained: the largest budget of training; larger budgets are shaded.
    diagonal: whether to draw the line searches = B, the upper bound.
    optimum: by budget, the best value, drawn as a dotted line.
  """
  with matplotlib.rc_context(canvas.STYLE):
    fig, axes = canvas.axes(title, x_label, y_label)
    budgets = sorted({x for s in series for x, _ in s.points})
    if diagonal and budgets:
      ends = [budgets[0], budgets[-1]]
      axes.plot(
        ends, ends, color=canvas.INK, linewidth=0.8, linestyle=(0, (1, 2))
      )
      axes.annotate(
        "searches = B", ends[1:] * 2, ha="right", va="top", rotation=0,
        xytext=(-14, 0), textcoords="offset points",
      )  # fmt: skip
    if optimum:
      axes.plot(
        list(optimum), list(optimum.values()), color=canvas.INK,
        linewidth=1.1, linestyle=(0, (1, 2)),
      )  # fmt: skip
      axes.annotate(
        "optimum", list(optimum.items())[-2:][0], ha="right", va="bottom",
        xytext=(-6, 3), textcoords="offset points",
      )  # fmt: skip
    # Shift the series slightly, so that their error bars do not overlap.
    step = 0.4 / max(canvas.SERIES, len(series))
    for position, s in enumerate(series):
      offset = (position - (len(series) - 1) / 2) * step
      defined = [(x, e) for x, e in s.points if e.value is not None]
      axes.errorbar(
        [x + offset for x, _ in defined],
        [e.value for _, e in defined],
        yerr=_bars([e for _, e in defined]),
        elinewidth=0.9,
        **canvas.line_style(s.index),
      )
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    # Regret may be negative.
    axes.set_ylim(bottom=min([0.0, *map(_lowest, series)]))
    if trained is not None and budgets and budgets[-1] > trained:
      axes.axvspan(
        trained + 0.5, budgets[-1] + 0.4, color=canvas.SHADE, zorder=0
      )
      axes.text(
        (trained + budgets[-1] + 0.9) / 2, 1.0, "never trained",
        ha="center", va="bottom", transform=axes.get_xaxis_transform(),
      )  # fmt: skip
    return canvas.svg(fig, name, title)


def _lowest(series: Series) -> float:
  """Returns the lowest end of an interval of a series; 0 without any."""
  ends = [e.value if e.low is None else e.low for _, e in series.points]
  return min((end for end in ends if end is not None), default=0.0)


def against_cost(
  series: Sequence[Series],
  front: Sequence[tuple[float, float]] = (),
  *,
  name: str,
  title: str,
  x_label: str,
  y_label: str,
) -> str:
  """Draws a value over its cost, one point for each budget.

  Args:
    series: the lines; x is the cost.
    front: (cost, value) of the points of the Pareto front, marked by rings.
  """
  with matplotlib.rc_context(canvas.STYLE):
    fig, axes = canvas.axes(title, x_label, y_label)
    for s in series:
      defined = [(x, e) for x, e in s.points if e.value is not None]
      axes.errorbar(
        [x for x, _ in defined],
        [e.value for _, e in defined],
        yerr=_bars([e for _, e in defined]),
        elinewidth=0.9,
        **canvas.line_style(s.index),
      )
    axes.plot(
      [x for x, _ in front],
      [y for _, y in front],
      linestyle="",
      marker="o",
      markersize=11,
      markerfacecolor="none",
      markeredgecolor=canvas.INK,
      markeredgewidth=0.9,
    )
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6))
    axes.set_ylim(bottom=0)
    return canvas.svg(fig, name, title)


def below_frontier(
  rows: Mapping[str, tuple[float, float]],
  edge: Sequence[tuple[float, float]],
  *,
  name: str,
  title: str,
) -> str:
  """Draws accuracy over mean searches, a point for each row.

  Args:
    rows: accuracy and mean searches of each row, by its label.
    edge: the same of the best agents, drawn as a dotted line.
    name, title: as for `against_budget`.
  """
  with matplotlib.rc_context(canvas.STYLE):
    fig, axes = canvas.axes(title, "mean searches", "accuracy")
    x_low = min(x for _, x in rows.values()) - 0.15
    shown = [(x, y) for y, x in edge if x >= x_low]
    axes.plot(
      *zip(*shown), color=canvas.INK, linewidth=1.1, linestyle=(0, (1, 2))
    )
    axes.annotate(
      "best agents", shown[len(shown) // 2], ha="right", va="bottom",
      xytext=(-4, 4), textcoords="offset points",
    )  # fmt: skip
    for index, (label, (y, x)) in enumerate(rows.items()):
      style = canvas.line_style(index) | {"linestyle": ""}
      axes.plot([x], [y], label=label, **style)
    axes.legend(frameon=False, loc="lower right", handletextpad=0.2)
    return canvas.svg(fig, name, title)


def shares(
  budgets: Sequence[int],
  used: Sequence[Mapping[int, float]],
  *,
  name: str,
  title: str,
) -> str:
  """Draws, for each budget, the shares of episodes by number of searches.

  Args:
    budgets: the budgets; each gets a stacked bar.
    used: for each budget, the share in [0, 1] by number of searches.
  """
  with matplotlib.rc_context(canvas.STYLE):
    fig, axes = canvas.axes(title, "search budget B", "share of episodes")
    axes.grid(False)
    for place, share in enumerate(used):
      bottom = 0.0
      for searches, height in sorted(share.items()):
        axes.bar(
          place,
          height,
          0.8,
          bottom=bottom,
          color=canvas.band(searches),
          edgecolor=canvas.INK,
          linewidth=0.5,
        )
        if height > 0.09:
          axes.text(
            place, bottom + height / 2, str(searches), ha="center",
            va="center", color=canvas.on_band(searches),
          )  # fmt: skip
        bottom += height
    axes.set_xticks(range(len(budgets)), [str(b) for b in budgets])
    axes.set_ylim(0, 1)
    return canvas.svg(fig, name, title)


def heat(
  cells: Mapping[float, Mapping[int, float | None]],
  index: int,
  *,
  name: str,
  title: str,
  x_label: str,
  y_label: str,
) -> str:
  """Draws shares as a grid of cells, each with its number in percent.

  Args:
    cells: by row, by column, a share in [0, 1]; the larger, the stronger the
      colour. None is empty.
    index: colour of a row of the report.
    name, title, x_label, y_label: as for `against_budget`.
  """
  ups = sorted(cells)
  places = sorted({at for row in cells.values() for at in row})
  with matplotlib.rc_context(canvas.STYLE):
    fig, axes = canvas.axes(title, x_label, y_label)
    axes.grid(False)
    for up, row in enumerate(ups):
      for place, at in enumerate(places):
        share = cells[row].get(at)
        if share is None:
          continue
        axes.bar(
          place,
          1,
          1,
          bottom=up - 0.5,
          color=canvas.color(index),
          alpha=0.6 * share,
        )
        axes.text(place, up, f"{100 * share:.0f}", ha="center", va="center")
    axes.set_xticks(range(len(places)), [str(at) for at in places])
    axes.set_yticks(range(len(ups)), [f"{up:g}" for up in ups])
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_ylim(-0.5, len(ups) - 0.5)
    return canvas.svg(fig, name, title)


def drawn(
  counts: Mapping[int, Mapping[int, int]],
  *,
  phase2: float | None,
  name: str,
  title: str,
) -> str:
  """Draws the number of questions of each budget in every rollout, stacked.

  Args:
    counts: for each rollout, the number of questions by budget. A rollout
      without a record stays empty.
    phase2: first rollout of Phase II, marked by a line; None: no line.
  """
  rollouts = range(min(counts), max(counts) + 1)
  played = {b for found in counts.values() for b, n in found.items() if n}
  edges = np.arange(rollouts[0], rollouts[-1] + 2) - 0.5
  with matplotlib.rc_context(canvas.STYLE):
    fig, axes = canvas.axes(title, "rollout", "")
    axes.grid(False)
    below = np.zeros(len(rollouts))
    for budget in sorted(played):
      n = np.array([counts.get(r, {}).get(budget, 0) for r in rollouts])
      axes.stairs(
        below + n,
        edges,
        baseline=below,
        fill=True,
        facecolor=canvas.band(budget - 1),
        edgecolor=canvas.INK,
        linewidth=0.5,
      )
      if n[-1] > 0.03 * sum(counts[rollouts[-1]].values()):
        axes.annotate(
          f"B = {budget}", (edges[-1], below[-1] + n[-1] / 2), va="center",
          xytext=(4, 0), textcoords="offset points", annotation_clip=False,
        )  # fmt: skip
      below = below + n
    _mark_phases(axes, rollouts, None if phase2 is None else phase2 - 0.5)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.set_xlim(edges[0], edges[-1])
    return canvas.svg(fig, name, title)


def history(
  lines: Sequence[tuple[int, Sequence[float], Sequence[float]]],
  *,
  phase2: float | None,
  name: str,
  title: str,
  window: int = 9,
) -> str:
  """Draws a training metric: logged values faint, the trailing mean strong.

  Args:
    lines: (series index, rollouts `[R]`, values `[R]`); nan leaves a gap.
    phase2: first rollout of Phase II, marked by a line; None: no line.
    window: number of rollouts in the trailing mean.
  """
  with matplotlib.rc_context(canvas.STYLE):
    fig, axes = canvas.axes(title, "rollout", "")
    for index, xs, ys in lines:
      axes.plot(xs, ys, color=canvas.color(index), linewidth=0.6, alpha=0.4)
      axes.plot(
        xs,
        trailing_mean(ys, window),
        markevery=max(1, len(xs) // 6),
        markersize=4,
        **canvas.line_style(index),
      )
    low, high = axes.get_ylim()
    if high - low < 1e-6:  # Do not magnify the rounding noise of a constant.
      axes.set_ylim(low - 0.05, high + 0.05)
    _mark_phases(axes, [x for _, xs, _ in lines for x in xs], phase2)
    return canvas.svg(fig, name, title)


def trailing_mean(values: Sequence[float], window: int) -> np.ndarray:
  """Returns means of the last `window` values, without those not finite."""
  logged = np.asarray(values, dtype=np.float64)
  means = np.full(len(logged), np.nan)
  for stop in range(1, len(logged) + 1):
    recent = logged[max(0, stop - window) : stop]
    recent = recent[np.isfinite(recent)]
    if len(recent):
      means[stop - 1] = recent.mean()
  return means


def _bars(estimates: Sequence[intervals.Estimate]) -> np.ndarray | None:
  """Returns error bar lengths `[2, P]`; an undefined interval has length 0."""
  if not any(e.low is not None for e in estimates):
    return None
  return np.array([_bar(e) for e in estimates]).T


def _bar(estimate: intervals.Estimate) -> tuple[float, float]:
  """Returns the lengths below and above a value."""
  value, low, high = estimate
  if value is None or low is None or high is None:
    return 0.0, 0.0
  return max(0.0, value - low), max(0.0, high - value)


def _mark_phases(axes, rollouts: Sequence[float], phase2: float | None) -> None:
  if phase2 is None or not len(rollouts):
    return
  axes.axvline(phase2, color=canvas.INK, linewidth=0.8, linestyle=(0, (4, 2)))
  for text, side, shift in (("Phase I", "right", -3), ("Phase II", "left", 3)):
    if side == "left" or phase2 > min(rollouts):
      axes.annotate(
        text, (phase2, 1.0), xycoords=axes.get_xaxis_transform(), ha=side,
        xytext=(shift, 2), textcoords="offset points",
      )  # fmt: skip
