"""Measures a new accelerator in half an hour.

    python -m bench.first_gpu --minutes=25 --output=DIR
    python -m bench.first_gpu --rehearse --output=DIR      on a CPU, tiny

Writes DIR/first_gpu.json (the `stages` with name, status, seconds and figures)
and DIR/first_gpu.txt, the same as a table, after each stage. Stages run in
order of worth, each in a process of its own with a time limit. The same command
again runs what is not done. Weights and texts are random, in the policies' real
shapes; nothing is downloaded. docs/training.md explains the figures.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from bench import harness
from bench.first_gpu import running
from launch import jax_setup


def main() -> dict[str, object]:
  f = flags.FLAGS
  if not f.output:
    raise app.UsageError("--output: found nothing, expected a folder.")
  folder = running.Folder(pathlib.Path(f.output).absolute())
  try:
    chosen = _chosen(f.stages)
    results = running.run(
      chosen,
      folder,
      rehearse=f.rehearse,
      minutes=f.minutes,
      command=lambda stage: harness.worker_command(
        "stage", stage.name, folder.path, int(f.rehearse)
      ),
    )
  except ValueError as error:
    raise app.UsageError(str(error)) from error
  print(f"\n{running.table(results)}\n{folder.path / running.RESULTS}")
  ended = [r.status for r in results if r.name in {s.name for s in chosen}]
  if running.FAILED in ended or running.LATE in ended:
    sys.stdout.flush()
    sys.exit(1)
  return {"stages": len(results)}


def _chosen(names: Sequence[str]) -> list[running.Stage]:
  """Returns the named stages, in order of worth; all if none is named.

  Raises:
    ValueError: a name is unknown.
  """
  if unknown := set(names) - set(running.BY_NAME):
    raise ValueError(
      f"--stages: found {min(unknown)!r}, expected some of "
      f"{', '.join(running.BY_NAME)}."
    )
  return [s for s in running.STAGES if not names or s.name in names]


def _stage(name: str, output: str, rehearse: str) -> object:
  """Runs one stage in this process."""
  folder = running.Folder(pathlib.Path(output))
  tiny = rehearse == "1"
  jax_setup.configure(threads=1 if tiny else 0, cache=str(folder.cache))
  return running.measure(running.BY_NAME[name], folder, rehearse=tiny)


if __name__ == "__main__":
  flags.DEFINE_float("minutes", 25, "For all stages together.", 0)
  flags.DEFINE_string("output", None, "Folder of the results; required.")
  flags.DEFINE_bool("rehearse", False, "Plays every stage in tiny sizes.")
  flags.DEFINE_list("stages", [], "Only these; default: all.")
  harness.run(main, workers={"stage": _stage})
