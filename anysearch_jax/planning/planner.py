"""Makes plans by compiling the programs of a configuration for a target."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax.host import captured_stderr, hardware
from anysearch_jax.planning import (
  compilation,
  flops,
  programs,
  targets,
  whole_step,
)
from anysearch_jax.planning import plan as plan_lib
from anysearch_jax.planning import program as program_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import lora, sharding, table
from anysearch_jax.policy import parameters as weights

_TRAINED = ("masters", "critic", "moments", "gradients")
# Kinds that leave the device while it samples, least first.
_OFFLOADS = {
  "moments": ("moments",),
  "state": ("moments", "masters", "critic"),
}
_SEARCH = "--search compiles other micro-batches, recomputation and meshes."
ASSUMPTIONS = targets.Assumptions()
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
  expected: whole_step.Episodes | None = None,
  searched: bool = False,
  log: Callable[[str], None] = lambda line: None,
) -> plan_lib.Plan:
  """Compiles the programs of a configuration for a target.

  Args:
    config: its training mesh is on the target's devices. If its rollout devices
      have larger indices, sampling has another target of the same kind.
    a: the policy's architecture, without adapters.
    target: the hardware to plan for.
    micro_batches: of an optimizer step; by default as many as the episodes
      fill.
    expected: the episodes; by default those of `whole_step.episodes_of`.
    searched: whether `search.best` found the configuration, or that none fits.
    log: called with a sentence before each program is compiled.

  Raises:
    ValueError: the mesh does not suit the target or the policy.
    ModuleNotFoundError: a compiler is not installed.
  """
  expected = expected or whole_step.episodes_of(config)
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
  made = plan_lib.Plan(
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
      *targets.sentences(target, ASSUMPTIONS),
      *whole_step.sentences(config, expected),
    ),
    step=step,
  )
  return dataclasses.replace(
    made,
    advice=tuple(
      advise(
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
) -> plan_lib.Part:
  """Compiles and measures a program; `together` are all programs of the run."""
  compiled = compilation.compile(program, target)
  others = [p for p in together if p is not program]
  count = len(compilation.devices(program))
  kinds = compilation.kinds(program)
  reads = program.args if program.reads is None else program.reads
  read = program.trips * compilation.on_device(reads)
  predicted = None
  if compiled.traffic is not None:
    predicted = targets.predict(
      target,
      flops=compiled.flops / count,
      read=read,
      traffic=compiled.traffic,
      assumptions=ASSUMPTIONS,
    )
  return plan_lib.Part(
    name=program.name,
    devices=count,
    tokens=program.tokens,
    read=read,
    kinds=kinds,
    gradients=compilation.gradients(kinds),
    held=compilation.held(program, others),
    offloaded=compilation.offloaded(program, others),
    compiled=compiled,
    predicted=predicted,
  )


def _hand_over(
  config: config_lib.ExperimentConfig,
  found: Sequence[program_lib.Program],
  target: targets.Target,
) -> plan_lib.Part:
  """Counts the hand-over of new weights to the engine by its arrays.

  It is a program for each layer, so there is none to compile for the whole.
  """
  train = next(p for p in found if "moments" in p.kinds)
  decode = found[-1]
  cast, moved = compilation.hand_over(
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
  kinds = compilation.kinds(program)
  weights_size = kinds["engine weights"]
  return plan_lib.Part(
    name=program.name,
    devices=len(compilation.devices(program)),
    tokens=0,
    read=moved,
    kinds=kinds,
    gradients=0,
    held=compilation.held(program, found),
    compiled=compilation.Compilation(
      traffic={},
      arguments=weights_size,
      # The engine drops its old weights before it makes new ones.
      outputs=0,
      temporary=cast,
      peak=cast + weights_size,
      refused=False,
    ),
    predicted=targets.predict(
      target, flops=0, read=moved, traffic={}, assumptions=ASSUMPTIONS
    ),
  )


def _memory_sentences(found: hardware.Hardware) -> list[str]:
  size = plan_lib.gib(found.memory)
  if not isinstance(found, hardware.Gpu):
    return [f"A program may fill {size} GiB, its compiler's limit."]
  share = found.head_room
  return [
    f"Programs may fill {share} of {size} GiB: the rest is for the CUDA "
    "context, NCCL and libraries' workspaces, which the compiler does not "
    "count. JAX by itself takes 0.75: run with "
    f"XLA_PYTHON_CLIENT_MEM_FRACTION={share}."
  ]


class Change(NamedTuple):
  """A change of a setting, and its factors on the kinds of a program's bytes.

  Of several changes with the same `value`, only the first sufficient one is
  suggested.
  """

  value: str
  words: str
  factors: Callable[[plan_lib.Part], Mapping[str, float]]


def advise(
  plan: plan_lib.Plan,
  *,
  batch: config_lib.BatchConfig,
  engine: config_lib.EngineConfig,
  mesh: config_lib.MeshConfig,
  pipeline: config_lib.PipelineConfig,
  lora: config_lib.LoraConfig,
  kl_reward: bool,
  kl_loss: bool,
  searched: bool = False,
) -> list[str]:
  """Returns suggestions as sentences; none if the plan fits.

  They are single changes that suffice or, if there is none, pairs of changes.

  Args:
    plan: the plan that does not fit.
    batch: the planned configuration's; so are the next four.
    engine: see `batch`.
    mesh: see `batch`.
    pipeline: see `batch`.
    lora: see `batch`.
    kl_reward: whether rewards have a KL term.
    kl_loss: whether the loss has a KL term.
    searched: whether the configuration is the result of a search.
  """
  if plan.fits:
    return []
  changes = [
    *_turns(plan, engine, pipeline),
    *_own_devices(plan),
    *_smaller_cache(plan, engine),
    *_fewer_tokens(plan, batch),
    *_more_recomputation(batch),
    *_smaller_state(lora, kl_reward=kl_reward, kl_loss=kl_loss),
    *_more_devices(plan, mesh),
  ]
  for together in (1, 2):
    found: dict[tuple[str, ...], str] = {}
    for some in itertools.combinations(changes, together):
      values = tuple(change.value for change in some)
      size = _most(plan, some)
      if len(set(values)) == together and size <= plan.target.capacity:
        found.setdefault(
          values,
          f"{' and '.join(change.words for change in some)}: about "
          f"{plan_lib.gib(size)} GiB a device.",
        )
    if found:
      # A search varies the train step only.
      useful = not searched and any(map(_trains, plan.too_large))
      return [*found.values(), *([_SEARCH] if useful else [])]
  worst = max(plan.parts, key=lambda part: part.total)
  kind, size = max(_bytes(worst).items(), key=lambda item: item[1])
  return [
    "No two changes that the planner knows are enough. The largest kind is "
    f"{kind}, {plan_lib.gib(size)} GiB a device, in the {worst.name}."
  ]


def _most(plan: plan_lib.Plan, changes: tuple[Change, ...]) -> float:
  """Returns the bytes of the largest program after some changes."""
  return max(_after(part, changes) for part in plan.parts)


def _after(part: plan_lib.Part, changes: tuple[Change, ...]) -> float:
  kinds = _bytes(part)
  for change in changes:
    factors = change.factors(part)
    kinds = {kind: factors.get(kind, 1) * n for kind, n in kinds.items()}
  # Bytes that belong to no kind do not change.
  return part.total - sum(_bytes(part).values()) + sum(kinds.values())


def _bytes(part: plan_lib.Part) -> dict[str, float]:
  return {
    **part.kinds,
    **part.held,
    "gradients": part.gradients,
    "activations": part.activations,
  }


def _own_devices(plan: plan_lib.Plan) -> Iterator[Change]:
  """Yields sampling on devices of its own, if that frees anything."""
  if any(part.held for part in plan.parts) and not plan.own_rollout:
    yield Change(
      "rollout",
      "devices of its own for sampling (mesh.rollout)",
      lambda part: {
        kind: 0.0 for kind in part.held if _samples(kind) != _samples_in(part)
      },
    )


def _turns(
  plan: plan_lib.Plan,
  engine: config_lib.EngineConfig,
  pipeline: config_lib.PipelineConfig,
) -> Iterator[Change]:
  """Yields what devices that sample and train in turns need not hold."""
  if plan.own_rollout or pipeline.async_level or engine.kind != "jax":
    return
  if not engine.free_kv_while_training:
    yield Change(
      "free",
      "no KV cache while training (engine.free_kv_while_training)",
      lambda part: {} if _samples_in(part) else {"KV cache": 0.0},
    )
  further = list(_OFFLOADS)
  if pipeline.offload in _OFFLOADS:
    further = further[further.index(pipeline.offload) + 1 :]
  for name in further:
    yield Change(
      "offload",
      f"training state in host memory while sampling (pipeline.offload={name})",
      functools.partial(_offloaded, _OFFLOADS[name]),
    )


def _more_recomputation(batch: config_lib.BatchConfig) -> Iterator[Change]:
  if batch.remat != "full":
    yield Change(
      "remat", "batch.remat=full, at best", functools.partial(_activations, 0.0)
    )


def _smaller_state(
  lora: config_lib.LoraConfig, *, kl_reward: bool, kl_loss: bool
) -> Iterator[Change]:
  """Yields training without a reference, and with adapters."""
  if lora.rank:
    return
  if kl_loss and not kl_reward:
    yield Change(
      "reference",
      "objective.kl_coefficient=0 (no reference)",
      lambda part: {"reference": 0.0},
    )
  # A frozen base in bfloat16 takes half the bytes of float32 masters. With a
  # KL term it replaces the reference, which is in memory already.
  base = 0.0 if kl_loss or kl_reward else 0.5
  yield Change(
    "adapters",
    "adapters (lora.rank=64, lora.base_dtype=bfloat16)",
    lambda part: dict.fromkeys(_TRAINED, 0.0) | {"masters": base},
  )


def _more_devices(
  plan: plan_lib.Plan, mesh: config_lib.MeshConfig
) -> Iterator[Change]:
  named = " and more of them in mesh.trainer" if mesh.trainer else ""
  for times in (2, 4, 8):
    yield Change(
      "devices",
      f"{times} times the devices that train "
      f"(mesh.fsdp={times * plan.mesh['fsdp']}{named})",
      functools.partial(_cut, times),
    )


def _smaller_cache(
  plan: plan_lib.Plan, engine: config_lib.EngineConfig
) -> Iterator[Change]:
  """Yields the largest KV cache that fits, if it holds one context."""
  over = max(part.total for part in plan.parts) - plan.target.capacity
  most = max(_bytes(part).get("KV cache", 0) for part in plan.parts)
  tokens = engine.kv_tokens or engine.slots * engine.max_context
  fewer = int(tokens * (1 - over / most)) if most else 0
  fewer -= fewer % engine.page
  if fewer >= engine.max_context:
    yield Change(
      "kv_tokens",
      f"engine.kv_tokens={fewer}",
      lambda part: {"KV cache": fewer / tokens},
    )


def _fewer_tokens(
  plan: plan_lib.Plan, batch: config_lib.BatchConfig
) -> Iterator[Change]:
  """Yields halvings of the micro-batch, down to one row for each shard."""
  least = plan.mesh["data"] * plan.mesh["fsdp"] * batch.row_lengths[-1]
  tokens = batch.micro_batch_tokens // 2
  while tokens >= least:
    share = tokens / batch.micro_batch_tokens
    yield Change(
      "tokens",
      f"batch.micro_batch_tokens={tokens}",
      functools.partial(_activations, share),
    )
    tokens //= 2


def _activations(share: float, part: plan_lib.Part) -> dict[str, float]:
  """Returns the factor of a train step's activations; other parts keep all."""
  return {"activations": share} if _trains(part) else {}


def _offloaded(kinds: tuple[str, ...], part: plan_lib.Part) -> dict[str, float]:
  """Returns the factors of moving kinds of state while a part samples."""
  sampled = "KV cache" in part.kinds
  return dict.fromkeys(kinds, 0.0) if sampled else {}


def _cut(times: int, part: plan_lib.Part) -> dict[str, float]:
  """Returns the factors of `times` as many devices for training.

  The KV cache does not shrink: there may be no more heads to shard.
  """
  kinds = [*_TRAINED, "reference"]
  kinds += [] if _samples_in(part) else ["activations", "batch"]
  return dict.fromkeys(kinds, 1 / times)


def _trains(part: plan_lib.Part) -> bool:
  return "moments" in part.kinds


def _samples(kind: str) -> bool:
  return kind in ("engine weights", "KV cache")


def _samples_in(part: plan_lib.Part) -> bool:
  return any(map(_samples, part.kinds))
