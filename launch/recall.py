r"""Reports how often indexes find the gold passages of questions.

    python -m launch.recall --index=indexes/bm25,indexes/e5 \
        --questions=hotpotqa_dev.jsonl,musique_dev.jsonl [--k=3]

Several indexes of one corpus are measured separately and then fused by
reciprocal ranks. --pipeline=FILE measures a pipeline after each of its stages,
and the time of each stage. Questions are JSON lines in FlashRAG's format with
`metadata.gold_doc_ids`.
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from absl import app, flags

from anysearch_jax import types
from launch import flags as launch_flags
from launch import jax_setup


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_list("index", [], "Folders of indexes.")
  flags.DEFINE_string("pipeline", None, "A TOML file of stages.")
  flags.DEFINE_list("questions", None, "JSON lines.", required=True)
  flags.DEFINE_integer("k", 3, "Passages a question.", 1)
  flags.DEFINE_string("json", None, "File for the numbers.")
  launch_flags.define_devices()
  launch_flags.define_process()


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  jax_setup.configure(threads=f.threads, cache=f.cache, devices=f.devices)
  from anysearch_jax.host import platforms
  from retrieval.index import fusion, opening, recall

  rows = []
  try:
    if not f.index and not f.pipeline:
      raise ValueError("expected --index=FOLDERS, --pipeline=FILE, or both.")
    searches = {
      folder: opening.open_index(folder, devices=platforms.accelerators())
      for folder in f.index
    }
    stages = _pipeline() if f.pipeline else None
    if len(searches) > 1:
      searches["fused"] = fusion.FusedSearch(list(searches.values()))
    for path in f.questions:
      asked = recall.read(path)
      for name, searching in searches.items():
        found = recall.measure(searching, asked, k=f.k)
        rows.append({"questions": path, "index": name, **found._asdict()})
        print(
          f"{pathlib.Path(path).stem:24} {name:24} n {found.n:5}  any "
          f"{found.any:.3f}  all {found.all:.3f}",
          flush=True,
        )
      for found in stages(asked, f.k) if stages else ():
        rows.append({"questions": path, **found._asdict()})
        print(
          f"{pathlib.Path(path).stem:24} after {found.stage:18} n {found.n:5}  "
          f"any {found.any:.3f}  all {found.all:.3f}  "
          f"{1e3 * found.seconds / found.n:.1f} ms a query",
          flush=True,
        )
  except (OSError, ValueError, types.RetrievalError) as error:
    sys.exit(f"launch.recall: {error}")
  if f.json:
    pathlib.Path(f.json).write_text(json.dumps(rows, indent=2) + "\n")


def _pipeline() -> Callable[[Any, int], Any]:
  """Returns a function that measures the pipeline that the flag names."""
  from anysearch_jax.host import platforms
  from launch import pipelines, retrievers
  from retrieval.pipeline import recall

  devices = platforms.accelerators()
  made = pipelines.make(
    flags.FLAGS.pipeline,
    functools.partial(retrievers.open_one, devices=devices),
    devices=devices,
  )
  return lambda asked, k: recall.measure(made, asked, k=k)


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main)
