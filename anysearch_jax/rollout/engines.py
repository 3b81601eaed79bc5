"""Makes the engine that a configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax.policy import hf, sharding
from anysearch_jax.rollout.jax_engine import engine

if TYPE_CHECKING:
  from anysearch_jax.rollout.servers import engine as servers_engine


def make(
  policy: hf.Policy,
  config: config_lib.ExperimentConfig,
  *,
  seed: int,
  trains: bool = True,
) -> engine.JaxEngine | servers_engine.ServersEngine:
  """Makes an engine that samples a policy, as policy version 0.

  Args:
    policy: the initial policy. For the in-process engine, its weights are on
      the rollout mesh.
    config: names the engine, its settings and the sampling.
    seed: seed of all draws.
    trains: whether turns are trained on. Only then do they record the experts
      that `objective.router` may ask for.

  Raises:
    types.EngineError: a server is unavailable or cannot be used.
    ValueError: the configuration is invalid.
  """
  dtype = jnp.dtype(config.compute_dtype)
  records = trains and config.objective.router != "own"
  if config.engine.has_servers:
    # Imported late: the in-process engine needs no HTTP.
    from anysearch_jax.rollout.servers import dialects
    from anysearch_jax.rollout.servers import engine as servers_engine

    return servers_engine.ServersEngine(
      policy,
      dialect=dialects.BY_KIND[config.engine.kind],
      config=config.servers,
      sampling=config.sampling,
      seed=seed,
      dtype=dtype,
      records=records,
    )
  return engine.JaxEngine(
    policy,
    config=config.engine,
    sampling=config.sampling,
    seed=seed,
    dtype=dtype,
    mesh=sharding.rollout_mesh(config.mesh, policy.architecture),
    records=records,
  )
