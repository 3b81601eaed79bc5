"""Compares the engines that hold a corpus: our indexes, Milvus and PostgreSQL.

    python -m bench.engines --corpus=corpus.jsonl.gz \
        --questions=hotpotqa_dev.jsonl --output=FOLDER [--milvus=passages.db] \
        [--postgres="host=127.0.0.1 dbname=bench user=me"]

Every engine gets the same passages, and vectors that are sums of a random
vector for each word, weighted by how rare it is. They need no model; passages
that share rare words are neighbours. Engines answer the same questions in
turns, --batch at a time. Prints the share of the questions' gold passages
among the first k; the share of what exact scores find first; CPU milliseconds
for a question, those of the server's process included, and their ratio to our
index; and bytes on disk, with the passages. `ts_rank_cd` is PostgreSQL's own
ranking of the same words. PostgreSQL must run on this machine, or its CPU time
is missing. What was built in FOLDER, in the file of Milvus Lite and in the
database is used again.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from anysearch_jax import types
from bench import harness
from retrieval import analysis, passages
from retrieval.clients import local
from retrieval.index import building, opening, recall

Ids = list[list[str]]


class Side(NamedTuple):
  """One engine.

  search: finds ids of passages for texts.
  exact: name of the side whose scores are exact.
  size: bytes on disk.
  processes: processes of its server.
  """

  search: Callable[[Sequence[str]], Ids]
  exact: str
  size: int
  processes: tuple[int, ...] = ()


class WordVectors:
  """An encoder without a model: sums of random vectors of a text's words."""

  def __init__(self, corpus: passages.Corpus, dim: int):
    self.dim, self._analyze = dim, analysis.shared("english")
    self._has: dict[str, int] = {}
    for text in corpus.contents(0, len(corpus)):
      for word in set(self._analyze(text)):
        self._has[word] = self._has.get(word, 0) + 1
    self._count = len(corpus)

  def identity(self) -> dict[str, Any]:
    return {"name": "random projections of words", "passages": self._count}

  def queries(self, texts: Sequence[str]) -> np.ndarray:
    return np.stack([self._one(text) for text in texts])

  passages = queries

  def _one(self, text: str) -> np.ndarray:
    x = np.full(self.dim, 1e-6)
    for word in set(self._analyze(text)):
      rare = np.log(self._count / self._has.get(word, self._count))
      x += rare * self._vector(word)
    return (x / np.linalg.norm(x)).astype(np.float32)

  @functools.lru_cache(maxsize=1 << 17)  # noqa: B019
  def _vector(self, word: str) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big")
    return np.random.default_rng(seed).standard_normal(self.dim)


def _asks(retriever: Any, k: int) -> Callable[[Sequence[str]], Ids]:
  """Returns a search of ids by a retriever."""

  def search(texts: Sequence[str]) -> Ids:
    requests = [types.SearchRequest(text, k) for text in texts]
    answers = asyncio.run(retriever.search_many(requests))
    for answer in answers:
      if isinstance(answer, Exception):
        raise answer
    return [[passage.id for passage in answer] for answer in answers]

  return search


def _bytes(folder: pathlib.Path) -> int:
  if folder.is_file():
    return folder.stat().st_size
  return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def _ours(encoder: WordVectors, k: int) -> Iterator[tuple[str, Side]]:
  """Yields the indexes of launch.build_index."""
  f = flags.FLAGS
  for name in ("bm25", "faiss_flat"):
    folder = pathlib.Path(f.output) / name
    used = None if name == "bm25" else encoder
    building.build(f.corpus, folder, building.Settings(name), encoder=used)
    index = opening.open_index(folder, encoder=used)
    yield (
      name,
      Side(_asks(local.LocalRetriever(index), k), name, _bytes(folder)),
    )


def _milvus(
  corpus: passages.Corpus, encoder: WordVectors, k: int
) -> Iterator[tuple[str, Side]]:
  from retrieval.milvus import collection, retriever

  address = flags.FLAGS.milvus
  client = collection.connect(address)
  collection.build(client, "passages", corpus, encoder=encoder)
  size = _bytes(pathlib.Path(address)) if address.endswith(".db") else 0
  for ranking, exact in (("bm25", "bm25"), ("dense", "faiss_flat")):
    made = retriever.MilvusRetriever(
      client, "passages", ranking=ranking, encoder=encoder
    )
    yield f"Milvus {ranking}", Side(_asks(made, k), exact, size)


def _postgres(
  corpus: passages.Corpus, encoder: WordVectors, k: int
) -> Iterator[tuple[str, Side]]:
  from psycopg import conninfo

  from retrieval.postgres import retriever, server, table

  address = conninfo.make_conninfo(
    flags.FLAGS.postgres, options="-c max_parallel_workers_per_gather=0"
  )
  # One connection each, so that one process has the CPU time of its searches.
  connect = functools.partial(
    server.Server, address, timeout=600, connections=1
  )
  builder = connect()
  sizes: dict[str, int] = {}
  for vectors in table.VECTORS:
    name = f"bench_{vectors}"
    table.build(builder, name, corpus, encoder=encoder, vectors=vectors)
    for each in (name, f"{name}_words", f"{name}_vectors"):
      sizes[each] = builder.run(functools.partial(_relation, name=each))
  flat, words = sizes["bench_flat"], sizes["bench_flat_words"]
  made = retriever.PostgresRetriever(database := connect(), "bench_flat")
  yield (
    "PostgreSQL bm25",
    Side(_asks(made, k), "bm25", flat + words, (_process(database),)),
  )
  plain = functools.partial(_ts_rank_cd, database := connect(), k=k)
  yield (
    "PostgreSQL ts_rank_cd",
    Side(plain, "bm25", flat, (_process(database),)),
  )
  for vectors, candidates in (("flat", 0), ("hnsw", 40), ("hnsw", 200)):
    made = retriever.PostgresRetriever(
      database := connect(),
      f"bench_{vectors}",
      ranking="dense",
      encoder=encoder,
      ef_search=candidates,
    )
    size = flat + sizes[f"bench_{vectors}_vectors"]
    yield (
      f"PostgreSQL {vectors} {candidates or ''}".rstrip(),
      Side(_asks(made, k), "faiss_flat", size, (_process(database),)),
    )


