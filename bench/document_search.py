"""Measures search by words, by meaning and by both, on real questions.

    python -m bench.document_search DATA --vectors=FOLDER
    python -m bench.document_search DATA --vectors=FOLDER --confirm

DATA has `corpus.jsonl.gz` (rows with `contents`) and `questions/*.jsonl` (rows
with `metadata.gold_doc_ids`, which number rows of the corpus). The index holds
the gold passages of all sets and others, drawn by a fixed seed. The first
command compares the weights of vectors on the sets that `fusion.DENSE_WEIGHT`
was chosen by, the second that weight on others.

Printed are, for each way to search, the shares of questions of which any and
all gold passages are among the first 3 and 10, and, with its 95 % interval,
what the way finds more than words do of the same questions (all, 3); then the
CPU seconds and bytes of 1,000 passages and the latency of a query. FOLDER keeps
the vectors, so that the next command need not make them.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from anysearch_jax.retrieval import fusion
from anysearch_jax.retrieval.documents import kept_vectors
from anysearch_jax.retrieval.encoder import installed, served
from anysearch_jax.retrieval.index import building, opening, search
from bench import harness

# The rows of a file that a set has: all, or those of a half.
_CHOSEN_BY = {"hotpotqa_train": slice(None), "nq_test": slice(0, None, 2)}
_CONFIRMED_BY = {
  "hotpotqa_dev": slice(None),
  "popqa_test": slice(None),
  "nq_test": slice(1, None, 2),
}
_DEPTHS = (3, 10)
_CANDIDATES = 100
_WEIGHTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
# The constant of reciprocal ranks, https://doi.org/10.1145/1571941.1572114.
_RANK_OFFSET = 60
_TIMED_PASSAGES = 100
_TIMED_QUERIES = 50
_SEED = 0
# The standard errors of a 95 % interval.
_INTERVAL = 1.96


class Question(NamedTuple):
  """A question with the ids of its gold passages."""

  text: str
  gold: frozenset[str]


def read_questions(path: pathlib.Path) -> list[Question]:
  """Returns the questions of a file; some may have no gold passages."""
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  return [
    Question(row["question"], frozenset(map(str, _gold(row)))) for row in rows
  ]


def _gold(row: dict[str, Any]) -> Sequence[object]:
  return row["metadata"].get("gold_doc_ids", ())


def sample_rows(count: int, gold: set[int], size: int) -> list[int]:
  """Returns all gold rows and others, `size` at least, in order.

  Args:
    count: number of rows of the corpus.
    gold: rows of gold passages.
    size: number of rows that are wanted.
  """
  others = [row for row in range(count) if row not in gold]
  random.Random(_SEED).shuffle(others)
  return sorted([*gold, *others[: max(size - len(gold), 0)]])


def measure_recall(
  questions: Sequence[Question], rankings: Sequence[Sequence[str]]
) -> np.ndarray:
  """Returns 0 or 1 by question: any gold passage at 3, 10, all at 3, 10.

  Args:
    questions: the questions.
    rankings: for each of them the ids that were found, best first.
  """
  results = []
  for question, ids in zip(questions, rankings, strict=True):
    firsts = [{*ids[:depth]} for depth in _DEPTHS]
    has_any = [bool(question.gold & first) for first in firsts]
    has_all = [question.gold <= first for first in firsts]
    results.append(has_any + has_all)
  return np.array(results, float)


def recall_line(name: str, recall: np.ndarray, by_words: np.ndarray) -> str:
  """Returns a line of the table.

  Args:
    name: the way to search.
    recall: its result of `measure_recall`.
    by_words: that of the search by words, of the same questions.
  """
  shares = "  ".join(f"{share:.3f}" for share in recall.mean(axis=0))
  difference = (recall - by_words)[:, len(_DEPTHS)]
  error = _INTERVAL * difference.std() / len(difference) ** 0.5
  return f"  {name:20} {shares}  {difference.mean():+.3f} ±{error:.3f}"


def _by_ranks(hits: search.Hits) -> dict[int, float]:
  return {
    row: 1 / (_RANK_OFFSET + rank)
    for rank, row in enumerate(hits.rows.tolist(), start=1)
  }


def _by_scores(hits: search.Hits) -> dict[int, float]:
  rows = hits.rows.tolist()
  return fusion.scaled(dict(zip(rows, hits.scores.tolist(), strict=True)))


def _fused_ways(
  word_hits: Sequence[search.Hits], dense_hits: Sequence[search.Hits]
) -> dict[str, list[list[int]]]:
  """Returns the rows that each rule finds of each question."""
  ways: dict[str, list[list[int]]] = {}
  for weight in _WEIGHTS:
    weights = (1 - weight, weight)
    scores = f"scores, dense {weight:.1f}"
    ranks = f"ranks, dense {weight:.1f}"
    ways[scores] = []
    ways[ranks] = []
    for words, dense in zip(word_hits, dense_hits, strict=True):
      of_scores = [_by_scores(words), _by_scores(dense)]
      ways[scores].append([*fusion.added(of_scores, weights)])
      of_ranks = [_by_ranks(words), _by_ranks(dense)]
      ways[ranks].append([*fusion.added(of_ranks, weights)])
  return ways


def _open_encoder(embeddings: str) -> Any:
  if embeddings:
    return served.ServedEncoder(embeddings)
  return installed.open_encoder()


def _latency(index: search.SearchIndex, queries: Sequence[str]) -> float:
  """Returns the median of the milliseconds of a query."""
  times = []
  for query in queries:
    search_once = functools.partial(index.search, [query], 3)
    times.append(harness.seconds(search_once))
  return 1000 * statistics.median(times)


def main(argv: Sequence[str] | None = None) -> None:
  """Prints the tables."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("data", type=pathlib.Path)
  parser.add_argument("--vectors", type=pathlib.Path, required=True)
  parser.add_argument("--passages", type=int, default=12000, help="at least")
  parser.add_argument("--embeddings", default="", help="address of an encoder")
  parser.add_argument("--confirm", action="store_true")
  flags = parser.parse_args(argv)
  sets = {
    name: read_questions(flags.data / "questions" / f"{name}.jsonl")
    for name in _CHOSEN_BY | _CONFIRMED_BY
  }
  gold = {int(row) for set_ in sets.values() for q in set_ for row in q.gold}
  with gzip.open(flags.data / "corpus.jsonl.gz", "rt") as lines:
    corpus = [*lines]
  rows = sample_rows(len(corpus), gold, flags.passages)
  encoder = _open_encoder(flags.embeddings)
  flags.vectors.mkdir(parents=True, exist_ok=True)
  kept_encoder = kept_vectors.KeptEncoder(encoder, flags.vectors, flags.vectors)

  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    source = folder / "corpus.jsonl"
    source.write_text("".join(corpus[row] for row in rows))
    indexes = {}
    cpu = time.process_time()
    building.build(source, folder / "words", building.Settings("bm25"))
    word_seconds = time.process_time() - cpu
    indexes["words"] = opening.open_index(folder / "words")
    passages = indexes["words"].corpus
    texts = [*passages.contents(0, len(passages))]
    kept_encoder.complete(
      texts, lambda done, total: print(f"\r{done} of {total} vectors", end="")
    )
    building.build(
      source,
      folder / "both",
      building.Settings("hybrid"),
      encoder=kept_encoder,
    )
    for ranking in ("dense", "hybrid"):
      indexes[ranking] = opening.open_index(
        folder / "both", encoder=encoder, ranking=ranking
      )

    print(f"{len(rows)} passages")
    print(f"  {'':20} any@3  any@10 all@3  all@10 all@3, against words")
    used = _CONFIRMED_BY if flags.confirm else _CHOSEN_BY
    for set_name, part in used.items():
      questions = [q for q in sets[set_name][part] if q.gold]
      queries = [q.text for q in questions]
      hits = {
        way: index.hits(queries, _CANDIDATES) for way, index in indexes.items()
      }
      ways = {
        way: [x.rows.tolist() for x in of_way] for way, of_way in hits.items()
      }
      if not flags.confirm:
        ways |= _fused_ways(hits["words"], hits["dense"])
      print(f"{set_name}, {len(questions)} questions")
      by_words = None
      for way, rows_found in ways.items():
        ids = [[passages[row].id for row in x[:10]] for x in rows_found]
        recall = measure_recall(questions, ids)
        by_words = recall if by_words is None else by_words
        print(recall_line(way, recall, by_words), flush=True)

    thousands = len(rows) / 1000
    cpu = time.process_time()
    vectors, seconds = harness.timed(
      lambda: encoder.passages(texts[:_TIMED_PASSAGES])
    )
    cpu = time.process_time() - cpu
    per_thousand = 1000 / len(vectors)
    word_bytes = sum(
      file.stat().st_size for file in (folder / "words/words").iterdir()
    )
    print(
      f"1,000 passages: words {word_seconds / thousands:.2f} CPU s, "
      f"{word_bytes / thousands:,.0f} bytes; vectors "
      f"{cpu * per_thousand:.1f} CPU s in {seconds * per_thousand:.1f} s, "
      f"{vectors.nbytes * per_thousand:,.0f} bytes"
    )
    queries = [q.text for q in sets["nq_test"][:_TIMED_QUERIES]]
    latencies = [
      f"{way} {_latency(index, queries):.1f} ms"
      for way, index in indexes.items()
    ]
    print(f"a query: {', '.join(latencies)}")


if __name__ == "__main__":
  main()
