"""Tests of one table as Markdown and CSV, and of its marks, by hand."""

from __future__ import annotations

import types

import pytest

from anysearch_jax.evaluation import inference
from anysearch_jax.report import tables


def _table(**cells):
  return tables.Table(
    "t",
    "T",
    "note",
    ("k", "row"),
    (tables.Column("x", group="g", best=True), tables.Column("y")),
    tuple(
      tables.Line(tuple(key.split("_")), values)
      for key, values in cells.items()
    ),
  )


def test_the_best_and_the_second_of_a_block_are_marked():
  table = _table(
    a_1=(tables.Cell(0.5), tables.Cell(9.0)),
    a_2=(tables.Cell(0.7), None),
    a_3=(tables.Cell(0.7), None),
    a_4=(tables.Cell(0.1), None),
    b_1=(tables.Cell(0.9), None),
  )
  first, second = tables.blocks(table)
  assert tables.ranks(first, table.columns) == [[2, 0], [1, 0], [1, 0], [0, 0]]
  assert tables.ranks(second, table.columns) == [[0, 0]]


@pytest.mark.parametrize(
  ("text", "written"),
  [
    ("<img src=x onerror=a>", "&lt;img src=x onerror=a&gt;"),
    ("a & b &lt;", "a &amp; b &amp;lt;"),
    ("p|q\\", "p\\|q\\\\"),
    ("[x](javascript:a)", "[x]\\(javascript:a)"),
    ("two\nlines", "two lines"),
    ("_x_ **y** `z` ~a~ $b$", "\\_x\\_ \\*\\*y\\*\\* \\`z\\` \\~a\\~ \\$b\\$"),
    ("no R_abs, λ = 0 [0.1, 0.2]", "no R_abs, λ = 0 [0.1, 0.2]"),
  ],
)
def test_markdown_escapes_every_text(text, written):
  assert tables.escaped(text) == written


def test_csv_by_hand():
  found = tables.Cell(0.25, 0.125, 0.5, 8)
  table = _table(**{"a_=1+1": (found, tables.Cell(2)), "b_p|q": (None, None)})
  assert tables.to_csv(table) == (
    "k,row,g x,g x low,g x high,g x n,y\n"
    "a,'=1+1,0.25,0.125,0.5,8,2\n"
    "b,p|q,,,,,\n"
  )


def test_columns_take_attributes_or_keys():
  estimate = inference.Estimate(0.25, 0.125, 0.5)
  columns = [
    tables.Column("estimate", "em", n=True),
    tables.Column("number", "half"),
    tables.Column("nothing", "none"),
    tables.Column("left out", "none", optional=True),
  ]
  subject = types.SimpleNamespace(em=estimate, n=8, half=4.0, none=None)
  table = tables.make_table(
    "t", "T", "", "k, B", columns, [(("a", 1), subject)]
  )
  assert table.keys == ("k", "B")
  (line,) = table.lines
  assert line.keys == ("a", "1")
  assert line.cells == (tables.Cell(*estimate, 8), tables.Cell(4.0), None)
  wide = tables.make_table(
    "t", "T", "", "k", [tables.Column("x", 1)], [("a", {1: 2}), ("b", {})]
  )
  assert [line.cells for line in wide.lines] == [(tables.Cell(2),), (None,)]
  assert tables.to_text(table).splitlines() == [
    "k  B     estimate  number  nothing",
    "a  1  0.250±0.188   4.000        –",
  ]
