"""Compares the search service with a plain one over the same vectors.

    python -m bench.service [--clients=64] [--seconds=30] [--rounds=1]

The vectors are random and of unit length. Our service has a `flat` index.
The plain one (FastAPI, as in Search-R1) has FAISS's flat index with its
default settings, and searches for each request on a thread. The encoder derives
a query's vector from its hash, and passages are read from a file. Each service
runs in its own process. The same clients, each with one connection and one
request at a time, ask one service after the other, and never the same query
twice. Prints seconds to an answer, requests per second, errors, and the ratios.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import pathlib
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import orjson
import pydantic
from absl import flags

from bench import harness
from launch import serve_retriever
from retrieval import passages
from retrieval.index import search

_WARM = 2.0  # Seconds before the measurement.
_K = 3
_REQUEST = (
  b"POST /retrieve HTTP/1.1\r\nHost: service\r\n"
  b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
)


class _Flat:
  """A `search.VectorIndex` that is FAISS's, with its default settings."""

  type = "IndexFlatIP"

  def __init__(self, vectors: np.ndarray):
    import faiss

    self.count, self.dim = vectors.shape
    self._index = faiss.IndexFlatIP(self.dim)
    self._index.add(vectors)

  def search(self, vectors: np.ndarray, k: int) -> list[search.Hits]:
    scores, rows = self._index.search(vectors, k)
    return [search.Hits(*each) for each in zip(rows, scores, strict=True)]


class _Encoder:
  """A `search.Encoder`: a unit vector from the hash of each text."""

  def __init__(self, dim: int):
    self.dim = dim

  def queries(self, texts: Sequence[str]) -> np.ndarray:
    seeds = (hashlib.sha256(text.encode()).digest()[:8] for text in texts)
    rngs = (np.random.default_rng(int.from_bytes(seed)) for seed in seeds)
    return _unit(
      np.stack([rng.standard_normal(self.dim, np.float32) for rng in rngs])
    )


def _unit(vectors: np.ndarray) -> np.ndarray:
  """Returns vectors `[..., D]` scaled to length 1."""
  return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _write_corpus(file: pathlib.Path, rows: int) -> None:
  """Writes passages of about a hundred words as JSON lines."""
  words = " ".join(f"word{i}" for i in range(100))
  with file.open("w") as out:
    for row in range(rows):
      contents = f'"Title {row}"\nPassage {row} says {words}.'
      out.write(json.dumps({"id": str(row), "contents": contents}) + "\n")


class _Request(pydantic.BaseModel):
  """Search-R1's request."""

  queries: list[str]
  topk: int | None = None
  return_scores: bool = False


def _plain_app(index: search.SearchIndex):
  """Returns a service whose `def` endpoint searches for its own request."""
  import fastapi

  app = fastapi.FastAPI()

  def retrieve(request: _Request):
    result = []
    for some in index.search(request.queries, request.topk or 3):
      items = [
        {"document": {"id": p.id, "contents": p.contents}, "score": p.score}
        for p in some
      ]
      result.append(
        items if request.return_scores else [i["document"] for i in items]
      )
    return {"result": result}

  app.post("/retrieve")(retrieve)
  return app


def _written(folder: str, vectors: np.ndarray) -> search.VectorIndex:
  """Returns the index that launch.build_index makes with --kind=flat."""
  from retrieval.index import flat
  from retrieval.index import vectors as vectors_lib

  count, dim = vectors.shape
  shards = vectors_lib.Shards(
    folder, count=count, each=count, dim=dim, dtype="float32"
  )
  shards.write(0, iter([vectors]))
  return flat.open_flat(shards)


