"""Builds the report of a study: a self-contained page, numbers and tables.

`build` measures and `summary_table` formats; both are pure. `write` saves the
page, `report.json`, `tables.md` and a CSV file for each table. Equal inputs
give equal bytes.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import config as config_lib
from anysearch_jax.evaluation import (
  columns,
  comparison,
  costs,
  metrics,
  pairing,
  verdicts,
)
from anysearch_jax.evaluation import surfaces as surfaces_lib
from anysearch_jax.report import page, trajectories
from anysearch_jax.report import rows as study
from anysearch_jax.report import tables as tables_lib


@dataclasses.dataclass(frozen=True)
class Report:
  """The measurements: `data` as plain JSON, and the values that are drawn."""

  data: dict[str, Any]
  study: study.Study


def build(
  rows: Sequence[metrics.Row],
  controls: Sequence[str] = (),
  training: Sequence[metrics.Training] = (),
  *,
  groups: Mapping[str, str] | None = None,
  search_values: Mapping[str, Mapping[str, Any]] | None = None,
  prices: budgets_lib.Prices | None = None,
  surfaces: Mapping[str, columns.Columns] | None = None,
  notes: str = "",
  draws: int = 10_000,
) -> Report:
  """Measures everything that the page and `report.json` show.

  Args:
    rows: the first is the system under test; empty if nothing was evaluated
      yet, then the report is of the training runs only.
    controls: labels of the rows that it is compared with.
    training: the training runs of the rows.
    groups: by label, the table of ablations that shows the row; see
      `rows.measure`.
    search_values: by label, the value of one more search, see
      `loading.load_search_value`.
    prices: prices for costs; None keeps the costs recorded in the episodes.
    surfaces: by label, episodes under pairs of caps on searches and tokens.
    notes: how the report was made, plain text.
    draws: number of draws of each test by flipped signs, at least.

  Raises:
    ValueError: a row has budgets in more units than searches, or a surface has
      none; there is neither a row nor a training run, a label occurs twice,
      a control or a label of `groups` is not a row, or rows were measured on
      different questions.
  """
  groups = groups or {}
  _check(rows, controls, training, groups)
  paired = surfaces or {}
  if prices:
    paired = {
      label: costs.priced(table, prices) for label, table in paired.items()
    }
    rows = [
      dataclasses.replace(row, table=costs.priced(row.columns, prices))
      for row in rows
    ]
  compared = _compare(rows)
  system = (rows[0] if rows else training[0]).label
  measured = study.measure(
    rows,
    training,
    {label: table for label, (_, table) in compared.items()},
    groups=groups,
    search_values=search_values or {},
    trained=trained_budget(system, training),
    surfaces=[surfaces_lib.surface(*named) for named in paired.items()],
    draws=draws,
  )
  data = {
    "system": system,
    "controls": list(controls),
    "trained_budget": measured.trained,
    **_coverage(rows),
    "datasets": list(measured.by_dataset),
    **_judged(rows, controls, compared, measured),
    "left_out": [
      {"with": label, "failed": pairs.failed, "unpaired": pairs.unpaired}
      for label, (pairs, _) in compared.items()
      if pairs.failed or pairs.unpaired
    ],
    "training": [_training_data(run, measured) for run in training],
    "configuration": configuration_differences(training),
    "tables": {t.name: tables_lib.to_json(t) for t in measured.tables},
    "notes": notes,
  }
  return Report(data, measured)


def _check(
  rows: Sequence[metrics.Row],
  controls: Sequence[str],
  training: Sequence[metrics.Training],
  groups: Mapping[str, str],
) -> None:
  """Checks that labels are unique, and that the others name rows."""
  labels = [row.label for row in rows]
  if not rows and not training:
    raise ValueError(
      "Found no row and no training run; name at least the system under test."
    )
  if len(set(labels)) < len(labels):
    raise ValueError(f"Found two rows of one label in {labels}; rename one.")
  for label in controls:
    if label not in labels[1:]:
      raise ValueError(
        f"Control {label!r} is not a row after the first; expected one of "
        f"{labels[1:]}."
      )
  for label, title in groups.items():
    if label not in labels:
      raise ValueError(
        f"Table {title!r} names {label!r}, which is not a row; expected one "
        f"of {labels}."
      )


def _compare(
  rows: Sequence[metrics.Row],
) -> dict[str, verdicts.Compared]:
  """Compares the first row with each of the others, by their labels."""
  compared: dict[str, verdicts.Compared] = {}
  for row in rows[1:]:
    pairs = pairing.pair(rows[0], row)
    table = comparison.compare(pairs)
    compared[row.label] = pairs, table
  return compared


def _coverage(rows: Sequence[metrics.Row]) -> dict[str, Any]:
  """Returns the system's questions and seeds, and the budgets of all rows."""
  budgets = {b for row in rows for b in metrics.budgets(row.columns)}
  system = rows[0].columns if rows else None
  return {
    "questions": 0 if system is None else len(set(system.question.tolist())),
    "seeds": [] if system is None else sorted(set(system.seed.tolist())),
    "trainings": 0 if system is None else len(system.runs),
    "budgets": sorted(budgets),
  }


