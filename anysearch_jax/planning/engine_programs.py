"""Prefill and decode of the in-process engine, with abstract arguments."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax.planning import program
from anysearch_jax.policy import decoder, lora, serving, sharding, table
from anysearch_jax.policy.attention import gathered_attention
from anysearch_jax.policy.attention import pages as pages_lib
from anysearch_jax.rollout.jax_engine import kv_memory, kv_store
from anysearch_jax.rollout.jax_engine import sampling as sampling_lib
from anysearch_jax.training import placement


class Engine(NamedTuple):
  """What prefill and decode have in common.

  mesh: of the rollout devices.
  config: of the engine.
  params, store: abstract weights and KV cache.
  columns: pages of a row at full context.
  blocks: iterations of attention over them.
  model: how they compute.
  """

  mesh: jax.sharding.Mesh
  config: config_lib.EngineConfig
  params: decoder.Params
  store: pages_lib.Pools
  columns: int
  blocks: int
  model: kv_store.Model

  @property
  def kinds(self) -> dict[str, Any]:
    return {"engine weights": self.params, "KV cache": self.store}

  def rows(self, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """Returns an abstract array, sharded by rows."""
    by_rows = jax.sharding.NamedSharding(self.mesh, jax.P("data"))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=by_rows)

  def reads(self, rows: int) -> tuple[decoder.Params, pages_lib.Pools]:
    """Returns what one step over `rows` rows reads at most."""
    return self.params, _read_pages(self.store, rows * self.columns)


def make(
  config: config_lib.EngineConfig, placed: placement.Placement, base_dtype: Any
) -> Engine:
  """Returns the engine at its largest: all rows at full context."""
  a, mesh = placed.a, placed.rollout
  model = kv_store.make_model(config, a, mesh, dtype=placed.dtype)
  return Engine(
    mesh=mesh,
    config=config,
    params=_engine_weights(model, placed, base_dtype),
    store=_cache(config, placed),
    columns=kv_memory.pages_of(config.max_context, config),
    blocks=math.ceil(config.max_context / max(model.paged.block, config.page)),
    model=model,
  )


def _engine_weights(
  model: kv_store.Model, placed: placement.Placement, base_dtype: Any
) -> decoder.Params:
  """Returns the abstract weights that decode reads, layer by layer."""
  a = placed.a
  cut = sharding.shardings(a, placed.rollout)
  base = program.cast(table.base_rows(a), cut, base_dtype)
  if a.lora is not None:
    base = lora.combine(
      base, program.cast(table.adapter_rows(a), cut, placed.dtype)
    )
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    jax.eval_shape(functools.partial(model.prepare, a=a), base),
    serving.shardings(a, placed.rollout, fused=model.fused),
  )


def _cache(
  config: config_lib.EngineConfig, placed: placement.Placement
) -> pages_lib.Pools:
  """Returns the abstract KV cache."""
  shards = placed.rollout.shape["data"]
  store = jax.eval_shape(
    functools.partial(
      pages_lib.empty,
      placed.a,
      kv_memory.pages(config, shards=shards) * shards,
      config.page,
      placed.dtype,
    )
  )
  pages = kv_store.sharding(placed.a, placed.rollout)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pages), store
  )


def prefill(e: Engine) -> program.Program:
  rows, chunk = e.config.prefill_lanes, e.config.prefill_chunk
  starts = counts = e.rows(rows)
  return program.Program(
    "prefill",
    kv_store.prefill,
    (
      e.params,
      e.store,
      kv_store.Chunks(
        e.rows(rows, e.columns), e.rows(rows, chunk), starts, counts
      ),
    ),
    {"model": e.model},
    tokens=rows * chunk,
    trips=1,
    kinds=e.kinds,
    reads=e.reads(rows),
    blocks=e.blocks,
  )


def decode(e: Engine, sampling: config_lib.SamplingConfig) -> program.Program:
  """Returns the decode program of requests drawn as `sampling` says."""
  rows, steps = e.config.lanes[-1], e.config.decode_steps
  tokens = starts = limits = sampled = top_k = e.rows(rows)
  temperature = top_p = e.rows(rows, dtype=jnp.float32)
  vocabulary = e.model.a.vocab_size
  draws = jax.eval_shape(
    lambda: kv_store.Draws(jnp.zeros(vocabulary, jnp.uint32), jax.random.key(0))
  )
  return program.Program(
    "decode",
    kv_store.decode,
    (
      e.params,
      e.store,
      _gathered(e, rows, steps=steps),
      kv_store.Turns(
        e.rows(rows, e.columns),
        tokens,
        starts,
        limits,
        e.rows(rows, 5, dtype=jnp.uint32),
        sampled,
        e.rows(rows, dtype=jnp.uint32),
        sampling_lib.Settings(temperature, top_p, top_k),
      ),
      jax.ShapeDtypeStruct((), jnp.int32),
      draws,
    ),
    {
      "model": e.model,
      "steps": steps,
      "restricted": sampling_lib.restricts(sampling),
    },
    tokens=rows * steps,
    trips=steps,
    kinds=e.kinds,
    reads=e.reads(rows),
    blocks=e.blocks,
  )


def _gathered(e: Engine, lanes: int, *, steps: int) -> kv_store.GatheredRows:
  """Returns the abstract rows that decode gathers: () but on CPUs."""
  empty = functools.partial(
    kv_store.empty_rows, e.model, lanes=lanes, columns=e.columns, steps=steps
  )
  rows = jax.eval_shape(empty, e.store)
  stands = gathered_attention.shardings(e.model.mesh)
  return tuple(
    jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=sharding
      ),
      layer,
      stands,
    )
    for layer in rows
  )


def _read_pages(store: pages_lib.Pools, pages: int) -> pages_lib.Pools:
  """Returns the part of the cache that one call reads at most."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      (x.shape[0], min(pages, x.shape[1]), *x.shape[2:]),
      x.dtype,
      sharding=x.sharding,
    ),
    store,
  )
