"""Compares exact vector search on a device with the memory bandwidth.

    python -m bench.device_search                     on one GPU of 80 GB
    python -m bench.device_search --vectors=200000       on a CPU

The vectors are random unit vectors in bfloat16, as many as wiki-18 has
passages: 32 GB. A search reads each vector once, so the lower bound of its time
is these bytes divided by the bandwidth of one large copy, measured in the same
process. Prints the median milliseconds per call and their ratio to that bound.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from absl import flags

from bench import harness
from launch import jax_setup

if TYPE_CHECKING:
  import jax

WIKI_18 = 21_015_324  # Passages of the paper's corpus.


def measure(
  *,
  vectors: int,
  dim: int,
  k: int,
  queries: Sequence[int],
  block: int,
  calls: int,
) -> dict[str, object]:
  """Times searches of random vectors on the first device.

  Args:
    vectors: number of vectors.
    dim: numbers of a vector.
    k: rows that a query finds.
    queries: numbers of queries of a call.
    block: rows that are scored at a time.
    calls: timed calls of each number of queries.
  """
  import jax
  import numpy as np

  from bench import copying
  from retrieval.index import jax_flat

  values = _vectors(vectors, dim, block)
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("rows",))
  search = functools.partial(
    jax_flat.held,
    values=values,
    scales=None,
    k=k,
    mesh=mesh,
    count=vectors,
    each=len(values),
    block=block,
  )
  speed = copying.bandwidth(min(values.nbytes, 1 << 32))
  floor = vectors * dim * values.dtype.itemsize / speed
  out: dict[str, object] = {
    "device": jax.devices()[0].device_kind,
    "vectors": vectors,
    "dim": dim,
    "bandwidth of a copy, GB/s": speed / 1e9,
    "limit by bytes, ms": 1e3 * floor,
  }
  for count in queries:
    asked = _units(jax.random.key(1), (count, dim))
    call = functools.partial(_searched, search, asked)
    call()
    took = statistics.median(harness.seconds(call) for _ in range(calls))
    out[f"{count} queries, ms"] = 1e3 * took
    out[f"{count} queries, times the limit"] = took / floor
  return out


def _searched(search: Callable[[jax.Array], object], asked: jax.Array) -> None:
  import jax

  jax.block_until_ready(search(asked))


def _vectors(count: int, dim: int, block: int) -> jax.Array:
  """Makes vectors block by block; all of them in float32 would not fit."""
  import jax
  import jax.numpy as jnp

  blocks = -(-count // block)

  @jax.jit
  def make(key: jax.Array) -> jax.Array:
    return jax.lax.map(
      lambda i: _units(jax.random.fold_in(key, i), (block, dim)).astype(
        jnp.bfloat16
      ),
      jnp.arange(blocks),
    ).reshape(blocks * block, dim)

  return jax.block_until_ready(make(jax.random.key(0)))


def _units(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
  import jax
  import jax.numpy as jnp

  x = jax.random.normal(key, shape)
  return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def main() -> dict[str, object]:
  f = flags.FLAGS
  jax_setup.configure(threads=0, cache="")
  out = measure(
    vectors=f.vectors,
    dim=f.dim,
    k=f.k,
    queries=[int(n) for n in f.queries],
    block=f.block,
    calls=f.calls,
  )
  harness.print_numbers(out)
  return out


if __name__ == "__main__":
  flags.DEFINE_integer("vectors", WIKI_18, "How many.")
  flags.DEFINE_integer("dim", 768, "Numbers of a vector.")
  flags.DEFINE_integer("k", 3, "Rows of a query.")
  flags.DEFINE_list("queries", ["1", "8", "32", "128"], "Of a call.")
  flags.DEFINE_integer("block", 32768, "Rows scored at a time.")
  flags.DEFINE_integer("calls", 7, "Timed calls.")
  harness.run(main)
