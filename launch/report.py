r"""Writes the report of one or more runs: one page, its numbers, its tables.

    python -m launch.report runs/a runs/b --output=runs/report/report.html

An argument is the folder of a run that contains `evaluation/<name>/`, the
folder of one evaluation, or `label=folder`. A run without an evaluation adds
its training curves only. Evaluations of one method joined by `+` make one row:
of one training or of several, which intervals then cover (docs/statistics.md).
The first row is the system under test. report.json, tables.md and a CSV file
for each table are written beside the page, so give it its own folder. The
default is `report/` inside the run of the first row.

The page needs no network and runs no script but its own, which its content
security policy enforces. It prints in landscape; a table of more than 60 lines
is printed only if it is open.

Rows and training runs can also be named one by one, as other commands do:

    python -m launch.report --output=runs/q/report.html \
        --rows="AnySearch=runs/q/anysearch/evaluation/plain,\
    No tool reward=runs/q/no_tool/evaluation/plain" \
        --controls="No tool reward" --tables="No tool reward=tool" \
        --training="AnySearch=runs/q/anysearch,No tool reward=runs/q/no_tool"

`--figure=FILE.svg` writes a single picture instead of the report: accuracy and
searches of all rows against the budget, for light and dark backgrounds.

Labels and folders may contain `=` and `+`: the longest suffix of an item that
names existing folders is read as folders, and the text before it as the label.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence

from absl import app, flags

from anysearch_jax import budgets as budgets_lib
from anysearch_jax.evaluation import columns, metrics
from anysearch_jax.report import build as report
from anysearch_jax.report import loading, picture, trajectories
from launch import flags as launch_flags
from launch import optimum_rows

_ROWS = flags.DEFINE_list(
  "rows", [], "label=folder of an evaluation, ...; before the arguments."
)
_CONTROLS = flags.DEFINE_list(
  "controls", [], "Labels of the rows that the first one is held against."
)
_TABLES = flags.DEFINE_list(
  "tables", [], "label=ablation, ...: tool, format, scaffold, sampling, phases."
)
_TRAINING = flags.DEFINE_list(
  "training", [], "label=folder of a training run, ...; labels as in --rows."
)
_SURFACES = flags.DEFINE_list(
  "surfaces",
  [],
  "label=folder of an evaluation under pairs of searches and tokens, ...",
)
_PRICES = flags.DEFINE_list(
  "prices",
  [],
  "US dollars of 1000 searches, of a million tokens read, of a million "
  "written; default: those that the evaluations were configured with.",
)
_OUTPUT = flags.DEFINE_string(
  "output",
  None,
  "The page; default: report/report.html in the run of the first row.",
)
_TITLE = flags.DEFINE_string(
  "title", "One policy, any budget", "Title of the page."
)
_NOTES = flags.DEFINE_string(
  "notes", "", "How this was made (commands, machine), shown on the page."
)
_FIGURE = flags.DEFINE_string(
  "figure", None, "An SVG file to write instead of the report."
)

_GROUP_FILES = 3  # Rollouts of a training run that the browser shows.


def parse_tables(items: Sequence[str]) -> dict[str, str]:
  """Parses `label=ablation` items. Raises ValueError if one is invalid."""
  found = {}
  for item in items:
    label, separator, table = item.rpartition("=")
    if not (separator and label.strip() and table.strip()):
      raise ValueError(
        f"--tables: found {item!r}, expected label=ablation; quote labels with "
        "spaces."
      )
    found[label.strip()] = table.strip()
  return found


def main(argv: Sequence[str]) -> None:
  try:
    sources = [
      loading.Source(*loading.named(item, labelled=True))
      for item in _ROWS.value
    ]
    runs = {}
    for item in _TRAINING.value:
      label, folders = loading.named(item, labelled=True)
      if len(folders) > 1:
        raise ValueError(
          f"--training: found {item!r}, expected one folder for each label."
        )
      runs[label] = folders[0]
    for item in argv[1:]:
      for source in loading.sources(item):
        sources.append(source)
        # Evaluations of one run are several rows and one training.
        if source.run is not None and source.run not in runs.values():
          runs[source.label] = source.run
    if not sources and not runs:
      raise ValueError(
        "Found no row; name the folder of a run or of an evaluation."
      )
    home = loading.home(sources[0]) if sources else next(iter(runs.values()))
    output = pathlib.Path(_OUTPUT.value or home / "report" / "report.html")
    waiting = [source for source in sources if not source.folders]
    sources = [source for source in sources if source.folders]
    rows = [
      optimum_rows.add(loading.load_row(s.label, *s.folders), s.folders)
      for s in sources
    ]
    training = [loading.load_training(*named) for named in runs.items()]
    if _FIGURE.value:
      _draw(pathlib.Path(_FIGURE.value), rows, training)
      return
    samples = [
      trajectories.Sample(
        row.label, row.episodes, loading.decoder(source.folders[0])
      )
      for row, source in zip(rows, sources, strict=True)
    ]
    samples += groups_of(runs)
    with _writing(output):
      data = report.write(
        output,
        rows,
        [label.strip() for label in _CONTROLS.value],
        training,
        samples=samples,
        groups=parse_tables(_TABLES.value),
        search_values={
          s.label: loading.load_search_value(*s.folders) for s in sources
        },
        prices=parse_prices(_PRICES.value),
        surfaces=_surfaces(_SURFACES.value),
        title=_TITLE.value,
        notes=_NOTES.value,
      )
  except ValueError as error:
    raise app.UsageError(str(error)) from error
  for source in waiting:
    print(
      f"{source.label} has no evaluation yet; the page shows its training. "
      f"{loading.how_to_evaluate(loading.home(source))}"
    )
  if rows:
    print(report.summary_table(data) + "\n")
  print(output)


def _draw(
  output: pathlib.Path,
  rows: Sequence[metrics.Row],
  training: Sequence[metrics.Training],
) -> None:
  """Writes the picture that `--figure` asks for."""
  if not rows:
    raise ValueError(
      "--figure: found no evaluation; expected one, because the picture shows "
      "accuracy at each budget. Run launch.evaluate first."
    )
  trained = report.trained_budget(rows[0].label, training)
  text = picture.svg(rows, trained=trained)
  with _writing(output):
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, "utf-8")
  print(output)


@contextlib.contextmanager
def _writing(output: pathlib.Path) -> Iterator[None]:
  """Exits with an error message if the report cannot be written."""
  try:
    yield
  except OSError as error:
    sys.exit(
      f"launch.report: {output} could not be written ({error}). Name another "
      "place with --output, or free some space."
    )


def parse_prices(items: Sequence[str]) -> budgets_lib.Prices | None:
  """Parses three prices; None without items. Raises ValueError otherwise."""
  if not items:
    return None
  try:
    search, read, written = map(float, items)
  except ValueError:
    raise ValueError(
      f"--prices: found {','.join(items)!r}, expected three numbers."
    ) from None
  return budgets_lib.Prices(search, read, written)


def _surfaces(items: Sequence[str]) -> dict[str, columns.Columns]:
  """Reads the rows of --surfaces. Raises ValueError if one is invalid."""
  named = (loading.named(item, labelled=True) for item in items)
  return {
    label: loading.load_row(label, *folders, paired=True).columns
    for label, folders in named
  }


def groups_of(
  runs: dict[str, pathlib.Path],
) -> list[trajectories.Sample]:
  """Returns each run's last recorded rollouts, with rewards and advantages."""
  found = []
  for label, folder in runs.items():
    paths = sorted((folder / "trajectories").glob("rollout-*.jsonl"))
    episodes = [e for path in paths[-_GROUP_FILES:] for e in _scored(path)]
    if episodes:
      found.append(trajectories.Sample(f"{label}, training", episodes))
  return found


def _scored(path: pathlib.Path) -> list[metrics.Episode]:
  """Returns a file's trajectories that have an advantage, as episodes.

  Their `seed` is the number of the rollout.
  """
  rollout = int(path.stem.rpartition("-")[2])
  groups = map(json.loads, path.read_bytes().splitlines())
  return [
    {k: v for k, v in group.items() if k != "trajectories"}
    | trajectory
    | {"seed": rollout, "training": True}
    for group in groups
    for trajectory in group["trajectories"]
    if "advantage" in trajectory
  ]


if __name__ == "__main__":
  launch_flags.run(main)
