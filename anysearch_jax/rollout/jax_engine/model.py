"""How the engine's calls compute: architecture, dtype, attention and layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, serving
from anysearch_jax.policy.attention import gathered_attention, paged_attention
from anysearch_jax.policy.attention import pages as pages_lib

C = TypeVar("C")


@dataclasses.dataclass(frozen=True)
class Model:
  """How the rows of all calls are computed.

  a: the architecture, without adapters. dtype: of activations and matrix
  products. paged: attention over pages. gathered: attention of decode over
  gathered rows; None if decode reads the pages too. fused: see
  `serving.prepare`. mesh: of all arrays.
  """

  a: architecture_lib.Architecture
  dtype: np.dtype
  paged: paged_attention.Paged
  gathered: gathered_attention.Gathered | None
  fused: bool
  mesh: jax.sharding.Mesh

  def prepare(
    self, params: decoder.Params, a: architecture_lib.Architecture
  ) -> decoder.Params:
    """Returns weights for the calls; see `serving.prepare`.

    Args:
      params: laid out by `table.rows(a)`.
      a: the policy's architecture, adapters included.
    """
    return serving.prepare(
      params,
      a,
      dtype=self.dtype,
      fused=self.fused,
      mesh=self.mesh if self.mesh.size > 1 else None,
    )

  def extend(
    self,
    params: decoder.Params,
    tokens: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    caches: Sequence[C],
    attend: serving.Attend[C],
  ) -> tuple[jax.Array, tuple[C, ...]]:
    """Appends tokens to cached rows; see `serving.extend`."""
    return serving.extend(
      params,
      self.a,
      tokens,
      starts,
      counts,
      caches,
      attend,
      dtype=self.dtype,
    )

  def over_pages(self, table: jax.Array) -> serving.Attend[pages_lib.Pages]:
    """Returns attention over pages, which `table` lists for each row."""

    def attend(q, k, v, pages, positions, real):
      return self.paged(q, k, v, pages, table, positions, real)

    return attend


def make(
  config: config_lib.EngineConfig,
  a: architecture_lib.Architecture,
  mesh: jax.sharding.Mesh,
  *,
  dtype: Any,
) -> Model:
  """Returns how rows are computed on a mesh.

  Raises:
    ValueError: `engine.attention` cannot run there.
  """
  platform = mesh.devices.flat[0].platform
  several = mesh if mesh.size > 1 else None
  paged = paged_attention.Paged(
    paged_attention.choose(
      config.attention,
      platform=platform,
      head_dim=a.head_dim,
      dtype=dtype,
      page=config.page,
    ),
    # Small blocks skip more padding; on accelerators loop overhead dominates.
    block=64 if platform == "cpu" else 512,
    mesh=several,
    as_vectors=platform == "tpu",
  )
  gathered = gathered_attention.Gathered(paged.block, several)
  return Model(
    a.without_lora(),
    jnp.dtype(dtype),
    paged,
    gathered if platform == "cpu" else None,
    # The GPU compiler would otherwise join the matrices in every decode step.
    fused=platform in ("gpu", "cuda"),
    mesh=mesh,
  )
