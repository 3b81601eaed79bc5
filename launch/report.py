"""Writes the report of a study: one page, its numbers, a table to read here.

    python -m launch.report --output=runs/q/report.html \
        --rows="AnySearch=runs/q/anysearch/evaluation/plain,\
    No tool reward=runs/q/no_tool/evaluation/plain" \
        --controls="No tool reward" \
        --training="AnySearch=runs/q/anysearch,No tool reward=runs/q/no_tool"

The first row is the system under test. Folders of several seeds make one row,
joined by `+`. A label may hold `=`, a path may hold neither.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import app, flags

from anysearch_jax.evaluation import report

_ROWS = flags.DEFINE_list(
  "rows", [], "label=folder of an evaluation, ...; also as plain arguments."
)
_CONTROLS = flags.DEFINE_list(
  "controls", [], "Labels of the rows that the first one is held against."
)
_TRAINING = flags.DEFINE_list(
  "training", [], "label=folder of a training run, ...; labels as in --rows."
)
_OUTPUT = flags.DEFINE_string(
  "output", "report.html", "The page; report.json is written beside it."
)
_TITLE = flags.DEFINE_string(
  "title", "One policy, any budget", "Title of the page."
)
_NOTES = flags.DEFINE_string(
  "notes", "", "How this was made (commands, machine), shown on the page."
)


def parse_pairs(items: Sequence[str]) -> list[tuple[str, str]]:
  """`label=path` items as pairs. Raises ValueError with a sentence."""
  pairs = []
  for item in items:
    label, separator, path = item.rpartition("=")
    if not (separator and label.strip() and path.strip()):
      raise ValueError(
        f"Found {item!r}, expected label=folder; quote labels with spaces."
      )
    pairs.append((label.strip(), path.strip()))
  return pairs


def main(argv: Sequence[str]) -> None:
  output = pathlib.Path(_OUTPUT.value)
  try:
    data = report.write(
      output,
      [
        report.load_row(label, *map(pathlib.Path, folder.split("+")))
        for label, folder in parse_pairs([*_ROWS.value, *argv[1:]])
      ],
      [label.strip() for label in _CONTROLS.value],
      [
        report.load_training(label, pathlib.Path(folder))
        for label, folder in parse_pairs(_TRAINING.value)
      ],
      title=_TITLE.value,
      notes=_NOTES.value,
    )
  except ValueError as error:
    raise app.UsageError(str(error)) from error
  print(report.summary_table(data))
  print(f"\n{output}")


if __name__ == "__main__":
  app.run(main)
