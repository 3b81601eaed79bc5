"""Tables over pairs of caps on searches and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anysearch_jax.evaluation import surfaces as surfaces_lib
from anysearch_jax.report import tables


def cells(
  surfaces: Sequence[surfaces_lib.Surface], index: Mapping[str, int]
) -> tables.Table:
  """Tabulates every row at every pair.

  Args:
    surfaces: the rows.
    index: colour index of each label.
  """
  pairs = sorted({(c.searches, c.tokens) for s in surfaces for c in s.cells})
  return tables.Table(
    "surface",
    "Accuracy under two caps",
    "Caps on searches and on generated tokens, both hard; 95 % intervals over "
    "questions and trainings. Within: the share of episodes that kept both "
    "caps; no answer: the share that ended without one.",
    ("searches", "tokens", "row"),
    (
      tables.Column("EM", best=True),
      tables.Column("searches", digits=2),
      tables.Column("tokens", digits=1),
      tables.Column("no answer"),
      tables.Column("within"),
      tables.Column("dollars", digits=5),
    ),
    tuple(
      tables.Line(
        (str(searches), str(tokens), found.label),
        (
          tables.cell(cell.accuracy, cell.n),
          *map(tables.cell, (cell.used, cell.generated, cell.truncated)),
          tables.Cell(cell.within),
          tables.cell(cell.cost),
        ),
        index[found.label],
      )
      for searches, tokens in pairs
      for found in surfaces
      for cell in found.cells
      if (cell.searches, cell.tokens) == (searches, tokens)
    ),
  )


def areas(
  surfaces: Sequence[surfaces_lib.Surface], index: Mapping[str, int]
) -> tables.Table:
  """Tabulates the area under each row's surface; arguments as for `cells`."""
  return tables.Table(
    "surface_area",
    "Area under the surface",
    "By trapezoids over both caps, each range scaled to one: the accuracy at a "
    "pair drawn evenly from the rectangle. 95 % intervals over questions and "
    "trainings. Comparable between rows with the same pairs.",
    ("row",),
    (tables.Column("EM", best=True),),
    tuple(
      tables.Line((s.label,), (tables.cell(s.area),), index[s.label])
      for s in surfaces
      if s.area.value is not None
    ),
  )
