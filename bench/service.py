"""Compares the search service with a plain one around the same index.

    python -m bench.service [--clients=64] [--seconds=30] [--rounds=1]

The index is FAISS's flat index over random unit vectors. The encoder derives a
query's vector from its hash, and passages are read from a file. The plain
service (`plain_service`) searches for each request on a thread. Each service
runs in its own process. The same clients, each with one connection and one
request at a time, ask one service after the other, and never the same query
twice. Prints seconds to an answer, requests per second, errors, and the ratios.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import numpy as np
import orjson
from absl import flags

# OpenMP threads that spin while they wait would take cores from the clients.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from bench import plain_service
from launch import flags as launch_flags
from launch import serve_retriever
from retrieval import passages
from retrieval.index import search

_CLIENTS = flags.DEFINE_integer("clients", 64, "Concurrent ones.", 1)
_SECONDS = flags.DEFINE_float("seconds", 30, "Of each measurement.", 0)
_ROUNDS = flags.DEFINE_integer("rounds", 1, "Measurements of each service.", 1)
_ROWS = flags.DEFINE_integer("rows", 32768, "Passages.", 1)
_DIM = flags.DEFINE_integer("dim", 768, "Of their vectors.", 1)
_JSON = flags.DEFINE_string("json", None, "File for the numbers.")
_SERVE = flags.DEFINE_enum(
  "serve", None, ["ours", "plain"], "Serves, as a process of the bench."
)
_CORPUS = flags.DEFINE_string("corpus", None, "Folder of what it serves.")
_WARM = 2.0  # Seconds before the measurement.
_K = 3
_REQUEST = (
  b"POST /retrieve HTTP/1.1\r\nHost: service\r\n"
  b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
)


class _Encoder:
  """Derives a unit vector from the hash of each text."""

  def __init__(self, dim: int):
    self.dim = dim

  def queries(self, texts: Sequence[str]) -> np.ndarray:
    seeds = (hashlib.sha256(text.encode()).digest()[:8] for text in texts)
    return _unit(
      np.stack([_normal(int.from_bytes(s), self.dim) for s in seeds])
    )


class _Flat:
  """A `search.VectorIndex` that uses FAISS."""

  type = "IndexFlatIP"

  def __init__(self, vectors: np.ndarray):
    import faiss

    # As in `faiss_flat`: otherwise batches of up to 166 queries are slower.
    faiss.cvar.distance_compute_blas_threshold = 1
    self.count, self.dim = vectors.shape
    self._index = faiss.IndexFlatIP(self.dim)
    self._index.add(vectors)

  def search(self, vectors: np.ndarray, k: int) -> list[search.Hits]:
    scores, rows = self._index.search(vectors, k)
    return [search.Hits(*each) for each in zip(rows, scores, strict=True)]


def _normal(seed: int, *shape: int) -> np.ndarray:
  return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _unit(vectors: np.ndarray) -> np.ndarray:
  return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _serve(name: str, folder: str) -> None:
  """Serves until the process is ended."""
  corpus = passages.Corpus(folder)
  index = search.PassageSearch(
    corpus,
    search.EncodedIndex(
      _Flat(_unit(_normal(0, len(corpus), _DIM.value))), _Encoder(_DIM.value)
    ),
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
      plain_service.create_app(index), log_level="warning", access_log=False
    )
    uvicorn.Server(config).run(sockets=[listening])


@contextlib.contextmanager
def _started(name: str, folder: pathlib.Path) -> Iterator[int]:
  """Starts a service, waits until it listens, and yields its port."""
  command = [
    *(sys.executable, "-m", "bench.service"),
    *(f"--serve={name}", f"--corpus={folder}", f"--dim={_DIM.value}"),
  ]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    try:
      line = process.stdout.readline()
      if "http://" not in line:
        sys.exit(f"bench.service: the service {name} did not start.")
      yield int(line.rpartition(":")[2])
    finally:
      process.terminate()


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
  start = time.monotonic() + _WARM
  end = start + _SECONDS.value
  timed: list[tuple[float, float]] = []
  errors = await asyncio.gather(
    *(_ask(number, port, end, timed) for number in range(_CLIENTS.value))
  )
  counted = [took for ended, took in timed if start <= ended <= end]
  cuts = statistics.quantiles(counted, n=100)
  return {
    "p50": cuts[49],
    "p95": cuts[94],
    "p99": cuts[98],
    "requests/s": len(counted) / _SECONDS.value,
    "requests": len(counted),
    "errors": sum(errors),
  }


def _write_corpus(folder: pathlib.Path) -> None:
  words = " ".join(f"word{i}" for i in range(100))
  source = folder / "corpus.jsonl"
  with source.open("w") as file:
    for row in range(_ROWS.value):
      contents = f'"Title {row}"\nPassage {row} says {words}.'
      file.write(json.dumps({"id": str(row), "contents": contents}) + "\n")
  passages.prepare(source, folder / "corpus")


def main(argv) -> None:
  del argv
  if _SERVE.value:
    _serve(_SERVE.value, _CORPUS.value)
    return
  rounds = []
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    _write_corpus(folder)
    for _ in range(_ROUNDS.value):
      found = {}
      for service in ("plain", "ours"):
        with _started(service, folder / "corpus") as port:
          found[service] = asyncio.run(_measure(port))
        print(
          "{}: p50 {p50:.3f} s, p95 {p95:.3f} s, p99 {p99:.3f} s, "
          "{requests/s:.0f} requests/s, {errors} errors in {requests}".format(
            service, **found[service]
          )
        )
      plain, ours = found["plain"], found["ours"]
      print(
        f"ours: {ours['requests/s'] / plain['requests/s']:.1f}x the requests "
        f"a second, p50 {plain['p50'] / ours['p50']:.1f}x, p99 "
        f"{plain['p99'] / ours['p99']:.1f}x as fast"
      )
      rounds.append(found)
  if _JSON.value:
    pathlib.Path(_JSON.value).write_text(json.dumps(rounds, indent=2) + "\n")
  if any(r[service]["errors"] for r in rounds for service in r):
    sys.exit("bench.service: found errors, expected none.")


if __name__ == "__main__":
  launch_flags.run(main)
