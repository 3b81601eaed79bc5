"""Writes the report of one or more runs: one page, its numbers, its tables.

    anysearch report runs/a
    anysearch report runs/a runs/b --output=runs/report/report.html

An argument is the folder of a run that contains `evaluation/<name>/`, the
folder of one evaluation, or `label=folder`. A run without an evaluation adds
its training curves only. Evaluations of one method joined by `+` make one row:
of one training or of several, which intervals then cover (docs/statistics.md).
The first row is the system under test. report.json, a CSV file for each table
and curves.svg (accuracy and searches by budget, for light and dark backgrounds)
are written beside the page, so give it its own folder. The default is `report/`
inside the run of the first row.

Episodes to read are in trajectories.html beside it. The pages need no network
and run no script but their own, which their content security policy enforces.
They print in landscape, with all but long tables.

Labels and folders may contain `=` and `+`: the longest suffix of an item that
names existing folders is read as folders, and the text before it as the label.
Of several folders none has a `+` in its name.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from anysearch_jax import budgets as budgets_lib
from anysearch_jax import config as config_lib
from anysearch_jax.config import settings
from anysearch_jax.evaluation import metrics
from anysearch_jax.host import json_files
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import parts
from anysearch_jax.report import (
  loading,
  page,
  study,
  study_tables,
  tables,
  trajectories,
)
from anysearch_jax.world import optimum


def define_flags() -> None:
  flags.DEFINE_list(
    "tables",
    [],
    "Rows for the tables of ablations, as label=ablation, separated by commas; "
    "ablation is tool, format, scaffold, sampling or phases.",
  )
  launch_flags.define_prices("default: those of the evaluations.")
  flags.DEFINE_string(
    "output",
    None,
    "File of the page, in a folder of its own; default: report/report.html in "
    "the run of the first row.",
  )
  flags.DEFINE_string("title", "One policy, any budget", "Title of the page.")
  flags.DEFINE_string(
    "notes",
    "",
    "How the runs were made (commands, machine), shown on the page.",
  )


def parse_tables(items: Sequence[str]) -> dict[str, str]:
  """Parses `label=ablation` items. Raises ValueError if one is invalid."""
  tables_by_label = {}
  for item in items:
    label, separator, table = item.rpartition("=")
    if not (separator and label.strip() and table.strip()):
      raise ValueError(
        f"--tables: found {item!r}, expected label=ablation; quote labels with "
        "spaces."
      )
    tables_by_label[label.strip()] = table.strip()
  return tables_by_label


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  sources = [source for item in argv[1:] for source in loading.sources(item)]
  if not sources:
    raise ValueError(
      "Found no row; name the folder of a run or of an evaluation."
    )
  # Evaluations of one run are several rows and one training.
  runs: dict[str, pathlib.Path] = {}
  for source in sources:
    if source.run is not None and source.run not in runs.values():
      runs[source.label] = source.run
  home = loading.report_folder(sources[0])
  output = pathlib.Path(f.output or home / "report" / "report.html")
  evaluated_sources = [source for source in sources if source.folders]
  rows = [
    with_optimum(loading.load_row(x.label, *x.folders), x.folders)
    for x in evaluated_sources
  ]
  training = [
    loading.load_training(*label_and_folder)
    for label_and_folder in runs.items()
  ]
  priced = launch_flags.apply_prices(config_lib.ExperimentConfig())
  settings.check(priced)
  study_result = study.measure(
    rows,
    training,
    groups=parse_tables(f.tables),
    prices=priced.evaluation.prices if f.prices else None,
    configured=_stored_prices(
      [path for s in evaluated_sources for path in s.folders]
    ),
  )
  samples = [
    trajectories.Sample(row.label, row.episodes, loading.decoder(s.folders[0]))
    for row, s in zip(rows, evaluated_sources, strict=True)
  ]
  recorded_samples = [
    loading.recorded_rollouts(*label_and_folder)
    for label_and_folder in runs.items()
  ]
  recorded_samples = [sample for sample in recorded_samples if sample.episodes]
  try:
    page_values = page.write(
      output,
      study_result,
      samples,
      recorded_samples,
      title=f.title,
      notes=f.notes,
    )
  except OSError as error:
    raise OSError(
      f"{output} could not be written ({error}). Name another place with "
      "--output, or free some space."
    ) from error
  for source in sources:
    if not source.folders:
      print(
        f"{source.label} has no evaluation yet; the page shows its training. "
        f"{loading.how_to_evaluate(loading.report_folder(source))}"
      )
  if rows:
    print(tables.to_text(study_tables.overview(study_result.rows)))
    print("", *page_values["summary"], "", sep="\n")
  print(output)


def with_optimum(
  row: metrics.Row, folders: Sequence[pathlib.Path]
) -> metrics.Row:
  """Returns a row with the best agent's accuracy on each of its questions.

  The questions of the generated world say all that the agent would see, so that
  its accuracy is computed, in about ten milliseconds a question and budget. A
  row whose evaluations are not all of one generated world is unchanged. Raises
  ValueError if a question is not one of that world.
  """
  worlds = {_data(folder) for folder in folders}
  if len(worlds) != 1 or (data := worlds.pop()) is None:
    return row
  columns = row.columns
  budgets = np.unique(columns.budget).tolist()
  try:
    best_accuracy = _best(data, tuple(columns.ids), tuple(budgets))
  except ValueError as error:
    raise ValueError(f"Row {row.label!r}: {error}") from error
  return dataclasses.replace(
    row, table=columns.with_optimum(best_accuracy, budgets)
  )


def _stored(folder: pathlib.Path, group: str, default: Any) -> dict[str, Any]:
  """Returns a group of an evaluation's settings; {} if it stored none."""
  path = folder / "config.json"
  if not path.is_file():
    return {}
  stored_config = json_files.read(path)
  return dataclasses.asdict(default) | stored_config.get(group, {})


def _data(folder: pathlib.Path) -> config_lib.DataConfig | None:
  """Returns the settings of an evaluation's world; None without one."""
  default = config_lib.DataConfig()
  data = _stored(folder, "data", default)
  if data.get("source") != default.source:
    return None
  names = ("world_seed", "world_reliability")
  return config_lib.DataConfig(**{name: data[name] for name in names})


def _stored_prices(
  folders: Sequence[pathlib.Path],
) -> budgets_lib.Prices | None:
  """Returns the prices of evaluations; None if they differ or are unknown."""
  default = config_lib.EvaluationConfig()
  settings_of = [_stored(f, "evaluation", default) for f in folders]
  prices = {
    (e["search_price"], e["input_price"], e["output_price"])
    for e in settings_of
    if e
  }
  if len(prices) != 1:
    return None
  search, input_, output = prices.pop()
  return budgets_lib.Prices(search=search, input=input_, output=output)


# Rows of a report share their questions.
@functools.cache
def _best(
  data: config_lib.DataConfig, ids: tuple[str, ...], budgets: tuple[int, ...]
) -> np.ndarray:
  """Returns P(right answer) of the best agent, float64 `[N, B]`."""
  world = parts.generated_world(data)
  return optimum.accuracy(optimum.Optimum(world), ids, budgets)


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, arguments="RUN...")
