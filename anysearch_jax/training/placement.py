"""Places a run's arrays on the training mesh and on the rollout mesh.

Training holds float32 masters, sharded by the parameter table. The engine holds
a copy in the compute dtype on its own devices, replaced after every rollout. An
array whose dtype and sharding agree on both sides is shared, not copied.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax.host import processes
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, experts, hf, lora, sharding
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy.attention import self_attention
from anysearch_jax.rollout.jax_engine import kv_memory, kv_store
from anysearch_jax.training import batching

# The fields of the training state that are in host memory while the engine
# samples, by `pipeline.offload`.
OFFLOADED: dict[str, tuple[str, ...]] = {
  "none": (),
  "moments": ("opt_state",),
  "state": ("opt_state", "params", "critic"),
}


@dataclasses.dataclass(frozen=True)
class Placement:
  """The two meshes of a run, and functions that move arrays onto them.

  a: the architecture, with its adapters.
  dtype: of computation, of the engine's weights and of a frozen reference.
  trainer: a mesh over devices of all processes. rollout: over this process's.
  gathers: whether the engine's weights are in the host memory of the first of
    several processes, which alone hands them to servers.
  """

  a: architecture_lib.Architecture
  dtype: Any
  trainer: jax.sharding.Mesh
  rollout: jax.sharding.Mesh
  gathers: bool = False

  @classmethod
  def of(
    cls,
    a: architecture_lib.Architecture,
    config: config_lib.ExperimentConfig,
    devices: Sequence[jax.Device] | None = None,
  ) -> Placement:
    """Returns the placement of a run's policy on `devices`, by default all.

    Raises ValueError if a device does not exist, the policy does not divide
    over the mesh, or a process has no device in the training mesh.
    """
    trainer = sharding.training_mesh(config.mesh, devices)
    rollout = sharding.rollout_mesh(config.mesh, a, devices)
    sharding.validate(a, trainer)
    return cls(
      a,
      jnp.dtype(config.compute_dtype),
      trainer,
      rollout,
      gathers=jax.process_count() > 1 and config.engine.kind != "jax",
    )

  @property
  def row_multiple(self) -> int:
    """The number of devices that the rows of a micro-batch are sharded over."""
    return math.prod(self.trainer.shape[axis] for axis in sharding.BATCH)

  @property
  def rows(self) -> jax.sharding.NamedSharding:
    """The sharding of a batch's arrays `[A, B, T]`."""
    tokens = sharding.Layout(self.trainer).tokens
    return jax.sharding.NamedSharding(self.trainer, jax.P(None, *tokens))

  @property
  def whole(self) -> jax.sharding.NamedSharding:
    """The sharding of a value that is replicated on the training mesh."""
    return jax.sharding.NamedSharding(self.trainer, jax.P())

  def frozen(self, params: decoder.Params) -> decoder.Params:
    """Moves the KL reference or the base under adapters to the training mesh.

    A base keeps its dtype (`lora.base_dtype`); a reference is cast.
    """
    params = jax.device_put(
      params, sharding.shardings(self.a.without_lora(), self.trainer)
    )
    return params if self.a.lora else hf.cast(params, self.a, self.dtype)

  def batch(self, batch: batching.HostBatch) -> batching.TrainBatch:
    """Shards a host batch by rows; every process has all of it on the host."""

    def put(x: np.ndarray) -> jax.Array:
      return jax.make_array_from_callback(
        x.shape, self.rows if x.ndim else self.whole, lambda index: x[index]
      )

    return jax.tree.map(put, batch)

  def publish(self, params: decoder.Params) -> decoder.Params:
    """Returns trained weights for the engine, copied only where necessary."""
    return self.to_engine(hf.cast(params, self.a, self.dtype))

  def to_engine(self, params: decoder.Params) -> decoder.Params:
    """Moves weights of the training mesh to the engine's devices.

    All processes call it together. With `gathers`, the first one gets NumPy
    arrays and the others nothing.
    """
    if self.gathers:
      gathered = jax.tree.map(_gathered, params)
      return gathered if processes.is_main() else {}
    shardings = sharding.shardings(self.a, self.rollout)

    def moved(path: tuple, x: jax.Array) -> jax.Array:
      wanted = weights.get(shardings, [k.key for k in path])
      if x.sharding.is_equivalent_to(wanted, x.ndim):
        return x
      return jax.device_put(processes.to_replicated(x), wanted)

    return jax.tree_util.tree_map_with_path(moved, params)


