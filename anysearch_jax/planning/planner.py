"""Makes plans by compiling the programs of a configuration for a target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax.host import captured_stderr, hardware
from anysearch_jax.planning import (
  advice,
  compilation,
  episodes,
  flops,
  memory,
  plan,
  programs,
  roofline,
  targets,
  whole_step,
)
from anysearch_jax.planning import program as program_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import lora, sharding, table
from anysearch_jax.policy import parameters as weights

ASSUMPTIONS = roofline.Assumptions()
_ATTENTION = (
  "Rows are packed: the last episode of a row is shorter. Of attention's "
  f"scores, cuDNN computes tiles of {flops.TILE} x {flops.TILE} and splash "
  "blocks of up to 512 x 512; both skip those after a query and those of other "
  "episodes. XLA computes about 5/8 of all."
)


def make(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  target: targets.Target,
  *,
  micro_batches: int | None = None,
  expected: episodes.Episodes | None = None,
  searched: bool = False,
  log: Callable[[str], None] = lambda line: None,
) -> plan.Plan:
  """Compiles the programs of a configuration for a target.

  Args:
    config: its training mesh is on the target's devices. If its rollout devices
      have larger indices, sampling has another target of the same kind.
    a: the policy's architecture, without adapters.
    target: the hardware to plan for.
    micro_batches: of an optimizer step; by default as many as the episodes
      fill.
    expected: the episodes; by default those of `episodes.of`.
    searched: whether `search.best` found the configuration, or that none fits.
    log: called with a sentence before each program is compiled.

  Raises:
    ValueError: the mesh does not suit the target or the policy.
    ModuleNotFoundError: a compiler is not installed.
  """
  expected = expected or episodes.of(config)
  micro_batches = micro_batches or expected.micro_batches(config.batch)
  found = programs.programs(
    config,
    a,
    devices=devices(config.mesh, target),
    micro_batches=micro_batches,
    segment=expected.tokens,
  )
  parts = []
  for program in found:
    log(f"compiling the {program.name} for {target}")
    parts.append(measure(program, found, target))
  parts.append(_hand_over(config, found, target))
  step = whole_step.predict(
    parts,
    config=config,
    a=a,
    expected=expected,
    target=target,
    assumptions=ASSUMPTIONS,
  )
  a = lora.attach(a, config.lora)
  made = plan.Plan(
    name=config.name,
    policy=config.policy,
    target=target,
    mesh={axis: getattr(config.mesh, axis) for axis in sharding.AXES},
    own_rollout=bool(config.mesh.rollout),
    parameters=weights.count(table.rows(a)),
    trained=weights.count(table.trainable_rows(a)),
    parts=tuple(parts),
    assumptions=(
      f"An optimizer step fills {micro_batches} micro-batches with "
      f"{expected.trajectories} episodes of {expected.tokens:,} tokens.",
      _ATTENTION,
      *_memory_sentences(target.hardware),
      *roofline.sentences(target, ASSUMPTIONS),
      *whole_step.sentences(config, expected),
    ),
    step=step,
  )
  return dataclasses.replace(
    made,
    advice=tuple(
      advice.of(
        made,
        batch=config.batch,
        engine=config.engine,
        mesh=config.mesh,
        pipeline=config.pipeline,
        lora=config.lora,
        kl_reward=bool(config.critic.reward_kl),
        kl_loss=bool(config.objective.kl_coefficient),
        searched=searched,
      )
    ),
  )


def devices(
  mesh: config_lib.MeshConfig, target: targets.Target
) -> list[jax.Device]:
  """Returns the compile-only devices that the indices of a mesh refer to.

  Raises:
    ValueError: training needs more devices than the target has, or the rollout
      devices are not all in one copy of the target.
  """
  wanted = [mesh.data * mesh.fsdp * mesh.tensor, *(i + 1 for i in mesh.trainer)]
  if max(wanted) > target.count:
    raise ValueError(
      f"The mesh of data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor} "
      f"(mesh.trainer {mesh.trainer}) needs more devices than {target} has; "
      "plan for a larger target, or another mesh."
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


def measure(
  program: program_lib.Program,
  together: Sequence[program_lib.Program],
  target: targets.Target,
) -> plan.Part:
  """Compiles and measures a program; `together` are all programs of the run."""
  compiled = compilation.compile(program, target)
  others = [p for p in together if p is not program]
  count = len(memory.devices(program))
  kinds = memory.kinds(program)
  reads = program.args if program.reads is None else program.reads
  read = program.trips * memory.on_device(reads)
  predicted = None
  if compiled.traffic is not None:
    predicted = roofline.predict(
      target,
      flops=compiled.flops / count,
      read=read,
      traffic=compiled.traffic,
      assumptions=ASSUMPTIONS,
    )
  return plan.Part(
    name=program.name,
    devices=count,
    tokens=program.tokens,
    read=read,
    kinds=kinds,
    gradients=memory.gradients(kinds),
    held=memory.held(program, others),
    offloaded=memory.offloaded(program, others),
    compiled=compiled,
    predicted=predicted,
  )


def _hand_over(
  config: config_lib.ExperimentConfig,
  found: Sequence[program_lib.Program],
  target: targets.Target,
) -> plan.Part:
  """Counts the hand-over of new weights to the engine by its arrays.

  It is a program for each layer, so there is none to compile for the whole.
  """
  train = next(p for p in found if "moments" in p.kinds)
  decode = found[-1]
  cast, moved = memory.hand_over(
    train,
    decode,
    itemsize=jnp.dtype(config.compute_dtype).itemsize,
    adapters=bool(config.lora.rank),
  )
  program = program_lib.Program(
    "hand-over",
    None,
    (),
    {},
    tokens=0,
    trips=1,
    kinds={"engine weights": decode.kinds["engine weights"]},
    # Still that of training: the state is on the device.
    freed=train.freed,
  )
  kinds = memory.kinds(program)
  weights_size = kinds["engine weights"]
  return plan.Part(
    name=program.name,
    devices=len(memory.devices(program)),
    tokens=0,
    read=moved,
    kinds=kinds,
    gradients=0,
    held=memory.held(program, found),
    compiled=compilation.Compilation(
      traffic={},
      arguments=weights_size,
      # The engine drops its old weights before it makes new ones.
      outputs=0,
      temporary=cast,
      peak=cast + weights_size,
      refused=False,
    ),
    predicted=roofline.predict(
      target, flops=0, read=moved, traffic={}, assumptions=ASSUMPTIONS
    ),
  )


def _memory_sentences(found: hardware.Hardware) -> list[str]:
  size = plan.gib(found.memory)
  if not isinstance(found, hardware.Gpu):
    return [f"A program may fill {size} GiB, its compiler's limit."]
  share = found.head_room
  return [
    f"Programs may fill {share} of {size} GiB: the rest is for the CUDA "
    "context, NCCL and libraries' workspaces, which the compiler does not "
    "count. JAX by itself takes 0.75: run with "
    f"XLA_PYTHON_CLIENT_MEM_FRACTION={share}."
  ]
