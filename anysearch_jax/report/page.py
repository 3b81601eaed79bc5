"""The report of a study: self-contained pages, its numbers and its tables.

`data` is pure; `write` saves the page, `trajectories.html`, `curves.svg`,
`report.json` and a CSV file for each table. Equal inputs give equal bytes.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jinja2
import markupsafe

from anysearch_jax.config import settings
from anysearch_jax.report import figures, study_tables, summary, trajectories
from anysearch_jax.report import study as study_lib
from anysearch_jax.report import tables as tables_lib

_MAX_LINES = 300  # Lines of a table on the page; its CSV file has all.
_LONG_LINES = 60  # Tables with more lines are printed only if they are open.
_WIDE_COLUMNS = 10  # Tables with more columns are printed smaller.
_FILES = pathlib.Path(__file__).parent
_TRAJECTORIES = "trajectories.html"


def data(
  study: study_lib.Study, tables: Sequence[tables_lib.Table], *, notes: str = ""
) -> dict[str, Any]:
  """Returns all numbers and words of the page, as plain JSON.

  Args:
    study: the measurements.
    tables: the tables of the study.
    notes: text of the author.
  """
  system = study.rows[0].columns if study.rows else None
  return {
    "summary": summary.sentences(study),
    "system": study.system,
    "trained_budget": study.trained,
    "questions": len(set(system.question.tolist())) if system else 0,
    "seeds": sorted(set(system.seed.tolist())) if system else [],
    "trainings": len(system.runs) if system else 0,
    "budgets": sorted({b for row in study.rows for b in row.by_budget}),
    "datasets": study_lib.datasets(study.rows),
    "rows": [
      {
        "label": row.label,
        "index": study.index[row.label],
        "lacks": study_lib.missing_cells(row, study.rows),
      }
      for row in study.rows
    ],
    "left_out": [
      {"with": label, "failed": pairs.failed, "unpaired": pairs.unpaired}
      for label, (pairs, _) in study.compared.items()
      if pairs.failed or pairs.unpaired
    ],
    "training": [run.label for run in study.training],
    "configuration": configuration_differences(study.training),
    "tables": {t.name: tables_lib.to_json(t) for t in tables},
    "notes": notes,
  }


def configuration_differences(
  training: Sequence[study_lib.Training],
) -> dict[str, Any]:
  """Returns the configuration values that differ between runs.

  `labels` are the runs that saved a configuration; a line has its `key`, a
  dotted path, and `values`, JSON text for each run, None if it lacks the key.
  """
  configs = {
    run.label: {
      path: json.dumps(value) for path, value in settings.leaves(run.config)
    }
    for run in training
    if run.config
  }
  keys = sorted({key for flat in configs.values() for key in flat} - {"name"})
  lines = [
    {"key": key, "values": [flat.get(key) for flat in configs.values()]}
    for key in keys
  ]
  return {
    "labels": list(configs),
    "lines": [line for line in lines if len(set(line["values"])) > 1],
  }


def _security_policy(*, style: str, script: str) -> str:
  """Returns the page's content security policy.

  It allows this style sheet and this script, by their hashes, and nothing else.
  Style attributes are allowed too: figures and legends use them for colours,
  and with this policy they cannot load anything. `style-src` is the fallback
  for browsers without `style-src-elem` and `style-src-attr`:
  https://www.w3.org/TR/CSP3/
  """

  def hashed(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"

  return (
    f"default-src 'none'; script-src {hashed(script)}; "
    f"style-src 'unsafe-inline'; style-src-elem {hashed(style)}; "
    "style-src-attr 'unsafe-inline'; base-uri 'none'; form-action 'none'"
  )


def fixed(value: float | None, digits: int = 3, *, sign: str = "") -> str:
  """Formats a number for a table.

  Args:
    value: the number; None, undefined, gives a dash.
    digits: number of decimals.
    sign: "+" to show a plus sign.
  """
  if value is None:
    return "–"
  return f"{value:{sign}.{digits}f}".replace("-", "−")


def _blocks(
  table: tables_lib.Table, max_lines: int
) -> list[list[tuple[tables_lib.Line, list[int]]]]:
  """Returns the first lines by block, each with the ranks of its cells."""
  table = dataclasses.replace(table, lines=table.lines[:max_lines])
  return [
    list(zip(block, tables_lib.ranks(block, table.columns), strict=True))
    for block in tables_lib.blocks(table)
  ]


def _headings(columns: Sequence[tables_lib.Column]) -> list[tuple[str, int]]:
  """Returns (name, number of columns) of each run of columns in a group."""
  grouped = itertools.groupby(columns, lambda column: column.group)
  return [(group, len(list(run))) for group, run in grouped]


def write(
  output: pathlib.Path,
  study: study_lib.Study,
  samples: Sequence[trajectories.Sample] = (),
  groups: Sequence[trajectories.Sample] = (),
  *,
  title: str = "One policy, any budget",
  notes: str = "",
) -> dict[str, Any]:
  """Writes the report to `output`, and the other files into the same folder.

  Args:
    output: path of the page.
    study: the measurements.
    samples: complete episodes of the rows, for the page of trajectories.
    groups: complete episodes of training runs, for the same page.
    title: title of the page.
    notes: text of the author.

  Returns:
    The contents of report.json, see `data`.
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
    "glyph": figures.glyph,
    "blocks": _blocks,
    "headings": _headings,
  }
  style = (_FILES / "page.css").read_text("utf-8")
  tables = study_tables.tables(study)
  report = data(study, tables, notes=notes)

  def page(template: str, script: str, **values: Any) -> str:
    text = (_FILES / script).read_text("utf-8")
    return environment.get_template(template).render(
      data=report,
      title=title,
      policy=_security_policy(style=style, script=text),
      style=markupsafe.Markup(style),
      script=markupsafe.Markup(text),
      **values,
    )

  browser_data = trajectories.browser_data([*samples, *groups])
  pages = {
    output.name: page(
      "template.html",
      "sections.js",
      index=study.index,
      tables={table.name: table for table in tables},
      most=_MAX_LINES,
      long=_LONG_LINES,
      wide=_WIDE_COLUMNS,
      series=figures.SERIES,
      figures=figures.page_figures(study),
      contents=[],
      trajectories=_TRAJECTORIES if browser_data["entries"] else "",
    )
  }
  if browser_data["entries"]:
    indices = [study.index[sample.label] for sample in samples]
    browser_data["marks"] = [
      (figures.glyph(i), i % figures.SERIES) for i in indices
    ]
    pages[_TRAJECTORIES] = page(
      _TRAJECTORIES,
      "browser.js",
      report=output.name,
      browser=markupsafe.Markup(trajectories.script(browser_data)),
    )
  filled_tables = [table for table in tables if table.lines]
  files = pages | {f"{t.name}.csv": tables_lib.to_csv(t) for t in filled_tables}
  files["report.json"] = json.dumps(report, indent=1, allow_nan=False) + "\n"
  if study.rows:
    files["curves.svg"] = figures.standalone_file(
      study.rows, trained=study.trained
    )
  output.parent.mkdir(parents=True, exist_ok=True)
  for name, text in files.items():
    # A model may emit an unpaired surrogate, which UTF-8 cannot encode.
    output.with_name(name).write_bytes(text.encode("utf-8", "replace"))
  return report
