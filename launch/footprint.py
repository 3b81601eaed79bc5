"""Memory and disk of a run, from its configuration and the parameter table.

These are lower bounds: the memory of a device excludes activations, which
`launch.plan` measures.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import lora, table
from anysearch_jax.policy import parameters as weights

_MASTER = 4  # Bytes of a float32.
_TOKEN = 6  # Bytes of a token's text in a record; enough for most languages.


class Footprint(NamedTuple):
  """Bytes of a run.

  Attributes:
    checkpoint: one checkpoint.
    checkpoints: the most checkpoints that exist at a time.
    export: the exported policy.
    trajectories: the recorded trajectories, if all have the maximum length.
    handed: the current weights, which SGLang servers read.
    trained: each training device: weights, moments, gradients, reference.
    sampled: each sampling device: weights and KV cache; 0 for SGLang.
    shared: a device that does both; less than the sum of them where it takes
      turns.
  """

  checkpoint: int
  checkpoints: int
  export: int
  trajectories: int
  handed: int
  trained: int
  sampled: int
  shared: int

  @property
  def disk(self) -> int:
    """Bytes of the run's folder."""
    return self.checkpoints + self.export + self.trajectories


def of(
  a: architecture_lib.Architecture, config: config_lib.ExperimentConfig
) -> Footprint:
  """Returns the footprint of a run.

  Args:
    a: architecture of the policy, without adapters.
    config: configuration of the run.
  """
  a = lora.attach(a, config.lora)
  trained = weights.count(table.trainable_rows(a))
  base = weights.count(table.base_rows(a))
  compute = _bytes(config.compute_dtype)
  checkpoint = 3 * _MASTER * trained  # Weights and both moments.
  keep = config.checkpoint
  c = config.curriculum
  rollouts = math.ceil(c.total_steps / c.steps_per_rollout)
  recorded = math.ceil(rollouts / config.save_every) + 1
  tokens = config.questions * config.group * config.episode.max_context
  export = base * _bytes(keep.export_dtype)
  frozen = 0
  if config.lora.rank:
    export += _MASTER * trained
    frozen = base * _bytes(config.lora.base_dtype)
  elif config.objective.kl_coefficient:
    frozen = base * compute
  mesh = config.mesh
  state = _MASTER * trained // (mesh.fsdp * mesh.tensor)
  trains = 4 * state + frozen // (mesh.fsdp * mesh.tensor)
  weights_size, cache = _sampled(
    a,
    config,
    # In float32 the engine may sample with the trained arrays themselves.
    0
    if compute == _MASTER and not (mesh.rollout or config.lora.rank)
    else base * compute,
  )
  return Footprint(
    checkpoint=checkpoint,
    checkpoints=checkpoint * (keep.keep_last + keep.keep_best + 1),
    export=export,
    trajectories=recorded * tokens * _TOKEN,
    handed=base * compute,
    trained=trains,
    sampled=weights_size + cache,
    shared=weights_size
    + _phases(config, state=state, trains=trains, cache=cache),
  )


def _phases(
  config: config_lib.ExperimentConfig, *, state: int, trains: int, cache: int
) -> int:
  """Returns the bytes of a shared device without the engine's weights.

  Args:
    config: configuration of the run.
    state: bytes of the masters; both moments and gradients are as large each.
    trains: bytes of training, gradients included.
    cache: bytes of the KV cache.
  """
  if config.pipeline.async_level:
    return trains + cache
  offloaded = {"none": 0, "moments": 2, "state": 3}[config.pipeline.offload]
  freed = cache if config.engine.free_kv_while_training else 0
  return max(
    trains + cache - freed,
    # Gradients exist only while training.
    trains - (1 + offloaded) * state + cache,
  )


def _sampled(
  a: architecture_lib.Architecture,
  config: config_lib.ExperimentConfig,
  policy: int,
) -> tuple[int, int]:
  """Returns a sampling device's bytes of weights and of KV cache.

  Args:
    a: architecture of the policy.
    config: configuration of the run.
    policy: bytes of the policy that the devices share.
  """
  e, mesh = config.engine, config.mesh
  if e.kind != "jax":
    return 0, 0
  tokens = e.kv_tokens or e.slots * e.max_context
  cache = 2 * a.layers * a.kv_heads * a.head_dim * tokens
  devices = len(mesh.rollout) or mesh.data * mesh.fsdp * mesh.tensor
  cache *= _bytes(config.compute_dtype)
  parts = math.gcd(devices, a.kv_heads)
  return policy // parts, cache // parts


def _bytes(dtype: str) -> int:
  return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