def _gathered(x: jax.Array) -> np.ndarray | None:
  """Returns an array in the first process's memory, None in all others.

  One layer of it at a time is whole on the devices.
  """
  whole = np.empty(x.shape, x.dtype) if processes.is_main() else None
  layers = [(i,) for i in range(len(x))] if x.ndim > 2 else [()]
  for layer in layers:
    part = processes.to_replicated(weights.index(x, layer))
    if whole is None:
      jax.block_until_ready(part)
    else:
      whole[layer] = np.asarray(part)
  return whole


def check(
  a: architecture_lib.Architecture, config: config_lib.ExperimentConfig
) -> None:
  """Checks that the devices can train and sample, before weights are read.

  `a` is without adapters. Raises as `Placement.of`, `compute` and
  `check_playing`.
  """
  a = lora.attach(a, config.lora)
  compute(a, config, Placement.of(a, config).trainer)
  check_playing(a, config)


def check_playing(
  a: architecture_lib.Architecture, config: config_lib.ExperimentConfig
) -> None:
  """Raises ValueError if a device does not exist or cannot run the engine."""
  mesh = sharding.rollout_mesh(config.mesh, a)
  if config.engine.kind == "jax":
    kv_memory.validate(config.engine, shards=mesh.shape["data"])
    kv_store.make_model(config.engine, a, mesh, dtype=config.compute_dtype)


def compute(
  a: architecture_lib.Architecture,
  config: config_lib.ExperimentConfig,
  mesh: jax.sharding.Mesh,
) -> decoder.Compute:
  """Returns numerics and layout of the policy's forward pass on its mesh.

  Raises:
    ValueError: the attention that `batch.attention` names cannot run there.
  """
  batch, dtype = config.batch, config.compute_dtype
  device = mesh.devices.flat[0]
  capability = getattr(device, "compute_capability", None)
  attention = {
    self_attention.choose(
      batch.attention,
      platform=device.platform,
      head_dim=a.head_dim,
      dtype=dtype,
      length=length,
      compute_capability=None if capability is None else float(capability),
      xla_only_feature=a.xla_only_feature,
    )
    for length in batch.row_lengths
  }
  if mesh.shape["context"] > 1:
    if batch.attention not in ("auto", "xla"):
      raise ValueError(
        f"batch.attention: found {batch.attention} with mesh.context="
        f"{config.mesh.context}, expected auto: only XLA's attention shards "
        "positions."
      )
    attention = {self_attention.GATHERED}
  layout = sharding.Layout(mesh, config.mesh.sequence_parallel)
  return decoder.Compute(
    dtype=jnp.dtype(dtype),
    remat=batch.remat,
    # If one row length needs XLA's attention, all row lengths use it.
    attention="xla" if "xla" in attention else attention.pop(),
    attention_chunk=batch.attention_chunk,
    max_segments=batch.max_segments,
    logprob_chunk=batch.logprob_chunk,
    layout=layout if mesh.size > 1 else None,
    replays=config.objective.router == "replay",
  )


def recorded(
  a: architecture_lib.Architecture, config: config_lib.ExperimentConfig
) -> jax.ShapeDtypeStruct | None:
  """Returns what batches have of each token's experts, see `batching.pack`."""
  return None if config.objective.router == "own" else experts.record(a)


def take_turns(placed: Placement, *, async_level: int) -> bool:
  """Returns whether sampling and training use some device in turns.

  Above an `async_level` of 0 they run at the same time.
  """
  devices = set(placed.trainer.devices.flat) & set(placed.rollout.devices.flat)
  return bool(devices) and not async_level
