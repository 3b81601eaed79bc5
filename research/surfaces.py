r"""Accuracy of policies under pairs of caps: searches and generated tokens.

    python -m research.surfaces a=runs/a/pairs b=runs/b/pairs --output=pairs.svg

An argument is LABEL=FOLDER of an evaluation under pairs of caps, several
folders of one method joined by `+`. The protocol is that of "Inference-Time
Budget Control for LLM Search Agents" (arXiv 2605.05701), see docs/budgets.md.
Printed is a CSV table with a line for each pair and one for the area under the
surface, each with a 95 % interval over questions; the figure has a heat map for
each label.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import figure

import anysearch_jax as aj

MEASURES = ("accuracy", "searches", "generated_tokens", "truncated_rate")


@dataclasses.dataclass(frozen=True)
class Surface:
  """A method over pairs of searches and tokens.

  Attributes:
    points: by pair, ascending: the estimates of `MEASURES`, and `within`, the
      share of episodes that kept both caps. Several datasets weigh alike.
    area: the volume under the accuracy by trapezoids, with the range of each
      cap scaled to 1: the accuracy at a pair drawn evenly from the rectangle.
      It is undefined with fewer than two values of a cap, or if some pair of
      the grid was not played.
  """

  points: Mapping[tuple[int, int], Mapping[str, aj.inference.Estimate]]
  area: aj.inference.Estimate


def measure(label: str, table: aj.columns.Columns) -> Surface:
  """Measures a method at each pair of searches and tokens.

  Episodes without a cap on tokens are left out.

  Args:
    label: of the method, for messages.
    table: its episodes.

  Returns:
    The surface.

  Raises:
    ValueError: no episode has a cap on tokens, or two budgets of a pair differ
      in other caps.
  """
  table = table.scored()
  table = table.where(np.isfinite(table.token_cap))
  if not len(table):
    raise ValueError(
      f"Row {label!r}: found no budget with a cap on tokens; expected an "
      "evaluation with budgets such as searches=3,tokens=64."
    )
  others = np.stack([table.dollar_cap, table.second_cap], -1)
  if len(np.unique(others, axis=0)) > 1:
    raise ValueError(
      f"Row {label!r}: found budgets that differ in dollars or seconds; "
      "expected budgets that differ in searches and tokens only."
    )
  caps = np.stack([table.budget, table.token_cap.astype(np.int64)], -1)
  pairs, places = np.unique(caps, axis=0, return_inverse=True)
  places = places.reshape(-1)
  points = {
    tuple(pairs[place].tolist()): _point(part)
    for place, part in table.split(places).items()
  }
  # The measures know one number as a budget: here the place of the pair.
  return Surface(points, _area(table.replace(budget=places), pairs))


def _point(table: aj.columns.Columns) -> dict[str, aj.inference.Estimate]:
  estimates = aj.measures.estimates(table, MEASURES, weigh_sets=True)
  kept = table.searches <= table.budget
  kept &= table.generated_tokens <= table.token_cap
  ratios = aj.measures.ratios(table, [kept], [np.ones(len(table))])
  (within,) = aj.inference.rates(ratios, [len(table)])
  return {**estimates, "within": within.estimate}


def _area(
  table: aj.columns.Columns, pairs: np.ndarray
) -> aj.inference.Estimate:
  """Returns the area, of budgets that are places in `pairs`, int `[B, 2]`."""
  axes = [np.unique(axis) for axis in pairs.T]
  sizes = [len(values) for values in axes]
  if min(sizes) < 2 or np.prod(sizes) != len(pairs):
    return aj.inference.NOTHING
  weights = np.ones(1)
  for values in axes:
    heights = np.trapezoid(np.eye(len(values)), values, axis=-1)
    # `pairs` are sorted by the first axis, as the outer product is laid out.
    weights = np.outer(weights, heights / (values[-1] - values[0])).ravel()
  sums = aj.measures.sums(table, ("accuracy",))
  linear = sums.averages(("accuracy",), np.eye(len(pairs), dtype=bool))
  (area,) = aj.inference.rates(linear.combined(weights[None]))
  return area.estimate


def draw(surfaces: Mapping[str, Surface]) -> figure.Figure:
  """Returns a heat map of the accuracy for each label, in percent."""
  drawn = figure.Figure(figsize=(4.6 * len(surfaces), 3.4), layout="tight")
  panels = drawn.subplots(1, len(surfaces), squeeze=False)[0]
  for axes, (label, surface) in zip(panels, surfaces.items(), strict=True):
    searches, tokens = (sorted(set(v)) for v in zip(*surface.points))
    shares = np.full((len(tokens), len(searches)), np.nan)
    for (search, token), point in surface.points.items():
      accuracy = point["accuracy"].value
      if accuracy is not None:
        at = tokens.index(token), searches.index(search)
        shares[at] = accuracy
        text = f"{100 * accuracy:.0f}"
        axes.text(at[1], at[0], text, ha="center", va="center")
    axes.imshow(shares, origin="lower", vmin=0, vmax=1.6, cmap="Blues")
    axes.set_title(f"{label}: exact match (%)")
    axes.set_xlabel("searches, at most")
    axes.set_ylabel("generated tokens, at most")
    axes.set_xticks(range(len(searches)), list(map(str, searches)))
    axes.set_yticks(range(len(tokens)), list(map(str, tokens)))
  return drawn


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("rows", nargs="+", metavar="LABEL=FOLDER")
  parser.add_argument("--output", type=pathlib.Path, help="SVG file")
  args = parser.parse_args(argv)
  surfaces = {}
  for row in args.rows:
    label, _, folders = row.partition("=")
    paths = [pathlib.Path(f) / "episodes.jsonl" for f in folders.split("+")]
    surfaces[label] = measure(label, aj.columns.read(*paths))
  out = csv.writer(sys.stdout, lineterminator="\n")
  out.writerow(["row", "searches", "tokens", "measure", "value", "low", "high"])
  for label, surface in surfaces.items():
    for pair, point in surface.points.items():
      for name, estimate in point.items():
        out.writerow([label, *pair, name, *estimate])
    out.writerow([label, "", "", "area", *surface.area])
  if args.output:
    draw(surfaces).savefig(args.output)


if __name__ == "__main__":
  main()