def _judged(
  rows: Sequence[metrics.Row],
  controls: Sequence[str],
  compared: Mapping[str, verdicts.Compared],
  measured: study.Study,
) -> dict[str, Any]:
  """Returns the rows and the verdicts on the first of them."""
  if not rows:
    return {"rows": [], "verdicts": []}
  recalled = {row.label: comparison.knowledge(row) for row in rows}
  found = verdicts.verdicts(
    rows,
    controls,
    compared=compared,
    recalled=recalled[rows[0].label],
  )
  return {
    "rows": [
      study.row_data(row, curve, measured)
      | {
        "knowledge": {
          kind: number.estimate._asdict() | {"n": number.n}
          for kind, number in recalled[row.label].items()
        }
      }
      for row, curve in zip(rows, measured.curves, strict=True)
    ],
    "verdicts": [
      dataclasses.asdict(verdict) | {"numbers": _numbers(verdict.numbers)}
      for verdict in found
    ],
  }


def _training_data(
  run: metrics.Training, measured: study.Study
) -> dict[str, Any]:
  """Returns the length of a training run."""
  return {
    "label": run.label,
    "index": measured.index[run.label],
    "rollouts": len(run.records),
    "rollout_minutes": _total(run, "time/rollout") / 60,
    "train_minutes": _total(run, "time/train") / 60,
    "failed": int(_total(run, "rollout/failed")),
  }


def _numbers(numbers: Sequence[comparison.Number]) -> list[dict[str, Any]]:
  return [
    {"label": n.label, "n": n.n, "detectable": n.detectable}
    | n.estimate._asdict()
    for n in numbers
  ]


def trained_budget(label: str, training: Sequence[metrics.Training]) -> int:
  """Returns the largest training budget; the default one if unknown."""
  own = [run for run in training if run.label == label] or training[:1]
  default = config_lib.CurriculumConfig()
  curriculum = own[0].config.get("curriculum", {}) if own else {}
  fixed = curriculum.get("fixed_budget", default.fixed_budget)
  largest = curriculum.get("max_budget", default.max_budget)
  return fixed if fixed >= 0 else largest


def _total(run: metrics.Training, key: str) -> float:
  return sum(record.get(key) or 0.0 for record in run.records)