def _serve(name: str, folder: str, dim: str) -> None:
  """Serves until the process is ended."""
  corpus = passages.Corpus(folder)
  rng = np.random.default_rng(0)
  vectors = _unit(rng.standard_normal((len(corpus), int(dim)), np.float32))
  flat = _Flat(vectors) if name == "plain" else _written(folder, vectors)
  index = search.SearchIndex(
    corpus,
    search.EncodedIndex(flat, _Encoder(int(dim))),
    identity={"kind": "bench"},
  )
  if name == "ours":
    serve_retriever.serve(index, port=0)
    return
  import uvicorn

  with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
    print(f"serving at http://127.0.0.1:{listening.getsockname()[1]}")
    sys.stdout.flush()
    config = uvicorn.Config(
      _plain_app(index), log_level="warning", access_log=False
    )
    uvicorn.Server(config).run(sockets=[listening])


async def _ask(
  number: int, port: int, end: float, seconds: list[tuple[float, float]]
) -> int:
  """Runs one client; appends (end, duration) of requests, returns errors."""
  errors = asked = 0
  reader, writer = await asyncio.open_connection("127.0.0.1", port)
  while (start := time.monotonic()) < end:
    body = orjson.dumps(
      {
        "queries": [f"query {asked} of client {number}"],
        "topk": _K,
        "return_scores": True,
      }
    )
    asked += 1
    writer.write(_REQUEST % (len(body), body))
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].split()[0])
    content = await reader.readexactly(length)
    now = time.monotonic()
    seconds.append((now, now - start))
    errors += not _is_right(head, content)
  writer.close()
  return errors


def _is_right(head: bytes, content: bytes) -> bool:
  if b" 200 " not in head.partition(b"\r\n")[0]:
    return False
  (found,) = orjson.loads(content)["result"]
  scores = [item["score"] for item in found]
  return (
    len(found) == _K
    and scores == sorted(scores, reverse=True)
    and all("contents" in item["document"] for item in found)
  )


async def _measure(port: int) -> dict[str, float]:
  clients, seconds = flags.FLAGS.clients, flags.FLAGS.seconds
  start = time.monotonic() + _WARM
  end = start + seconds
  timed: list[tuple[float, float]] = []
  errors = await asyncio.gather(
    *(_ask(number, port, end, timed) for number in range(clients))
  )
  counted = [took for ended, took in timed if start <= ended <= end]
  cuts = statistics.quantiles(counted, n=100)
  return {
    "p50": cuts[49],
    "p95": cuts[94],
    "p99": cuts[98],
    "requests/s": len(counted) / seconds,
    "requests": len(counted),
    "errors": sum(errors),
  }


def main() -> list[object]:
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    source = folder / "corpus.jsonl"
    _write_corpus(source, flags.FLAGS.rows)
    passages.prepare(source, folder / "corpus")
    found = harness.in_turns(
      ("plain", "ours"),
      lambda service: _asked(service, folder / "corpus"),
      rounds=flags.FLAGS.rounds,
    )
  for ratio, over, under in (
    ("requests/s", "ours", "plain"),
    ("p50", "plain", "ours"),
    ("p99", "plain", "ours"),
  ):
    print(f"ours, {ratio}: {found.ratio(ratio, over, under)} better")
  if any(each[side]["errors"] for each in found.each for side in each):
    sys.exit("bench.service: found errors, expected none.")
  return list(found.each)


def _asked(service: str, folder: pathlib.Path) -> dict[str, float]:
  """Measures one service and prints a line."""
  command = harness.worker_command("serve", service, folder, flags.FLAGS.dim)
  with harness.served(command) as port:
    found = asyncio.run(_measure(port))
  print(
    "{}: p50 {p50:.3f} s, p95 {p95:.3f} s, p99 {p99:.3f} s, "
    "{requests/s:.0f} requests/s, {errors} errors in {requests}".format(
      service, **found
    )
  )
  return found


if __name__ == "__main__":
  flags.DEFINE_integer("clients", 64, "Concurrent ones.", 1)
  flags.DEFINE_float("seconds", 30, "Of each measurement.", 0)
  flags.DEFINE_integer("rounds", 1, "Measurements of each service.", 1)
  flags.DEFINE_integer("rows", 32768, "Passages.", 1)
  flags.DEFINE_integer("dim", 768, "Of their vectors.", 1)
  harness.run(main, workers={"serve": _serve})
