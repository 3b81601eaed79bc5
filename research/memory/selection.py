"""Leaves out the questions that a policy misreads, before any prediction.

    python -m research.memory.selection --chains=R/forced --output=R/read

A small model reads badly: it answers wrongly although the passage holds the
answer. A search is then worth little wherever memory is any good, and no row
would lose by trusting memory. So a question stays only if the chain that ends
at its first find is right, or if no search finds; whether memory is right has
no part in it. Writes the chains that stay (`forced/`), and their questions for
`anysearch prepare_data` (`questions/`).
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

import numpy as np
from absl import app, flags

import anysearch_jax as aj
from research.memory import chains as chains_lib
from research.memory import memories

# Of an id, what `anysearch prepare_data` puts before it.
_PREFIX = "memory/"


def is_read(chains: chains_lib.Chains) -> np.ndarray:
  """Returns whether a question stays, bool `[N]`."""
  first = chains.found.argmax(1)  # 0 if no search finds.
  is_right = chains.right[np.arange(len(first)), first]
  return is_right | ~chains.found.any(1)


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  flags.DEFINE_string("chains", None, "Folder of both splits.", required=True)
  flags.DEFINE_string("output", None, "Folder to write to.", required=True)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  f = flags.FLAGS
  output = pathlib.Path(f.output)
  try:
    chains = chains_lib.read(f.chains)
  except ValueError as error:
    sys.exit(f"research.memory.selection: {error}")
  for split, own in chains.items():
    stays = is_read(own)
    kept_ids = set(np.array(own.ids, object)[stays])
    path = pathlib.Path(f.chains) / split / memories.EPISODES
    rows = [
      row for row in aj.read_episodes(path) if row["question_id"] in kept_ids
    ]
    questions = {row["question_id"]: row for row in rows}
    lines = [
      {**line, "id": line["id"].removeprefix(_PREFIX)}
      for line in memories.question_lines(questions.values())
    ]
    for folder, name, values in (
      (f"forced/{split}", memories.EPISODES, rows),
      ("questions", f"memory_{split}.jsonl", lines),
    ):
      (output / folder).mkdir(parents=True, exist_ok=True)
      aj.records.write(output / folder / name, values)
    shares = chains_lib.by_form(own, stays)
    text = ", ".join(f"{form} {share:.2f}" for form, share in shares.items())
    print(f"{split}: kept {len(kept_ids)} of {len(own.ids)} questions ({text})")


if __name__ == "__main__":
  define_flags()
  app.run(main)
