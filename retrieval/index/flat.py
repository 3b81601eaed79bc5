"""Exact search by inner product over stored vectors, in float32.

On a CPU, float32 vectors are mapped from their files (`row_scan`); everything
else is JAX (`device_scan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anysearch_jax.retrieval.index import search as search_lib
from anysearch_jax.retrieval.index import vectors as vectors_lib


def open_flat(
  shards: vectors_lib.Shards,
  *,
  devices: Sequence[Any] | None = None,
  block: int = 32768,
) -> search_lib.Index:
  """Opens exact search over the shards of a folder, and compiles it.

  Args:
    shards: the shards.
    devices: JAX devices that hold the vectors; None: a CPU, which reads float32
      vectors from their files.
    block: number of rows that are scored at a time.

  Raises:
    vectors.DamagedError: a file is missing or not as it was written.
  """
  pieces = [
    (shards.span(shard)[0], shards.rows(shard)) for shard in range(len(shards))
  ]
  # JAX is not needed on a CPU, nor FAISS where accelerators hold the vectors.
  if devices is None and shards.dtype == "float32":
    from anysearch_jax.retrieval.index import row_scan

    return row_scan.RowScan(pieces, shards.dim)
  from anysearch_jax.host import platforms
  from anysearch_jax.retrieval.index import device_scan

  return device_scan.DeviceScan(
    shards, pieces, devices=devices or [platforms.cpu()], block=block
  )
