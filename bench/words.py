"""Compares searches of a BM25 index by seconds, in one process.

    python -m bench.words --index=indexes/bm25 --questions=nq_test.jsonl

`all rows` scores every row, as bm25s does with NumPy; it answers a tenth of the
queries. `word_index` is the search of the project. `numba` is bm25s's compiled
backend, if numba is installed; it breaks ties in another order. Questions are
JSON lines with a `question`, repeated until there are --queries of them. Prints
seconds and CPU seconds for all queries, and how many answers are equal.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import pathlib

import numpy as np
from absl import flags

from bench import harness

_PART = 10


def main() -> dict[str, harness.Numbers]:
  import bm25s

  from retrieval import analysis, bm25
  from retrieval.index import word_index

  f = flags.FLAGS
  folder = pathlib.Path(f.index) / "words"
  ours = word_index.WordIndex(folder)
  asked = itertools.cycle(
    json.loads(line)["question"]
    for path in f.questions
    for line in pathlib.Path(path).read_text().splitlines()
  )
  queries = list(itertools.islice(asked, f.queries))
  index = bm25s.BM25.load(folder, mmap=True, load_vocab=True)
  analyzer = analysis.shared(ours.language)
  numbers = [
    [index.vocab_dict[w] for w in analyzer(query) if w in index.vocab_dict]
    for query in queries
  ]
  rows: dict[str, list[list[int]]] = {}

  def dense() -> None:
    rows["all rows"] = [
      bm25.best(index.get_scores_from_ids(each), f.k)[0].tolist()
      for each in numbers[::_PART]
    ]

  def sparse() -> None:
    found = [hits.rows.tolist() for hits in ours.search(queries, f.k)]
    rows["word_index"] = found[::_PART]

  sides = {"all rows": dense, "word_index": sparse}
  if importlib.util.find_spec("numba"):
    from bm25s.numba import retrieve_utils

    matrix = {
      k: np.asarray(v) if k != "num_docs" else v
      for k, v in index.scores.items()
    }
    arrays = [np.asarray(each, np.int32) for each in numbers]

    def compiled(queries: int | None = None) -> None:
      found, _ = retrieve_utils._retrieve_numba_functional(
        arrays[:queries],
        matrix,
        k=f.k,
        show_progress=False,
        n_threads=f.threads,
      )
      rows["numba"] = found[::_PART].tolist()

    compiled(4)
    sides["numba"] = compiled
  found = harness.timed_in_turns(sides, rounds=f.rounds)
  print(f"{len(queries)} queries, {ours.count} passages, top {f.k}")
  table = harness.Table("", "seconds", "CPU seconds", "equal answers")
  out: dict[str, harness.Numbers] = {}
  for side in sides:
    times = _PART if side == "all rows" else 1
    taken = {k: times * v for k, v in found.medians(side).items()}
    out[side] = taken
    equal = np.mean(
      [x == y for x, y in zip(rows[side], rows["all rows"], strict=True)]
    )
    table.row(side, *taken.values(), float(equal))
  return out


if __name__ == "__main__":
  flags.DEFINE_string("index", None, "Folder of a BM25 index.", required=True)
  flags.DEFINE_list("questions", None, "JSON lines.", required=True)
  flags.DEFINE_integer("queries", 2560, "Queries.", 1)
  flags.DEFINE_integer("k", 3, "Passages of a query.", 1)
  flags.DEFINE_integer("threads", 2, "Of numba.", 1)
  flags.DEFINE_integer("rounds", 3, "Times that each side is measured.", 1)
  harness.run(main)
