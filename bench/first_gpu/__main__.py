"""Measures a new accelerator in half an hour.

    python -m bench.first_gpu --minutes=25 --output=DIR
    python -m bench.first_gpu --rehearse --output=DIR      on a CPU, tiny

Writes DIR/first_gpu.json (the `stages` with name, status, seconds and figures)
after each stage. docs/one_gpu.md explains stages and figures.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import jax_setup
from bench.first_gpu import notes as notes_lib
from bench.first_gpu import running


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  folder = pathlib.Path(f.output).absolute()
  if f.stage:
    jax_setup.configure(
      threads=int(f.rehearse), cache=str(folder / "jax_cache")
    )
    notes = notes_lib.Notes(
      folder, f.stage, rehearse=f.rehearse, server=f.server
    )
    running.measure(f.stage, notes)
    return
  names = [stage.name for stage in running.STAGES]
  if unknown := set(f.stages) - set(names):
    raise app.UsageError(
      f"--stages: found {min(unknown)!r}, expected some of {', '.join(names)}."
    )
  results = running.run(
    [s for s in running.STAGES if not f.stages or s.name in f.stages],
    folder,
    rehearse=f.rehearse,
    minutes=f.minutes,
    command=lambda stage: [
      *(sys.executable, "-m", "bench.first_gpu", f"--stage={stage.name}"),
      *(f"--output={folder}", f"--rehearse={f.rehearse}"),
      f"--server={f.server}",
    ],
  )
  print(folder / running.RESULTS, flush=True)
  if {result.status for result in results} & {running.FAILED, running.LATE}:
    sys.exit(1)


if __name__ == "__main__":
  flags.DEFINE_float("minutes", 25, "For all stages together.", 0)
  flags.DEFINE_string("output", None, "Folder of the results.", required=True)
  flags.DEFINE_bool("rehearse", False, "Plays every stage in tiny sizes.")
  flags.DEFINE_list("stages", [], "Only these; default: all.")
  flags.DEFINE_string("server", "", "Address of an SGLang server to measure.")
  flags.DEFINE_string("stage", None, "Measures one, in this process; internal.")
  launch_flags.run(main)
