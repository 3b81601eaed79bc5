"""Renders the report's page: figures, tables and trajectories."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import markupsafe

from anysearch_jax.evaluation import curves as curves_lib
from anysearch_jax.report import browser, canvas, figures, trajectories
from anysearch_jax.report import rows as study_lib
from anysearch_jax.report import tables as tables_lib

_MOST_LINES = 300  # Lines of a table on the page; its CSV file has all.
_LONG = 60  # Longer tables are collapsed at first.
_WIDE = 10  # Number of columns that fit on a laptop and on paper.
_FILES = pathlib.Path(__file__).parent


def render(
  data: Mapping[str, Any],
  study: study_lib.Study,
  samples: Sequence[trajectories.Sample],
  groups: Sequence[trajectories.Sample] = (),
  *,
  title: str,
) -> str:
  """Returns a self-contained HTML page.

  Args:
    data: the data of `build.build`.
    study: the measurements that figures and tables show.
    samples: complete episodes of the rows, for reading.
    groups: complete episodes of training runs.
    title: title of the page.
  """
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_FILES),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
  )
  environment.filters |= {
    "fixed": fixed,
    "signed": lambda x, digits=3: fixed(x, digits, sign="+"),
    "glyph": canvas.glyph,
    "authored": trajectories.authored,
    "blocks": _blocks,
    "parts": parts,
    "headings": _headings,
  }
  browsed = browser.build([*samples, *groups])
  style = (_FILES / "page.css").read_text("utf-8")
  script = (_FILES / "browser.js").read_text("utf-8")
  return environment.get_template("template.html").render(
    data=data,
    title=title,
    tables={table.name: table for table in study.tables},
    most=_MOST_LINES,
    long=_LONG,
    choices=trajectories.choose(
      samples, data["controls"], trained=data["trained_budget"]
    )
    if samples
    else [],
    browsing=bool(data["rows"] or browsed["entries"]),
    browser=markupsafe.Markup(browser.script(browsed)),
    policy=security_policy(style=style, script=script),
    style=markupsafe.Markup(style),
    script=markupsafe.Markup(script),
    series=canvas.SERIES,
    **_figures(study),
  )


def security_policy(*, style: str, script: str) -> str:
  """Returns the page's content security policy.

  It allows this style sheet and this script, by their hashes, and nothing else.
  Style attributes are allowed too: figures and legends use them for colours,
  and with this policy they cannot load anything. `style-src` is the fallback
  for browsers without `style-src-elem` and `style-src-attr`:
  https://www.w3.org/TR/CSP3/

  Args:
    style: the whole text of the page's `<style>` element.
    script: the whole text of its `<script>` element.
  """

  def hashed(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"

  return "; ".join(
    (
      "default-src 'none'",
      f"script-src {hashed(script)}",
      "style-src 'unsafe-inline'",
      f"style-src-elem {hashed(style)}",
      "style-src-attr 'unsafe-inline'",
      "base-uri 'none'",
      "form-action 'none'",
    )
  )


def _figures(study: study_lib.Study) -> dict[str, Any]:
  """Returns every figure, by its name in the template."""
  index = study.index

  def chosen(
    curves: Sequence[curves_lib.Curve], labels: Sequence[str]
  ) -> list[curves_lib.Curve]:
    return [curve for curve in curves if curve.label in labels]

  return {
    "panels": [
      figures.panel(
        title,
        chosen(study.curves, labels),
        {
          dataset: chosen(curves, labels)
          for dataset, curves in study.by_dataset.items()
        },
        {label: study.hops.get(label, {}) for label in labels},
        {label: study.verification[label] for label in labels},
        index,
        name=f"panel-{number}",
        trained=study.trained,
      )
      for number, (title, labels) in enumerate(study.groups.items())
    ],
    "uses": [
      (index[label], label, figures.use(counts, name=f"use-{number}"))
      for number, (label, counts) in enumerate(study.use.items())
    ],
    "memory_uses": [
      (index[label], label, figures.memory_use(found, index[label], name=name))
      for number, (label, found) in enumerate(study.memory_use.items())
      if found and (name := f"memory-{number}")
    ],
    "surfaces": [
      (
        index[found.label],
        found.label,
        figures.surface(found, index[found.label], name=f"surface-{number}"),
      )
      for number, found in enumerate(study.surfaces)
    ],
    "samplings": [
      figures.sampling(run, name=f"sampling-{number}")
      for number, run in enumerate(study.training)
    ],
    "histories": figures.histories(study.training, index),
  }


def fixed(value: float | None, digits: int = 3, *, sign: str = "") -> str:
  """Formats a number for a table; a dash if it is undefined."""
  if value is None:
    return "–"
  return f"{value:{sign}.{digits}f}".replace("-", "−")


def parts(table: tables_lib.Table) -> list[tables_lib.Table]:
  """Splits a table into pieces of at most `_WIDE` columns.

  A wide table gets one piece for each group of columns; a group that is itself
  too wide gets several.
  """
  if len(table.columns) <= _WIDE:
    return [table]
  found, start = [], 0
  for _, width in _headings(table.columns):
    for first in range(start, start + width, _WIDE):
      cut = slice(first, min(first + _WIDE, start + width))
      lines = (
        dataclasses.replace(line, cells=line.cells[cut]) for line in table.lines
      )
      found.append(
        dataclasses.replace(
          table, columns=table.columns[cut], lines=tuple(lines)
        )
      )
    start += width
  return found


def _blocks(
  table: tables_lib.Table, most: int
) -> list[list[tuple[tables_lib.Line, list[int]]]]:
  """Returns the first lines by block, each with the ranks of its cells."""
  table = dataclasses.replace(table, lines=table.lines[:most])
  return [
    list(zip(block, tables_lib.ranks(block, table.columns), strict=True))
    for block in tables_lib.blocks(table)
  ]


def _headings(columns: Sequence[tables_lib.Column]) -> list[tuple[str, int]]:
  """Returns (name, number of columns) of each run of columns in a group."""
  found: list[tuple[str, int]] = []
  for column in columns:
    if found and found[-1][0] == column.group:
      found[-1] = (column.group, found[-1][1] + 1)
    else:
      found.append((column.group, 1))
  return found
