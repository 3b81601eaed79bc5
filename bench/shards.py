"""Compares servers of parts of an index with one server of the whole of it.

    python -m bench.shards [--shards=4] [--rows=262144] [--rounds=3]

Every server is a process. That of the whole index may use one core, and so may
each of those of its parts, which share the machine's cores. So the ratio is
what more machines bring, as far as there are cores here. `all cores` is a
server of the whole index without that limit. The vectors are random, the index
of kind `faiss_flat`. A `ShardedRetriever` asks batches of queries, and its
answers must be those of the whole index, to the bit. Prints queries per second
and the ratios.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from absl import flags

from anysearch_jax import types
from bench import harness, hashed_texts
from launch import serve_retriever
from retrieval.clients import sharded
from retrieval.index import building, opening

_K = 3
_ONE, _PARTS, _ALL = "one core", "parts", "all cores"


def _serve(folder: str, dim: str, shard: str, shards: str, core: str) -> None:
  """Serves a part until the process is ended; core -1 is any of them."""
  if int(core) >= 0:
    os.sched_setaffinity(0, {int(core)})
  index = opening.open_index(
    folder,
    encoder=hashed_texts.Encoder(int(dim)),
    part=(int(shard), int(shards)) if int(shards) > 1 else None,
  )
  index.search(["ready"], _K)
  serve_retriever.serve(index, port=0)


@contextlib.contextmanager
def _started(
  folder: pathlib.Path, shards: int, cores: Sequence[int]
) -> Iterator[list[str]]:
  """Starts the servers of all parts and yields their addresses."""
  with contextlib.ExitStack() as stack:
    ports = []
    for shard in range(shards):
      core = cores[shard % len(cores)]
      command = harness.worker_command(
        "serve", folder, flags.FLAGS.dim, shard, shards, core
      )
      # One thread each, so that FAISS's threads do not wait for each other.
      one = {"OMP_NUM_THREADS": "1"} if core >= 0 else {}
      ports.append(stack.enter_context(harness.served(command, one)))
    yield [f"http://127.0.0.1:{port}" for port in ports]


async def _ask(
  addresses: Sequence[str],
) -> tuple[list[Sequence[types.Passage]], float]:
  """Returns the answers and the queries per second."""
  retriever = sharded.ShardedRetriever([[address] for address in addresses])
  batch, batches = flags.FLAGS.batch, flags.FLAGS.batches
  asked = [
    [types.SearchRequest(f"query {i} of batch {b}", _K) for i in range(batch)]
    for b in range(batches + 1)
  ]
  await retriever.search_many(asked[0])  # Warms all of them up.
  start = time.monotonic()
  found = [await retriever.search_many(each) for each in asked[1:]]
  took = time.monotonic() - start
  retriever.close()
  answers: list[Sequence[types.Passage]] = []
  for answer in itertools.chain.from_iterable(found):
    if isinstance(answer, Exception):
      raise answer
    answers.append(answer)
  return answers, len(answers) / took


def main() -> list[object]:
  f = flags.FLAGS
  cores = sorted(os.sched_getaffinity(0))
  sides = {_ONE: (1, cores[:1]), _PARTS: (f.shards, cores), _ALL: (1, [-1])}
  answers = {}

  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    source = folder / "corpus.jsonl"
    hashed_texts.write_corpus(source, f.rows)
    building.build(
      source,
      folder / "index",
      building.Settings(kind="faiss_flat"),
      encoder=hashed_texts.Encoder(f.dim),
    )

    def measured(side: str) -> dict[str, float]:
      with _started(folder / "index", *sides[side]) as addresses:
        answers[side], rate = asyncio.run(_ask(addresses))
      print(f"{side}: {rate:.0f} queries/s", flush=True)
      return {"queries/s": rate}

    found = harness.in_turns(sides, measured, rounds=f.rounds)
  print(f"{f.shards} parts on {len(cores)} cores, {f.rows} x {f.dim}:")
  for over in (_PARTS, _ALL):
    print(f"  {over} / {_ONE}: {found.ratio('queries/s', over, _ONE)}")
  if not answers[_ONE] == answers[_PARTS] == answers[_ALL]:
    sys.exit("bench.shards: the answers differ, expected equal ones.")
  return list(found.each)


if __name__ == "__main__":
  flags.DEFINE_integer("shards", 4, "Parts of the index.", 2)
  flags.DEFINE_integer("rows", 262144, "Passages.", 1)
  flags.DEFINE_integer("dim", 768, "Of their vectors.", 1)
  flags.DEFINE_integer("batch", 64, "Queries of a batch.", 1)
  flags.DEFINE_integer("batches", 20, "Measured.", 1)
  flags.DEFINE_integer("rounds", 3, "Measurements of each side.", 1)
  harness.run(main, workers={"serve": _serve})
