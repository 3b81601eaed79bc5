"""Makes plans by compiling the programs of a configuration for a target."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax.host import captured_stderr, hardware
from anysearch_jax.planning import compilation, programs, targets, whole_step
from anysearch_jax.planning import plan as plan_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import lora, table
from anysearch_jax.policy import parameters as weights


def make(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  target: targets.Target,
  *,
  expected: whole_step.Episodes | None = None,
  log: Callable[[str], None] = lambda line: None,
) -> plan_lib.Plan:
  """Compiles the programs of a configuration for a target.

  Args:
    config: its training mesh is on the target's devices. If its rollout devices
      have larger indices, sampling has another target of the same kind.
    a: the policy's architecture, without adapters.
    target: the hardware to plan for.
    expected: the episodes; by default those of `whole_step.episodes_of`.
    log: called with a sentence before each program is compiled.

  Raises:
    ValueError: the mesh does not suit the target or the policy.
    ModuleNotFoundError: a compiler is not installed.
  """
  expected = expected or whole_step.episodes_of(config)
  mesh = config.mesh
  filled = expected.micro_batches(config.batch, mesh.rows)
  together = programs.programs(config, a, devices=devices(mesh, target))
  parts = []
  for program in together:
    log(f"compiling the {program.name} for {target}")
    parts.append(compilation.measure(program, together, target))
  decode = parts[-1]
  parts.append(
    compilation.hand_over(
      together, itemsize=jnp.dtype(config.compute_dtype).itemsize
    )
  )
  step = whole_step.predict(config, a, expected, decode=decode, target=target)
  adapted = lora.attach(a, config.lora)
  return plan_lib.Plan(
    config=config,
    target=target,
    parameters=weights.count(table.rows(adapted)),
    trained=weights.count(table.trainable_rows(adapted)),
    parts=tuple(parts),
    assumptions=(
      f"An optimizer step packs {expected.trajectories} episodes of "
      f"{expected.tokens:,} tokens on average, spread by "
      f"{whole_step.SPREAD:.0%}, into {filled} micro-batches.",
      _memory_sentence(target.hardware),
      *targets.sentences(target),
      *whole_step.sentences(config, expected),
      *_servers_sentence(config, decode, target),
      *sent_sentence(config, a),
    ),
    step=step,
  )


def devices(
  mesh: config_lib.MeshConfig, target: targets.Target
) -> list[jax.Device]:
  """Returns the compile-only devices that the indices of a mesh refer to.

  Raises:
    ValueError: training needs more devices than the target has, or the rollout
      devices are not all in one copy of the target.
  """
  wanted = [mesh.size, *(i + 1 for i in mesh.trainer)]
  if max(wanted) > target.count:
    raise ValueError(
      f"The mesh of {mesh} (mesh.trainer {mesh.trainer}) needs more devices "
      f"than {target} has; plan for a larger target, or another mesh."
    )
  copies = {index // target.count for index in mesh.rollout} or {0}
  if len(copies) > 1:
    raise ValueError(
      f"mesh.rollout {mesh.rollout} are not all on one {target}: plan for a "
      "target that has all of them, or let sampling share those of training "
      "(mesh.rollout=())."
    )
  with captured_stderr.standard_error():
    return [
      device
      for _ in range(max(copies) + 1)
      for device in targets.devices(target)
    ]


def _memory_sentence(found: hardware.Hardware) -> str:
  size, share = plan_lib.gib(found.memory), found.head_room
  if not isinstance(found, hardware.Gpu):
    return f"A program may fill {size} GiB, its compiler's limit."
  return (
    f"Programs may fill {share} of {size} GiB: the rest is for the CUDA "
    "context, NCCL and libraries' workspaces, which the compiler does not "
    "count. JAX by itself takes 0.75: run with "
    f"XLA_PYTHON_CLIENT_MEM_FRACTION={share}."
  )


def _servers_sentence(
  config: config_lib.ExperimentConfig,
  decode: compilation.Part,
  target: targets.Target,
) -> list[str]:
  """Returns what SGLang servers on the training devices may take, if any."""
  if not config.servers_share:
    return []
  held, size = sum(decode.held.values()), decode.kinds["engine weights"]
  share = max(0.0, (target.capacity - held) / target.hardware.memory)
  return [
    "SGLang servers have these devices while they sample (sglang.colocated), "
    f"beside {plan_lib.gib(held)} GiB of the trainer: weights "
    f"({plan_lib.gib(size)} GiB), KV cache and CUDA graphs may take "
    f"{math.floor(100 * share) / 100} of a device, --memory somewhat less. "
    "While it trains they hold a CUDA context. Prefill and decode are those of "
    "the in-process engine, whose settings the servers do not have."
  ]


def sent_sentence(
  config: config_lib.ExperimentConfig, a: architecture_lib.Architecture
) -> list[str]:
  """Returns the bytes that SGLang servers get of each version, if any."""
  if config.engine.kind != "sglang":
    return []
  size = jnp.dtype(config.compute_dtype).itemsize
  whole = f"{size * weights.count(table.base_rows(a)) / 1e9:.1f} GB"
  if config.lora.rank:
    adapted = table.adapter_rows(lora.attach(a, config.lora))
    return [
      f"SGLang servers get {size * weights.count(adapted) / 1e6:.0f} MB of "
      f"adapters a version, and once {whole} of the base."
    ]
  delta = " at most, as deltas (sglang.deltas)" if config.sglang.deltas else ""
  return [f"SGLang servers get {whole} a version{delta}."]
