r"""Reports how often indexes find the gold passages of questions.

    python -m launch.recall --index=indexes/bm25,indexes/e5 \
        --questions=hotpotqa_dev.jsonl,musique_dev.jsonl [--k=3]

Several indexes of one corpus are measured separately and then fused by
reciprocal ranks. Questions are JSON lines in FlashRAG's format with
`metadata.gold_doc_ids`.
"""

from __future__ import annotations

import json
import pathlib
import sys

from absl import app, flags

from launch import flags as launch_flags
from launch import jax_setup


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_list("index", None, "Folders of indexes.", required=True)
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
    searches = {
      folder: opening.open_index(folder, devices=platforms.accelerators())
      for folder in f.index
    }
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
  except (OSError, ValueError) as error:
    sys.exit(f"launch.recall: {error}")
  if f.json:
    pathlib.Path(f.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main)
