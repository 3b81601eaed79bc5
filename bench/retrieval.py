"""Compares exact searches on a CPU by time per call and memory.

    python -m bench.retrieval [--rows=32641,1000000] [--batches=1,8,32,128,512]

The sides run in turns, each in its own process: `default` is faiss.IndexFlatIP
with default settings, which has an OpenMP thread on each core; `set` is the
same with `distance_compute_blas_threshold` 1, so that every batch is a matrix
product (by default, of 167 or more queries of 768 numbers); `flat` is the index
that launch.build_index makes, mapped from its files. The vectors are random
unit vectors of 768 numbers; a search returns the top 3. Prints the median
milliseconds per call, the speed relative to `default`, the process's own
memory, and its peak memory with mapped pages.
"""

from __future__ import annotations

import functools
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np
from absl import flags

from bench import harness

_CALLS = 7
_SECONDS = 4.0
_K = 3
_SHARD = 65536


def units(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
  x = rng.standard_normal((count, dim), np.float32)
  x /= np.linalg.norm(x, axis=1, keepdims=True)
  return x


def make(folder: pathlib.Path, rows: int, dim: int) -> None:
  """Writes the files that the sides search, unless they exist."""
  import faiss

  from retrieval.index import vectors

  if (folder / "made").is_file():
    return
  folder.mkdir(parents=True, exist_ok=True)
  shards = vectors.Shards(
    folder / "vectors", count=rows, each=_SHARD, dim=dim, dtype="float32"
  )
  for shard in range(len(shards)):
    start, end = shards.span(shard)
    rng = np.random.default_rng(shard)
    shards.write(shard, iter([units(rng, end - start, dim)]))
  index = faiss.IndexFlatIP(dim)
  for shard in range(len(shards)):
    index.add(shards.rows(shard))
  faiss.write_index(index, str(folder / "flat.faiss"))
  (folder / "made").touch()


def measure(
  side: str, folder: str, rows: str, dim: str, batches: str
) -> dict[str, float]:
  """Returns the milliseconds per call by batch size, and memory in GB."""
  search = _open(side, pathlib.Path(folder), int(rows), int(dim))
  out = {}
  for batch in map(int, batches.split("-")):
    queries = units(np.random.default_rng(7), batch, int(dim))
    search(queries)
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < 3 or (
      len(seconds) < _CALLS and time.perf_counter() - began < _SECONDS
    ):
      seconds.append(harness.seconds(functools.partial(search, queries)))
    out[str(batch)] = 1e3 * statistics.median(seconds)
  status = pathlib.Path("/proc/self/status").read_text().splitlines()
  own = next(s for s in status if s.startswith("RssAnon")).split()[1]
  out["own GB"] = int(own) / 1e6
  out["peak GB"] = harness.peak_memory() / 1e9
  return out


def _open(
  side: str, folder: pathlib.Path, rows: int, dim: int
) -> Callable[[np.ndarray], object]:
  """Returns a side's search."""
  if side in ("default", "set"):
    return _faiss(folder, side == "set")
  from retrieval.index import flat, vectors

  shards = vectors.Shards(
    folder / "vectors", count=rows, each=_SHARD, dim=dim, dtype="float32"
  )
  index = flat.open_flat(shards)
  return lambda queries: index.search(queries, _K)


def _faiss(
  folder: pathlib.Path, is_set: bool
) -> Callable[[np.ndarray], object]:
  import faiss

  if is_set:
    faiss.cvar.distance_compute_blas_threshold = 1
  index = faiss.read_index(str(folder / "flat.faiss"))
  return lambda queries: index.search(queries, _K)


def main() -> dict[int, object]:
  f = flags.FLAGS
  folder = pathlib.Path(f.folder or tempfile.mkdtemp())
  for name in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME"):
    os.environ.pop(name, None)
  out: dict[int, object] = {}
  for rows in map(int, f.rows):
    here = folder / str(rows)
    make(here, rows, f.dim)
    rest = (here, rows, f.dim, "-".join(f.batches))
    found = harness.in_turns(
      f.sides, functools.partial(_in_worker, rest=rest), rounds=f.rounds
    )
    print(f"{rows} x {f.dim}, top {_K}: ms a call (times `default`)")
    for side in f.sides:
      _show(found, side, "default" if "default" in f.sides else side)
    out[rows] = {side: [each[side] for each in found.each] for side in f.sides}
  return out


def _in_worker(side: str, *, rest: Sequence[object]) -> harness.Numbers:
  return harness.in_worker("measure", side, *rest, env={"JAX_PLATFORMS": "cpu"})


def _show(found: harness.Rounds, side: str, base: str) -> None:
  others = found.medians(base)
  cells = [
    f"{name} {value:.2f}"
    if "GB" in name
    else f"B={name} {value:.1f} ({others[name] / value:.2f}x)"
    for name, value in found.medians(side).items()
  ]
  print(f"  {side:10} {'  '.join(cells)}", flush=True)


if __name__ == "__main__":
  flags.DEFINE_list("rows", ["32641", "1000000"], "Vectors.")
  flags.DEFINE_list("batches", ["1", "8", "32", "128", "512"], "Queries.")
  flags.DEFINE_list("sides", ["default", "set", "flat"], "What is measured.")
  flags.DEFINE_integer("dim", 768, "Numbers of a vector.")
  flags.DEFINE_integer("rounds", 3, "Processes of each side.")
  flags.DEFINE_string("folder", None, "For the vectors; kept.")
  harness.run(main, workers={"measure": measure})
