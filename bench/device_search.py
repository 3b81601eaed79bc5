"""Compares exact vector search on a device with the memory bandwidth.

    python -m bench.device_search                     on one GPU of 80 GB
    python -m bench.device_search --vectors=200000       on a CPU

The vectors are random unit vectors in bfloat16, as many as wiki-18 has
passages: 32 GB. A search reads each vector once, so the lower bound of its time
is these bytes divided by the bandwidth of one large copy, measured in the same
process. Prints the median milliseconds per call and their ratio to that bound.
"""

from __future__ import annotations

import statistics
import time

from absl import flags

from launch import flags as launch_flags
from launch import jax_setup

_VECTORS = flags.DEFINE_integer("vectors", 21_015_324, "How many.")
_DIM = flags.DEFINE_integer("dim", 768, "Numbers of a vector.")
_K = flags.DEFINE_integer("k", 3, "Rows of a query.")
_QUERIES = flags.DEFINE_list("queries", ["1", "8", "32", "128"], "Of a call.")
_BLOCK = flags.DEFINE_integer("block", 32768, "Rows scored at a time.")
_CALLS = flags.DEFINE_integer("calls", 7, "Timed calls.")


def main(argv) -> None:
  del argv
  jax_setup.configure(threads=0, cache="")
  import functools

  import jax
  import jax.numpy as jnp
  import numpy as np

  from bench import copying
  from retrieval.index import jax_flat

  block, rows, dim = _BLOCK.value, _VECTORS.value, _DIM.value
  blocks = -(-rows // block)
  units = functools.partial(_units, shape=(block, dim))

  @jax.jit
  def make(key: jax.Array) -> jax.Array:
    """Makes vectors block by block; all of them in float32 would not fit."""
    return jax.lax.map(
      lambda i: units(jax.random.fold_in(key, i)).astype(jnp.bfloat16),
      jnp.arange(blocks),
    ).reshape(blocks * block, dim)

  values = jax.block_until_ready(make(jax.random.key(0)))
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("rows",))
  search = functools.partial(
    jax_flat.held,
    values=values,
    scales=None,
    k=_K.value,
    mesh=mesh,
    count=rows,
    each=blocks * block,
    block=block,
  )
  speed = copying.bandwidth(min(values.nbytes, 1 << 32))
  floor = rows * dim * 2 / speed
  print(
    f"{rows} x {dim} bfloat16 on {jax.devices()[0].device_kind}, top "
    f"{_K.value}; a copy moves {speed / 1e9:.0f} GB/s, so no search is faster "
    f"than {floor * 1e3:.2f} ms"
  )
  for count in map(int, _QUERIES.value):
    queries = _units(jax.random.key(1), shape=(count, dim))
    jax.block_until_ready(search(queries))
    seconds = []
    for _ in range(_CALLS.value):
      start = time.perf_counter()
      jax.block_until_ready(search(queries))
      seconds.append(time.perf_counter() - start)
    took = statistics.median(seconds)
    print(
      f"queries {count:4}: {took * 1e3:9.2f} ms, {took / floor:5.2f} x the "
      "floor",
      flush=True,
    )


def _units(key, *, shape: tuple[int, int]):
  import jax
  import jax.numpy as jnp

  x = jax.random.normal(key, shape)
  return x / jnp.linalg.norm(x, axis=1, keepdims=True)


if __name__ == "__main__":
  launch_flags.run(main)
