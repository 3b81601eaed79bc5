"""The report of a study: one self-contained page, its numbers, a short table.

`build` measures and `summary_table` prints, both pure; `write` leaves the page
and `report.json` on disk. Equal inputs give equal bytes.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax.evaluation import (
  comparison,
  intervals,
  metrics,
  page,
  verdicts,
)


def load_row(label: str, *folders: pathlib.Path) -> metrics.Row:
  """Reads `<run>/evaluation/<name>/episodes.jsonl` of one or more runs.

  Several folders are one row: runs of one method with different seeds.

  Raises:
    ValueError: no such file, an episode in it that cannot be used, or the
      same (question, budget, seed) twice.
  """
  episodes = []
  for folder in folders:
    path = folder / "episodes.jsonl"
    if not path.is_file():
      raise ValueError(
        f"Row {label!r}: found no {path}; expected the folder of a finished "
        "evaluation. Run the evaluation first, or correct its path."
      )
    with path.open(encoding="utf-8") as lines:
      episodes += metrics.parse_episodes(lines, source=str(path))
  keys = {metrics.key_of(episode) for episode in episodes}
  if len(keys) < len(episodes):
    raise ValueError(
      f"Row {label!r}: found {len(episodes)} episodes with {len(keys)} "
      "(question, budget, seed); expected each once. Give every run of a row "
      "its own evaluation seed."
    )
  return metrics.Row(label, episodes, run=str(folders[0].parent.parent))


def load_training(label: str, folder: pathlib.Path) -> metrics.Training:
  """Reads `metrics.jsonl` and, where there is one, `config.json` of a run.

  A rollout that was repeated after a resume counts once, as it was last.

  Raises:
    ValueError: no metrics, or a line of them that is not JSON.
  """
  path = folder / "metrics.jsonl"
  if not path.is_file():
    raise ValueError(
      f"Training run {label!r}: found no {path}; expected the folder of a "
      "training run. Train it first, or correct its path."
    )
  records = {}
  for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
    try:
      record = json.loads(line) if line.strip() else None
    except json.JSONDecodeError as error:
      raise ValueError(
        f"{path}, line {number}: found text that is not JSON ({error}); "
        "expected one rollout a line. Remove the line if a crash cut it."
      ) from error
    if record is not None:
      records[record.get("rollout", number - 1)] = record
  config = folder / "config.json"
  return metrics.Training(
    label,
    tuple(records[key] | {"rollout": key} for key in sorted(records)),
    json.loads(config.read_text("utf-8")) if config.is_file() else {},
  )


def build(
  rows: Sequence[metrics.Row],
  controls: Sequence[str] = (),
  training: Sequence[metrics.Training] = (),
  *,
  notes: str = "",
  resamples: int = 10_000,
) -> dict[str, Any]:
  """Measures everything that the page and `report.json` show.

  Args:
    rows: the first is the system under test.
    controls: labels of the rows it is held against.
    training: the runs behind the rows.
    notes: how this was made, plain text.
    resamples: of every bootstrap.

  Returns:
    A JSON-ready dict.

  Raises:
    ValueError: no row, a label that occurs twice, a control that is no row,
      or rows that were measured on different questions.
  """
  labels = [row.label for row in rows]
  if not rows:
    raise ValueError("Found no row; name at least the system under test.")
  if len(set(labels)) < len(labels):
    raise ValueError(f"Found two rows of one label in {labels}; rename one.")
  for label in controls:
    if label not in labels[1:]:
      raise ValueError(
        f"Control {label!r} is none of the rows after the first; expected "
        f"one of {labels[1:]}."
      )
  system = rows[0]
  compared = {}
  for row in rows[1:]:
    pairs = comparison.pair(system, row)
    compared[row.label] = (
      pairs,
      comparison.compare(pairs, resamples=resamples),
    )
  recalled = {
    row.label: comparison.knowledge(row, resamples=resamples) for row in rows
  }
  return {
    "system": system.label,
    "controls": list(controls),
    "trained_budget": _trained_budget(system.label, training),
    "questions": len({e["question_id"] for e in system.episodes}),
    "seeds": sorted({e["seed"] for e in system.episodes}),
    "budgets": metrics.budgets(e for row in rows for e in row.episodes),
    "rows": [
      _row(row, index, recalled[row.label], resamples)
      for index, row in enumerate(rows)
    ],
    "verdicts": [
      dataclasses.asdict(verdict) | {"numbers": _numbers(verdict.numbers)}
      for verdict in verdicts.verdicts(
        rows,
        controls,
        compared=compared,
        recalled=recalled[system.label],
        resamples=resamples,
      )
    ],
    "comparisons": [
      {
        "with": label,
        "failed": pairs.failed,
        "unpaired": pairs.unpaired,
        "table": [
          dataclasses.asdict(line)
          | {
            "difference": line.difference._asdict(),
            "tp_difference": line.tp_difference._asdict(),
          }
          for line in table
        ],
      }
      for label, (pairs, table) in compared.items()
    ],
    "training": [
      {
        "label": run.label,
        "index": _series_of(run.label, labels, training),
        "rollouts": len(run.records),
        "rollout_minutes": _total(run, "time/rollout") / 60,
        "train_minutes": _total(run, "time/train") / 60,
        "failed": int(_total(run, "rollout/failed")),
      }
      for run in training
    ],
    "configuration": configuration_differences(training),
    "notes": notes,
  }


def _row(
  row: metrics.Row,
  index: int,
  recalled: Mapping[str, comparison.Number],
  resamples: int,
) -> dict[str, Any]:
  cells = metrics.by_budget(row.episodes)
  tp = comparison.productivities(row.episodes, resamples=resamples)
  undefined = intervals.Estimate(None, None, None)

  def describe(
    cell: metrics.Cell, accuracy: intervals.Estimate, budget: int | None
  ) -> dict[str, Any]:
    return dataclasses.asdict(cell) | {
      "accuracy_interval": [accuracy.low, accuracy.high],
      "tp_interval": list(tp.get(budget, undefined)[1:]),
    }

  return {
    "label": row.label,
    "index": index,
    "cells": {
      str(budget): describe(
        cell, intervals.wilson(cell.correct, cell.n), budget
      )
      for budget, cell in cells.items()
    },
    "average": describe(
      metrics.average(list(cells.values())),
      comparison.pooled_accuracy(row.episodes, resamples=resamples),
      None,
    ),
    "hops": {
      str(hops): {
        str(budget): {"correct": correct, "n": n, "accuracy": correct / n}
        for budget, (correct, n) in table.items()
      }
      for hops, table in metrics.by_hops(row.episodes).items()
    },
    "knowledge": {
      kind: number.estimate._asdict() | {"n": number.n}
      for kind, number in recalled.items()
    },
  }


def _numbers(numbers: Sequence[comparison.Number]) -> list[dict[str, Any]]:
  return [{"label": n.label, "n": n.n} | n.estimate._asdict() for n in numbers]


def _trained_budget(label: str, training: Sequence[metrics.Training]) -> int:
  """The largest budget of the system's training; the paper's if unknown."""
  own = [run for run in training if run.label == label] or training[:1]
  default = config_lib.CurriculumConfig()
  curriculum = own[0].config.get("curriculum", {}) if own else {}
  fixed = curriculum.get("fixed_budget", default.fixed_budget)
  largest = curriculum.get("max_budget", default.max_budget)
  return fixed if fixed >= 0 else largest


def _series_of(
  label: str, rows: Sequence[str], training: Sequence[metrics.Training]
) -> int:
  """Colour of a training run: that of its row, else one no row has."""
  extra = [run.label for run in training if run.label not in rows]
  return [*rows, *extra].index(label)


def _total(run: metrics.Training, key: str) -> float:
  return sum(record.get(key) or 0.0 for record in run.records)


def configuration_differences(
  training: Sequence[metrics.Training],
) -> dict[str, Any]:
  """The configuration values that are not the same in every run.

  Returns:
    `labels` of the runs that saved a configuration, and `lines` of {`key`: its
    dotted path, `values`: JSON text by run, None where it lacks the key}.
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
  title: str = "One policy, any budget",
  notes: str = "",
  resamples: int = 10_000,
) -> dict[str, Any]:
  """Writes the page to `output` and its numbers to `report.json` beside it.

  Returns:
    What `build` returns.
  """
  data = build(rows, controls, training, notes=notes, resamples=resamples)
  html = page.render(data, rows, controls, training, title=title)
  output.parent.mkdir(parents=True, exist_ok=True)
  # A model may emit half a surrogate pair, which UTF-8 cannot hold.
  output.write_bytes(html.encode("utf-8", "replace"))
  numbers = json.dumps(data, indent=1, allow_nan=False)
  output.with_name("report.json").write_text(numbers + "\n", "utf-8")
  return data


def summary_table(data: Mapping[str, Any]) -> str:
  """Rows x budgets as plain text: accuracy in percent, searches, TP."""
  budgets = [str(b) for b in data["budgets"]]
  width = 10
  lines = [
    " " * 11 + "".join(f"{'B=' + b:>{width}}" for b in [*budgets, "mean"])
  ]
  lines[0] = lines[0].replace("B=mean", "  mean")
  for row in data["rows"]:
    cells = [row["cells"].get(b) for b in budgets] + [row["average"]]
    lines.append(row["label"])
    for name, show in (
      ("accuracy", _accuracy_text),
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
