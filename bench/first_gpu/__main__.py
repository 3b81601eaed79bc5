"""Measures a new accelerator in half an hour.

    python -m bench.first_gpu --minutes=25 --output=DIR
    python -m bench.first_gpu --rehearse --output=DIR      on a CPU, tiny

Writes DIR/first_gpu.json (the `stages` with name, status, seconds and figures)
and DIR/first_gpu.txt, the same as a table, after each stage. docs/training.md
explains stages and figures.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import jax_setup
from bench.first_gpu import running


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  folder = pathlib.Path(f.output).absolute()
  if f.stage:
    jax_setup.configure(
      threads=int(f.rehearse), cache=str(folder / "jax_cache")
    )
    running.BY_NAME[f.stage].measure(folder, rehearse=f.rehearse)
    return
  if unknown := set(f.stages) - set(running.BY_NAME):
    raise app.UsageError(
      f"--stages: found {min(unknown)!r}, expected some of "
      f"{', '.join(running.BY_NAME)}."
    )
  chosen = [s for s in running.STAGES if not f.stages or s.name in f.stages]
  results = running.run(
    chosen,
    folder,
    rehearse=f.rehearse,
    minutes=f.minutes,
    command=lambda stage: [
      *(sys.executable, "-m", "bench.first_gpu", f"--stage={stage.name}"),
      *(f"--output={folder}", f"--rehearse={f.rehearse}"),
    ],
  )
  print(f"\n{running.table(results)}\n{folder / running.RESULTS}", flush=True)
  ended = {r.status for r in results if running.BY_NAME.get(r.name) in chosen}
  if ended & {running.FAILED, running.LATE}:
    sys.exit(1)


if __name__ == "__main__":
  flags.DEFINE_float("minutes", 25, "For all stages together.", 0)
  flags.DEFINE_string("output", None, "Folder of the results.", required=True)
  flags.DEFINE_bool("rehearse", False, "Plays every stage in tiny sizes.")
  flags.DEFINE_list("stages", [], "Only these; default: all.")
  flags.DEFINE_string("stage", None, "Measures one, in this process; internal.")
  launch_flags.run(main)
