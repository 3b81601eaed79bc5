"""Compares the search service with a plain one over the same vectors.

    python -m bench.service [--clients=64] [--seconds=30] [--rounds=1]

The vectors are random and of unit length. Our service has a `flat` index.
The plain one (FastAPI, as in Search-R1) has FAISS's flat index with its
default settings, and searches for each request on a thread. The encoder derives
a query's vector from its hash, and passages are read from a file. Each service
runs in its own process. The same clients, each with one connection and one
request at a time, ask one service after the other, and never the same query
twice. Prints seconds to an answer, requests per second and the ratios.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import pathlib
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from bench import harness
from launch import serve_retriever
from retrieval import passages
from retrieval.index import search

_WARM = 2.0  # Seconds before the measurement.
_K = 3
_SIDES = ("plain", "ours")


class _Encoder:
  """A `search.Encoder` of queries: a unit vector from a text's hash."""

  def __init__(self, dim: int):
    self.dim = dim

  def queries(self, texts: Sequence[str]) -> np.ndarray:
    seeds = (hashlib.sha256(text.encode()).digest()[:8] for text in texts)
    rngs = (np.random.default_rng(int.from_bytes(seed)) for seed in seeds)
    return harness.units(
      np.stack([rng.standard_normal(self.dim, np.float32) for rng in rngs])
    )


def _write_corpus(file: pathlib.Path, rows: int) -> None:
  """Writes passages of about a hundred words as JSON lines."""
  words = " ".join(f"word{i}" for i in range(100))
  with file.open("w") as out:
    for row in range(rows):
      contents = f'"Title {row}"\nPassage {row} says {words}.'
      out.write(json.dumps({"id": str(row), "contents": contents}) + "\n")


def _serve_plainly(corpus: passages.Corpus, vectors: np.ndarray) -> None:
  """Serves with a `def` endpoint that searches for its own request."""
  import faiss
  import fastapi
  import uvicorn

  app, encoder = fastapi.FastAPI(), _Encoder(vectors.shape[1])
  index = faiss.IndexFlatIP(encoder.dim)
  index.add(vectors)

  @app.post("/retrieve")
  def retrieve(request: dict[str, Any]) -> dict[str, Any]:
    found = index.search(encoder.queries(request["queries"]), request["topk"])
    result = []
    for scores, rows in zip(*found, strict=True):
      some = [corpus[row] for row in rows.tolist()]
      result.append(
        [
          {"document": {"id": p.id, "contents": p.contents}, "score": score}
          for p, score in zip(some, scores.tolist(), strict=True)
        ]
      )
    return {"result": result}

  listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
  port = listening.getsockname()[1]
  print(f"serving at http://127.0.0.1:{port}", flush=True)
  config = uvicorn.Config(app, log_level="warning", access_log=False)
  uvicorn.Server(config).run(sockets=[listening])


def _serve(side: str, folder: str, dim: str) -> None:
  """Serves until the process is ended."""
  from retrieval.index import row_scan

  corpus = passages.Corpus(folder)
  rng = np.random.default_rng(0)
  vectors = rng.standard_normal((len(corpus), int(dim)), np.float32)
  vectors = harness.units(vectors)
  if side == "plain":
    _serve_plainly(corpus, vectors)
  encoder: Any = _Encoder(int(dim))
  scan = row_scan.RowScan([(0, vectors)], int(dim))
  index = search.SearchIndex(
    corpus, scan, identity={"kind": "bench"}, encoder=encoder
  )
  serve_retriever.serve(index, port=0)


async def _measure(port: int) -> dict[str, float]:
  start = time.monotonic() + _WARM
  end = start + flags.FLAGS.seconds
  asked, took = itertools.count(), []

  async def ask(connection: harness.Connection) -> None:
    while (began := time.monotonic()) < end:
      query = {"queries": [f"query {next(asked)}"], "topk": _K}
      body = await connection.post("/retrieve", query | {"return_scores": True})
      now = time.monotonic()
      if start <= now <= end:
        took.append(now - began)
      (found,) = json.loads(body)["result"]
      assert len(found) == _K and found[0]["score"] >= found[-1]["score"]

  await harness.in_parallel(port, flags.FLAGS.clients, ask)
  cuts = statistics.quantiles(took, n=100)
  numbers = {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98]}
  return numbers | {"requests/s": len(took) / flags.FLAGS.seconds}


def main() -> list[object]:
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    _write_corpus(folder / "corpus.jsonl", flags.FLAGS.rows)
    passages.prepare(folder / "corpus.jsonl", folder / "corpus")

    def measure(side: str) -> dict[str, float]:
      command = ("serve", side, folder / "corpus", flags.FLAGS.dim)
      with harness.served(harness.worker_command(*command)) as (port, _):
        return asyncio.run(_measure(port))

    found = harness.in_turns(_SIDES, measure, rounds=flags.FLAGS.rounds)
  table = harness.Table("service", *found.each[0]["ours"], first=12)
  for side in _SIDES:
    table.row(side, *found.medians(side).values())
  for ratio, over, under in (
    ("requests/s", "ours", "plain"),
    ("p50", "plain", "ours"),
    ("p99", "plain", "ours"),
  ):
    print(f"ours, {ratio}: {found.ratio(ratio, over, under)} better")
  return list(found.each)


if __name__ == "__main__":
  flags.DEFINE_integer("clients", 64, "Concurrent ones.", 1)
  flags.DEFINE_float("seconds", 30, "Of each measurement.", 0)
  flags.DEFINE_integer("rounds", 1, "Measurements of each service.", 1)
  flags.DEFINE_integer("rows", 32768, "Passages.", 1)
  flags.DEFINE_integer("dim", 768, "Of their vectors.", 1)
  harness.run(main, workers={"serve": _serve})