def _relation(connection: Any, name: str) -> int:
  sized = "SELECT pg_total_relation_size(%s::regclass)"
  return int(connection.execute(sized, [name]).fetchone()[0])


def _process(database: Any) -> int:
  """Returns the server's process of the only connection; 0 if it is remote."""
  pid = database.run(lambda connection: connection.info.backend_pid)
  return pid if pathlib.Path(f"/proc/{pid}").exists() else 0


def _ts_rank_cd(database: Any, texts: Sequence[str], k: int) -> Ids:
  """Finds passages by PostgreSQL's own ranking of any of a text's words."""
  analyze = analysis.shared("english")
  query = (
    "SELECT id FROM bench_flat, to_tsquery('simple', %s) AS asked "
    "WHERE words @@ asked ORDER BY ts_rank_cd(words, asked) DESC, row LIMIT %s"
  )
  found: Ids = []
  for text in texts:
    terms = sorted(set(analyze(text)))
    any_of = " | ".join("'" + term.replace("'", "''") + "'" for term in terms)
    rows = database.run(
      lambda c: c.execute(query, [any_of, k]).fetchall()  # noqa: B023
    )
    found.append([row[0] for row in rows])
  return found


def main() -> dict[str, harness.Numbers]:
  f = flags.FLAGS
  folder = pathlib.Path(f.output)
  corpus = passages.prepare(f.corpus, folder / "corpus")
  encoder = WordVectors(corpus, f.dim)
  asked = [each for path in f.questions for each in recall.read(path)]
  asked = asked[: f.queries]
  texts = [each.question for each in asked]
  sides = dict(_ours(encoder, f.k))
  if f.milvus:
    sides |= _milvus(corpus, encoder, f.k)
  if f.postgres:
    sides |= _postgres(corpus, encoder, f.k)
  found: dict[str, Ids] = {}

  def measure(name: str) -> dict[str, float]:
    side = sides[name]
    before = _cpu(side)
    ids, took = harness.timed(
      lambda: [
        each
        for i in range(0, len(texts), f.batch)
        for each in side.search(texts[i : i + f.batch])
      ]
    )
    found[name] = ids
    cpu = _cpu(side) - before
    return {
      "CPU ms": 1e3 * cpu / len(texts),
      "wall ms": 1e3 * took.seconds / len(texts),
    }

  rounds = harness.in_turns(sides, measure, rounds=f.rounds)
  print(
    f"{len(texts)} questions, {len(corpus)} passages, top {f.k}, vectors of "
    f"{f.dim} numbers"
  )
  table = harness.Table(
    *("", f"gold @{f.k}", "of exact", "CPU ms", "wall ms", "CPU ratio", "MB")
  )
  out: dict[str, harness.Numbers] = {}
  for name, side in sides.items():
    gold = [
      len(each.gold & set(ids)) / len(each.gold)
      for each, ids in zip(asked, found[name], strict=True)
    ]
    same = [
      len(set(ids) & set(exact)) / max(len(exact), 1)
      for ids, exact in zip(found[name], found[side.exact], strict=True)
    ]
    out[name] = rounds.medians(name) | {
      "gold": float(np.mean(gold)),
      "exact": float(np.mean(same)),
      "bytes": side.size,
    }
    table.row(
      *(name, out[name]["gold"], out[name]["exact"]),
      *(out[name]["CPU ms"], out[name]["wall ms"]),
      *(str(rounds.ratio("CPU ms", name, side.exact)).split()[0],),
      *(side.size / 1e6,),
    )
  return out


def _cpu(side: Side) -> float:
  """Returns CPU seconds of this process, its children and the server's."""
  others = sum(harness.cpu_of(pid) for pid in side.processes if pid)
  return time.process_time() + sum(map(harness.cpu_of, _children())) + others


def _children() -> list[int]:
  """Returns the processes that this one started: Milvus Lite has one."""
  text = pathlib.Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
  return [int(pid) for pid in text.read_text().split()]


if __name__ == "__main__":
  flags.DEFINE_string("corpus", None, "JSON lines.", required=True)
  flags.DEFINE_list("questions", None, "JSON lines.", required=True)
  flags.DEFINE_string("output", None, "Folder for indexes.", required=True)
  flags.DEFINE_string("milvus", "", "File of Milvus Lite, or an address.")
  flags.DEFINE_string("postgres", "", "Address of a database.")
  flags.DEFINE_integer("queries", 200, "Questions.", 1)
  flags.DEFINE_integer("batch", 16, "Questions asked at once.", 1)
  flags.DEFINE_integer("k", 5, "Passages for a question.", 1)
  flags.DEFINE_integer("dim", 256, "Numbers of a vector.", 2)
  flags.DEFINE_integer("rounds", 3, "Times that each side is measured.", 1)
  harness.run(main)