def configuration_differences(
  training: Sequence[metrics.Training],
) -> dict[str, Any]:
  """Returns the configuration values that differ between runs.

  Returns:
    `labels`: the runs that saved a configuration. `lines`: {`key`: dotted path,
    `values`: JSON text for each run, None if it lacks the key}.
  """

  def flatten(node: Any, path: str = "") -> dict[str, str]:
    if not isinstance(node, Mapping):
      return {path: json.dumps(node)}
    flat: dict[str, str] = {}
    for key, value in node.items():
      flat |= flatten(value, f"{path}.{key}" if path else key)
    return flat

  configs = {run.label: flatten(run.config) for run in training if run.config}
  lines = [
    {"key": key, "values": [config.get(key) for config in configs.values()]}
    for key in sorted({key for config in configs.values() for key in config})
    if key != "name"
  ]
  return {
    "labels": list(configs),
    "lines": [line for line in lines if len(set(line["values"])) > 1],
  }


def write(
  output: pathlib.Path,
  rows: Sequence[metrics.Row],
  controls: Sequence[str] = (),
  training: Sequence[metrics.Training] = (),
  *,
  samples: Sequence[trajectories.Sample] = (),
  title: str = "One policy, any budget",
  **options: Any,
) -> dict[str, Any]:
  """Writes the page to `output`, and the other files into the same folder.

  Args:
    output: path of the page.
    rows, controls, training: as for `build`.
    samples: further episodes to show, such as those of training runs. A sample
      with a row's label replaces the row's own episodes.
    title: title of the page.
    options: further arguments of `build`.

  Returns:
    The data of `build`.
  """
  report = build(rows, controls, training, **options)
  given = {sample.label: sample for sample in samples}
  shown = [
    given.get(row.label) or trajectories.Sample(row.label, row.episodes)
    for row in rows
  ]
  labels = {row.label for row in rows}
  others = [sample for sample in samples if sample.label not in labels]
  html = page.render(report.data, report.study, shown, others, title=title)
  output.parent.mkdir(parents=True, exist_ok=True)
  # A model may emit an unpaired surrogate, which UTF-8 cannot encode.
  output.write_bytes(html.encode("utf-8", "replace"))
  numbers = json.dumps(report.data, indent=1, allow_nan=False)
  output.with_name("report.json").write_text(numbers + "\n", "utf-8")
  tables = [table for table in report.study.tables if table.lines]
  for table in tables:
    text = tables_lib.to_csv(table)
    output.with_name(f"{table.name}.csv").write_bytes(
      text.encode("utf-8", "replace")
    )
  output.with_name("tables.md").write_bytes(
    "\n".join(map(tables_lib.to_markdown, tables)).encode("utf-8", "replace")
  )
  return report.data


def summary_table(data: Mapping[str, Any]) -> str:
  """Formats rows x budgets as plain text: accuracy in percent, searches, TP."""
  budgets = [str(b) for b in data["budgets"]]
  width = 10
  regret = any(
    cell.get("regret") is not None
    for row in data["rows"]
    for cell in row["cells"].values()
  )
  lines = [
    " " * 11 + "".join(f"{'B=' + b:>{width}}" for b in [*budgets, "mean"])
  ]
  lines[0] = lines[0].replace("B=mean", "  mean")
  for row in data["rows"]:
    cells = [row["cells"].get(b) for b in budgets] + [row["average"]]
    lines.append(row["label"])
    for name, show in (
      ("accuracy", _accuracy_text),
      *([("regret", lambda c: _fixed(c["regret"]))] if regret else []),
      ("searches", lambda c: _fixed(c["searches"])),
      ("TP", lambda c: _fixed(c["tp"])),
    ):
      texts = ["-" if c is None else show(c) for c in cells]
      lines.append(f"  {name:<9}" + "".join(f"{t:>{width}}" for t in texts))
  return "\n".join(lines)


def _accuracy_text(cell: Mapping[str, Any]) -> str:
  low, high = cell["accuracy_interval"]
  if cell["accuracy"] is None or low is None:
    return "-"
  return f"{100 * cell['accuracy']:.1f}±{50 * (high - low):.1f}"


def _fixed(value: float | None) -> str:
  return "-" if value is None else f"{value:.2f}"
