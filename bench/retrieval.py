"""Compares exact searches on a CPU by time per call and memory.

    python -m bench.retrieval [--rows=32641,1000000] [--batches=1,8,32,128,512]

The sides run in turns, each in its own process: `default` is faiss.IndexFlatIP
with default settings, which has an OpenMP thread on each core; `set` is the
same with `distance_compute_blas_threshold` 1, so that every batch is a matrix
product (by default, of 167 or more queries of 768 numbers); `flat` is the index
that launch.build_index makes, mapped from its files. The vectors are random
unit vectors of 768 numbers; a search returns the top 3. Prints the median
milliseconds per call, the speed relative to `default`, and the process's own
memory.
"""

from __future__ import annotations

import functools
import os
import pathlib
import statistics
import tempfile
import time
from typing import Any

import numpy as np
from absl import flags

from bench import harness

_SIDES = ("default", "set", "flat")
_CALLS = 7
_SECONDS = 4.0
_K = 3
_SHARD = 65536


def _units(seed: int, count: int, dim: int) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return harness.units(rng.standard_normal((count, dim), np.float32))


def _make(folder: pathlib.Path, rows: int, dim: int) -> None:
  """Writes the files that the sides search, unless they exist."""
  import faiss

  from retrieval.index import vectors

  if (folder / "made").is_file():
    return
  shards = vectors.Shards(
    folder / "vectors", count=rows, each=_SHARD, dim=dim, dtype="float32"
  )
  index = faiss.IndexFlatIP(dim)
  for shard in range(len(shards)):
    start, end = shards.span(shard)
    shards.write(shard, iter([_units(shard, end - start, dim)]))
    index.add(shards.rows(shard))
  faiss.write_index(index, str(folder / "flat.faiss"))
  (folder / "made").touch()


def measure(
  side: str, folder: str, rows: str, dim: str, batches: str
) -> dict[str, float]:
  """Returns the milliseconds per call by batch size, and memory in GB."""
  index: Any
  if side == "flat":
    from retrieval.index import flat, vectors

    shards = vectors.Shards(
      pathlib.Path(folder) / "vectors",
      count=int(rows),
      each=_SHARD,
      dim=int(dim),
      dtype="float32",
    )
    index = flat.open_flat(shards)
  else:
    import faiss

    index = faiss.read_index(f"{folder}/flat.faiss")
    if side == "set":
      faiss.cvar.distance_compute_blas_threshold = 1
  out = {}
  for batch in map(int, batches.split("-")):
    queries = _units(7, batch, int(dim))
    search = functools.partial(index.search, queries, _K)
    search()
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < 3 or (
      len(seconds) < _CALLS and time.perf_counter() - began < _SECONDS
    ):
      seconds.append(harness.seconds(search))
    out[f"B={batch}"] = 1e3 * statistics.median(seconds)
  status = pathlib.Path("/proc/self/status").read_text().splitlines()
  own = next(s for s in status if s.startswith("RssAnon")).split()[1]
  return out | {"own GB": int(own) / 1e6}


def main() -> dict[int, object]:
  f = flags.FLAGS
  folder = pathlib.Path(f.folder or tempfile.mkdtemp())
  for name in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME"):
    os.environ.pop(name, None)
  env = {"JAX_PLATFORMS": "cpu"}
  out: dict[int, object] = {}
  for rows in map(int, f.rows):
    here = folder / str(rows)
    _make(here, rows, f.dim)
    rest = (here, rows, f.dim, "-".join(f.batches))
    found = harness.in_turns(
      _SIDES,
      lambda side: harness.in_worker("measure", side, *rest, env=env),  # noqa: B023
      rounds=f.rounds,
    )
    print(f"{rows} x {f.dim}, top {_K}: ms a call (times `default`)")
    base = found.medians("default")
    for side in _SIDES:
      cells = [
        f"{name} {value:.2f} ({base[name] / value:.2f}x)"
        for name, value in found.medians(side).items()
      ]
      print(f"  {side:10} {'  '.join(cells)}", flush=True)
    out[rows] = {side: [each[side] for each in found.each] for side in _SIDES}
  return out


if __name__ == "__main__":
  flags.DEFINE_list("rows", ["32641", "1000000"], "Vectors.")
  flags.DEFINE_list("batches", ["1", "8", "32", "128", "512"], "Queries.")
  flags.DEFINE_integer("dim", 768, "Numbers of a vector.")
  flags.DEFINE_integer("rounds", 3, "Processes of each side.")
  flags.DEFINE_string("folder", None, "For the vectors; kept.")
  harness.run(main, workers={"measure": measure})
