"""How a decoder is sharded over a device mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from anysearch_jax import config as config_lib
from anysearch_jax.host import hardware
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import table
from anysearch_jax.policy.attention import self_attention

AXES = ("data", "fsdp", "expert", "context", "tensor")
# The rows of a batch are sharded over these.
BATCH = ("data", "fsdp", "expert")
# Maps the logical axes of the table to mesh axes; see `rules`.
RULES: dict[str, weights.Over] = {
  "layers": None,
  "vocab": "tensor",
  "model": "fsdp",
  "heads": "tensor",
  "kv_heads": "tensor",
  "head_dim": None,
  "mlp": "tensor",
  "experts": "expert",
  "expert_model": "fsdp",
}
# The logical axes that are gathered for a layer's products.
_GATHERED_AXES = ("model", "expert_model")
# The checkpoint name of gathered weights.
_GATHERED = "gathered"
_BFLOAT16_BYTES = 2
# Share of a sampling device's memory that its weights may take; keys and values
# get most of the remainder.
_WEIGHTS_SHARE = 1 / 8
# A `jax.checkpoint` policy: saves everything but gathered weights, which the
# backward pass gathers again. Saving them would undo fsdp's saving of memory.
all_but_gathered = jax.checkpoint_policies.save_anything_except_these_names(
  _GATHERED
)


def mesh(
  *,
  data: int = 1,
  fsdp: int = 1,
  expert: int = 1,
  context: int = 1,
  tensor: int = 1,
  devices: Sequence[jax.Device] | None = None,
) -> jax.sharding.Mesh:
  """Returns a mesh of the first devices, with the axes `AXES`.

  Args:
    data: devices along `data`: the batch is divided, weights are copied.
    fsdp: devices along `fsdp`: the batch and the weights are divided.
    expert: devices along `expert`: the batch and the experts are divided.
    context: devices along `context`: positions are divided.
    tensor: devices along `tensor`: heads, widths and vocabulary are divided.
    devices: the devices to take from; None means all.

  Raises:
    ValueError: there are too few devices, or their network does not fit.
  """
  shape = (data, fsdp, expert, context, tensor)
  words = f"A mesh of {config_lib.MeshConfig(*shape)}"
  count = math.prod(shape)
  devices = jax.devices() if devices is None else devices
  if count > len(devices):
    raise ValueError(f"{words} needs {count} devices; found {len(devices)}.")
  try:
    return jax.make_mesh(
      shape,
      AXES,
      axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
      devices=devices[:count],
    )
  except (AssertionError, NotImplementedError) as error:
    raise ValueError(
      f"{words} does not lie on these devices' network ({error}); take all of "
      "them, or sizes that its dimensions divide by."
    ) from error


def training_mesh(
  config: config_lib.MeshConfig, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
  """Returns the mesh for training, over devices of all processes.

  Args:
    config: the sizes of the axes, and perhaps indices of devices.
    devices: the devices of a plan, to which the indices refer. None means the
      real devices; indices then refer to the devices of each process.

  Raises:
    ValueError: the devices do not exist, their number does not match the axes,
      or a process has none in the mesh.
  """
  axes = {name: getattr(config, name) for name in AXES}
  mesh_devices = devices
  if config.trainer:
    by_process: dict[int, list[jax.Device]] = {}
    for device in jax.devices() if devices is None else devices:
      # The devices of a plan count as those of one process.
      process = device.process_index if devices is None else 0
      by_process.setdefault(process, []).append(device)
    mesh_devices = [
      device
      for _, local in sorted(by_process.items())
      for device in _pick(local, config.trainer, "mesh.trainer")
    ]
    if len(mesh_devices) != math.prod(axes.values()):
      raise ValueError(
        f"mesh.trainer: found {len(mesh_devices)} devices, expected {config}."
      )
  trainer = mesh(**axes, devices=mesh_devices)
  processes = {device.process_index for device in trainer.devices.flat}
  idle = set(range(jax.process_count())) - processes
  if idle and devices is None:
    raise ValueError(
      f"mesh: {config} = {trainer.size} devices leave out process "
      f"{min(idle)} of {jax.process_count()}; expected all "
      f"{jax.device_count()}, or some of each process by mesh.trainer."
    )
  return trainer


def rollout_mesh(
  config: config_lib.MeshConfig,
  a: architecture_lib.Architecture,
  devices: Sequence[jax.Device] | None = None,
) -> jax.sharding.Mesh:
  """Returns the mesh for sampling, on the devices of one process.

  Its axes are `data` x `tensor`. Rows are divided over `data`, whose parts each
  have a copy of the policy; a copy is sharded over `tensor`. If
  `mesh.rollout_tensor` is 0, `tensor` is as small as the memory allows, because
  devices that share a copy wait for each other twice in every layer: a copy may
  take an eighth of a device, and keys and values most of the remainder. Devices
  that also train, or whose memory is unknown, share a copy with as many as
  possible.

  Args:
    config: the configured mesh; without `rollout`, the indices of devices, it
      has the process's devices of the training mesh.
    a: the architecture.
    devices: as for `training_mesh`; the process is that of the first one.

  Raises:
    ValueError: an index exceeds the number of devices, or `rollout_tensor` does
      not divide them and the kv heads.
  """
  if config.rollout:
    local = jax.local_devices() if devices is None else devices
    mesh_devices = _pick(local, config.rollout, "mesh.rollout")
  else:
    process = jax.process_index()
    if devices is not None:
      process = devices[0].process_index
    trainer = training_mesh(config, devices)
    mesh_devices = [
      device
      for device in trainer.devices.flat
      if device.process_index == process
    ]
  largest = math.gcd(len(mesh_devices), a.kv_heads)
  divisors = [n for n in range(1, largest + 1) if largest % n == 0]
  tensor = config.rollout_tensor
  if tensor and tensor not in divisors:
    raise ValueError(
      f"mesh.rollout_tensor: found {tensor} for {len(mesh_devices)} devices "
      f"that sample and {a.kv_heads} kv heads; expected a divisor of both: "
      f"{', '.join(map(str, divisors))}, or 0."
    )
  trainer_indices = config.trainer or range(config.size)
  rollout_indices = config.rollout or trainer_indices
  kind = hardware.of_kind(mesh_devices[0].device_kind)
  if not tensor and kind and not set(trainer_indices) & set(rollout_indices):
    size = _BFLOAT16_BYTES * weights.count(table.rows(a.without_lora()))
    limit = kind.memory * _WEIGHTS_SHARE
    tensor = next((n for n in divisors if size / n <= limit), largest)
  tensor = tensor or largest
  return mesh(
    data=len(mesh_devices) // tensor, tensor=tensor, devices=mesh_devices
  )


def _pick(
  devices: Sequence[jax.Device], indices: Sequence[int], name: str
) -> list[jax.Device]:
  """Returns the devices with these indices; an error names the setting."""
  if max(indices) >= len(devices):
    raise ValueError(
      f"{name}: found device {max(indices)}, but a process has {len(devices)} "
      "devices, counted from 0."
    )
  return [devices[i] for i in indices]


def rules(mesh: jax.sharding.Mesh) -> weights.Rules:
  """Returns `RULES` for a mesh.

  The devices of `expert` and `context` also have copies of weights, which are
  sharded over these axes as over fsdp.
  """

  def sharded_over(*axes: str) -> weights.Over:
    used = tuple(axis for axis in axes if mesh.shape[axis] > 1)
    return ("fsdp", *used) if used else "fsdp"

  return RULES | {
    "model": sharded_over("expert", "context"),
    "expert_model": sharded_over("context"),
  }


def shardings(
  a: architecture_lib.Architecture, mesh: jax.sharding.Mesh
) -> dict:
  """Returns the nested dict of each parameter's sharding, adapters included."""
  return weights.shardings(table.rows(a), mesh, rules(mesh))


