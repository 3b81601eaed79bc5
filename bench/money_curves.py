"""Says what a right answer costs at equal accuracy, under several methods.

    python -m bench.money_curves mixed=runs/m1/plain,runs/m2/plain \
        dear=runs/d1/plain,runs/d2/plain optimum=runs/optimum

Every argument is a label and its evaluations under budgets of dollars, one
folder for each training. The first method is compared with each of the others.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from absl import app

from anysearch_jax.evaluation import columns, money_curves

_ACCURACIES = (0.25, 0.3, 0.4, 0.5, 0.6, 0.7)


def main(argv: Sequence[str]) -> None:
  if len(argv) < 3 or not all("=" in each for each in argv[1:]):
    raise app.UsageError("Name two methods or more, as LABEL=FOLDER,FOLDER.")
  try:
    rows = [_read(each) for each in argv[1:]]
  except (OSError, ValueError) as error:
    sys.exit(f"bench.money_curves: {error}")
  if len({ids for _, ids, _ in rows}) > 1:
    sys.exit("bench.money_curves: the methods answered different questions.")
  for label, _, found in rows:
    mean = money_curves.means(found)
    points = zip(mean["dollars"], mean["right"], strict=True)
    print(label, *(f"{100 * cost:.2f}c:{right:.3f}" for cost, right in points))
  (first, _, ours), *others = rows
  for label, _, theirs in others:
    print(f"\n{first} by {label}, cents of a right answer")
    for at in money_curves.compare(ours, theirs, _ACCURACIES):
      print(
        f"  at {at.accuracy:.2f}: {_cents(at.ours)} by "
        f"{_cents(at.theirs)}, ratio {at.ratio.value:.2f} "
        f"[{at.ratio.low:.2f}, {at.ratio.high:.2f}]"
      )


def _read(text: str) -> tuple[str, tuple[str, ...], money_curves.Played]:
  label, _, folders = text.partition("=")
  paths = [pathlib.Path(each) / "episodes.jsonl" for each in folders.split(",")]
  table = columns.read(*paths, runs=[str(path) for path in paths])
  return label, *money_curves.played(table)


def _cents(found: money_curves.Interval) -> str:
  low, high = 100 * found.low, 100 * found.high
  return f"{100 * found.value:.1f} [{low:.1f}, {high:.1f}]"


if __name__ == "__main__":
  app.run(main)
