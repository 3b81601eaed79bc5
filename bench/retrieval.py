"""Compares exact searches on a CPU by time per call and memory.

    python -m bench.retrieval [--rows=32641,1000000] [--batches=1,8,32,128,512]

The sides run in turns, each in its own process: `default` is faiss.IndexFlatIP
with default settings; `set` is the same with the two settings of
`retrieval/index/faiss_flat`; `faiss_flat` and `jax_flat` are the indexes that
launch.build_index makes, mapped from their files. The vectors are random unit
vectors of 768 numbers; a search returns the top 3. Prints the median
milliseconds per call, the speed relative to `default`, the process's own
memory, and its peak memory with mapped pages.
"""

from __future__ import annotations

import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
from absl import flags

from launch import flags as launch_flags

_ROWS = flags.DEFINE_list("rows", ["32641", "1000000"], "Vectors.")
_BATCHES = flags.DEFINE_list(
  "batches", ["1", "8", "32", "128", "512"], "Queries."
)
_SIDES = flags.DEFINE_list(
  "sides", ["default", "set", "faiss_flat", "jax_flat"], "What is measured."
)
_DIM = flags.DEFINE_integer("dim", 768, "Numbers of a vector.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Processes of each side.")
_FOLDER = flags.DEFINE_string("folder", None, "For the vectors; kept.")
_JSON = flags.DEFINE_string("json", None, "File for the numbers.")
_SIDE = flags.DEFINE_string("side", None, "Measures one side and prints JSON.")
_CALLS = 7
_SECONDS = 4.0
_K = 3


def units(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
  x = rng.standard_normal((count, dim), np.float32)
  x /= np.linalg.norm(x, axis=1, keepdims=True)
  return x


def make(folder: pathlib.Path, rows: int, dim: int) -> None:
  """Writes the files that the sides search, unless they exist."""
  from retrieval.index import faiss_flat, vectors

  if (folder / "made").is_file():
    return
  folder.mkdir(parents=True, exist_ok=True)
  shards = vectors.Shards(
    folder / "vectors", count=rows, each=65536, dim=dim, dtype="float32"
  )
  for shard in range(len(shards)):
    start, end = shards.span(shard)
    rng = np.random.default_rng(shard)
    shards.write(shard, iter([units(rng, end - start, dim)]))
  faiss_flat.write(
    folder,
    lambda: (shards.rows(i).values for i in range(len(shards))),
    count=rows,
    dim=dim,
  )
  (folder / "made").touch()


def measure(side: str, folder: pathlib.Path, rows: int) -> dict[str, float]:
  """Returns the milliseconds per call by batch size, and memory in GB."""
  if side == "default":
    import faiss

    index = faiss.read_index(str(folder / "flat.faiss"))
    search = lambda queries: index.search(queries, _K)  # noqa: E731
  elif side == "set":
    import faiss

    from retrieval.index import faiss_flat

    index = faiss.read_index(str(folder / "flat.faiss"))
    assert faiss_flat.faiss.cvar.distance_compute_blas_threshold == 1
    search = lambda queries: index.search(queries, _K)  # noqa: E731
  else:
    from retrieval.index import faiss_flat, jax_flat, vectors

    if side == "faiss_flat":
      index = faiss_flat.FaissFlat(folder)
    else:
      shards = vectors.Shards(
        folder / "vectors",
        count=rows,
        each=65536,
        dim=_DIM.value,
        dtype="float32",
      )
      index = jax_flat.JaxFlat(shards)
    search = lambda queries: index.search(queries, _K)  # noqa: E731
  out = {}
  for batch in map(int, _BATCHES.value):
    queries = units(np.random.default_rng(7), batch, _DIM.value)
    search(queries)
    seconds, began = [], time.perf_counter()
    while len(seconds) < 3 or (
      len(seconds) < _CALLS and time.perf_counter() - began < _SECONDS
    ):
      start = time.perf_counter()
      search(queries)
      seconds.append(time.perf_counter() - start)
    out[str(batch)] = 1e3 * statistics.median(seconds)
  status = pathlib.Path("/proc/self/status").read_text().splitlines()
  own = next(s for s in status if s.startswith("RssAnon")).split()[1]
  out["own GB"] = int(own) / 1e6
  out["peak GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
  return out


def main(argv) -> None:
  del argv
  folder = pathlib.Path(_FOLDER.value or tempfile.mkdtemp())
  if _SIDE.value:
    (rows,) = map(int, _ROWS.value)
    print(json.dumps(measure(_SIDE.value, folder, rows)))
    return
  env = os.environ | {"JAX_PLATFORMS": "cpu"}
  for name in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME"):
    env.pop(name, None)
  numbers = {}
  for rows in map(int, _ROWS.value):
    here = folder / str(rows)
    make(here, rows, _DIM.value)
    found = {side: [] for side in _SIDES.value}
    for _ in range(_ROUNDS.value):
      for side in _SIDES.value:
        command = [sys.executable, "-m", "bench.retrieval", f"--side={side}"]
        command += [f"--rows={rows}", f"--folder={here}", f"--dim={_DIM.value}"]
        command += [f"--batches={','.join(_BATCHES.value)}"]
        done = subprocess.run(
          command, env=env, check=True, stdout=subprocess.PIPE, text=True
        )
        found[side].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{rows} x {_DIM.value}, top {_K}: ms a call (times `default`)")
    for side, rounds in found.items():
      cells = []
      for name in rounds[0]:
        value = statistics.median(r[name] for r in rounds)
        base = [r[name] for r in found.get("default", rounds)]
        cells.append(
          f"{name} {value:.2f}"
          if "GB" in name
          else f"B={name} {value:.1f} ({statistics.median(base) / value:.2f}x)"
        )
      print(f"  {side:10} {'  '.join(cells)}", flush=True)
    numbers[rows] = found
  if _JSON.value:
    pathlib.Path(_JSON.value).write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
  launch_flags.run(main)