@dataclasses.dataclass(frozen=True)
class Layout:
  """How activations are sharded, and how weights are gathered for them.

  Attributes:
    mesh: has the axes `AXES`.
    sequence_parallel: whether positions are sharded over `tensor` between
      blocks (https://arxiv.org/abs/2205.05198).
  """

  mesh: jax.sharding.Mesh
  sequence_parallel: bool = False

  @property
  def context(self) -> str | None:
    """The mesh axis that positions are sharded over, if any."""
    return self_attention.CONTEXT if self.mesh.shape["context"] > 1 else None

  @property
  def tokens(self) -> jax.P:
    """The partition of values of tokens `[B, T]`."""
    return jax.P(BATCH, self.context)

  @property
  def rules(self) -> weights.Rules:
    """`rules`, with `positions` inside of blocks and `between` them."""
    between = [self.context] if self.context else []
    between += ["tensor"] if self.sequence_parallel else []
    return {
      **rules(self.mesh),
      "positions": self.context,
      "between": tuple(between) or None,
    }

  def table(self, shape: Sequence[int]) -> jax.P:
    """Returns the partition of an embedding or a head `[V, D]`."""
    return weights.spec(shape, ("vocab", "model"), self.mesh, self.rules)

  def token_axes_without(self, model: weights.Over) -> tuple[str, ...]:
    """Returns the axes that tokens are sharded over, without those of `model`.

    Args:
      model: the mesh axes that D is sharded over.
    """
    axes = (*BATCH, self.context) if self.context else BATCH
    return tuple(a for a in axes if a not in weights.mesh_axes(model))

  def spec(self, shape: Sequence[int], *axes: str | None) -> jax.P:
    """Returns the partition of an activation whose first axis is the batch.

    Args:
      shape: of the activation.
      *axes: for each further axis a logical axis of `rules`, or None. An axis
        whose size the mesh axis does not divide is replicated.
    """
    further = weights.spec(shape[1:], axes, self.mesh, self.rules)
    return jax.P(BATCH, *further)

  def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains the sharding of an activation to `spec`."""
    spec = self.spec(x.shape, *axes)
    return jax.lax.with_sharding_constraint(
      x, jax.sharding.NamedSharding(self.mesh, spec)
    )

  def gather(self, x: jax.Array, row: weights.Weight) -> jax.Array:
    """Gathers one layer of a row over `model`; its gradient is scattered."""

    def layer_sharding(rules: weights.Rules) -> jax.sharding.NamedSharding:
      spec = weights.spec(row.shape[1:], row.axes[1:], self.mesh, rules)
      return jax.sharding.NamedSharding(self.mesh, spec)

    rules = self.rules
    sharded = layer_sharding(rules)
    gathered = layer_sharding({**rules, **dict.fromkeys(_GATHERED_AXES)})
    if sharded == gathered:
      return x
    x = _gather(x, sharded, gathered)
    return ad_checkpoint.checkpoint_name(x, _GATHERED)

  def over_heads(
    self, attend: Callable, a: architecture_lib.Architecture
  ) -> Callable:
    """Returns `attend` of self-attention with heads sharded over `tensor`.

    If there are more devices than kv heads, each head is copied to the devices
    that share it.
    """
    tensor = self.mesh.shape["tensor"]
    copies = max(1, tensor // a.kv_heads)

    def sharded(q, k, v, segment_ids, window, sinks):
      k = jnp.repeat(k, copies, axis=2)
      v = jnp.repeat(v, copies, axis=2)
      heads = jax.P(BATCH, self.context, "tensor", None)
      return self.shard_map(
        attend,
        in_specs=(heads, heads, heads, self.tokens, jax.P(), jax.P("tensor")),
        out_specs=heads,
      )(q, k, v, segment_ids, window, sinks)

    return sharded

  def shard_map(self, f: Callable, in_specs, out_specs) -> Callable:
    """Returns `f` applied to each device's shard; `f` does its collectives.

    Args:
      f: a function of arrays.
      in_specs: the partition of each argument.
      out_specs: the partition of each result.
    """
    return jax.shard_map(
      f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def validate(a: architecture_lib.Architecture, mesh: jax.sharding.Mesh) -> None:
  """Refuses a mesh that does not fit an architecture.

  Raises:
    ValueError: `tensor` does not divide the heads or the feed-forward width, or
      is neither a divisor nor a multiple of the kv heads; or `expert` does not
      divide the experts.
  """
  if (a.experts or 1) % mesh.shape["expert"]:
    expected = f"a divisor of the policy's experts, {a.experts}"
    if not a.experts:
      expected = "1: the policy has no experts"
    raise ValueError(
      f"mesh.expert: found {mesh.shape['expert']}, expected {expected}."
    )
  tensor = mesh.shape["tensor"]
  for name in ("heads", "mlp_dim"):
    if getattr(a, name) % tensor:
      raise ValueError(
        f"mesh.tensor: found {tensor}, expected a divisor of the policy's "
        f"{name}, {getattr(a, name)}."
      )
  if a.kv_heads % tensor and tensor % a.kv_heads:
    raise ValueError(
      f"mesh.tensor: found {tensor}, expected a divisor or a multiple of the "
      f"policy's kv_heads, {a.kv_heads}."
    )


# The cotangent of a sharding constraint gets the same constraint, which here is
# the gathered one. This custom derivative scatters the gradient instead.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x, sharded, gathered):
  """Changes a sharding from `sharded` to `gathered`, and gradients back."""
  del sharded
  return jax.lax.with_sharding_constraint(x, gathered)


def _gather_forward(x, sharded, gathered):
  return _gather(x, sharded, gathered), None


def _gather_backward(sharded, gathered, residuals, g):
  del gathered, residuals
  return (jax.lax.with_sharding_constraint(g, sharded),)


_gather.defvjp(_gather_forward, _gather_backward)
