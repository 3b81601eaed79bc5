"""Measures a new accelerator in half an hour.

    python -m bench.first_gpu --output=DIR
    python -m bench.first_gpu --rehearse --output=DIR      on a CPU, tiny

Writes DIR/first_gpu.json (the `stages` with name, status, seconds and figures)
after each stage; a rehearsal's is DIR/rehearsal.json. docs/one_gpu.md explains
stages and figures.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from absl import flags

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
  results = running.run(
    {
      name: seconds
      for name, seconds in running.STAGES.items()
      if name != "server" or f.server
    },
    folder,
    rehearse=f.rehearse,
    command=lambda stage: [
      sys.executable,
      "-m",
      "bench.first_gpu",
      f"--stage={stage}",
      f"--output={folder}",
      f"--rehearse={f.rehearse}",
      f"--server={f.server}",
    ],
  )
  if any(result.status != running.DONE for result in results):
    sys.exit(1)


if __name__ == "__main__":
  flags.DEFINE_string("output", None, "Folder of the results.", required=True)
  flags.DEFINE_bool(
    "rehearse", False, "Runs every stage in tiny sizes, to find mistakes."
  )
  flags.DEFINE_string("server", "", "Address of an SGLang server to measure.")
  flags.DEFINE_string(
    "stage", None, "Measures only this stage, in this process."
  )
  launch_flags.run(main)
