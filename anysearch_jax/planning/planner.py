"""Makes plans, suggests what would fit, and searches for the fastest that does.

All of it by compiling the programs of a configuration for a target.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
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
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import lora, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.rollout.jax_engine import kv_memory

_TRAINED = ("masters", "critic", "moments", "gradients")
_SAMPLING = ("engine weights", "KV cache")
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
  found = programs.programs(
    config,
    a,
    devices=devices(mesh, target),
    micro_batches=filled,
    segment=expected.segment(config.batch.row_lengths[-1]),
    scored=expected.generated / expected.tokens,
  )
  parts = []
  for program in found:
    log(f"compiling the {program.name} for {target}")
    parts.append(compilation.measure(program, found, target))
  parts.append(
    compilation.hand_over(
      found,
      target,
      itemsize=jnp.dtype(config.compute_dtype).itemsize,
      adapters=bool(config.lora.rank),
    )
  )
  step = whole_step.predict(
    parts, config=config, a=a, expected=expected, target=target
  )
  a = lora.attach(a, config.lora)
  held = kv_memory.tokens(config.engine, a)
  plan = plan_lib.Plan(
    config=config,
    target=target,
    parameters=weights.count(table.rows(a)),
    trained=weights.count(table.trainable_rows(a)),
    parts=tuple(parts),
    assumptions=(
      f"An optimizer step packs {expected.trajectories} episodes of "
      f"{expected.tokens:,} tokens on average, spread by "
      f"{whole_step.SPREAD:.0%}, into {filled} micro-batches.",
      _ATTENTION,
      _memory_sentence(target.hardware),
      *targets.sentences(target),
      *whole_step.sentences(config, expected),
      *_servers_sentence(config, parts, target),
      *sent_sentence(config, a),
    ),
    step=step,
    sized=held[0] / sum(held),
  )
  return dataclasses.replace(plan, advice=advise(plan))


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
  parts: list[compilation.Part],
  target: targets.Target,
) -> list[str]:
  """Returns what SGLang servers on the training devices may take, if any."""
  if not config.servers_share:
    return []
  decode = next(part for part in parts if part.name == "decode")
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


class Change(NamedTuple):
  """A change of a setting, and its factors on the kinds of a program's bytes.

  Of several changes with the same `value`, only the first sufficient one is
  suggested.
  """

  value: str
  words: str
  factors: Callable[[compilation.Part], Mapping[str, float]]


def advise(plan: plan_lib.Plan) -> tuple[str, ...]:
  """Returns suggestions as sentences; none if the plan fits.

  They are single changes that suffice or, if there is none, pairs of changes.
  """
  if plan.fits:
    return ()
  changes = list(_changes(plan))
  for together in (1, 2):
    found: dict[tuple[str, ...], str] = {}
    for some in itertools.combinations(changes, together):
      values = tuple(change.value for change in some)
      size = max(_after(part, some) for part in plan.parts)
      if len(set(values)) == together and size <= plan.target.capacity:
        found.setdefault(
          values,
          f"{' and '.join(change.words for change in some)}: about "
          f"{plan_lib.gib(size)} GiB a device.",
        )
    if found:
      return tuple(found.values())
  kinds = _bytes(plan.largest)
  kind = max(kinds, key=lambda kind: kinds[kind])
  return (
    "No two changes that the planner knows are enough. The largest kind is "
    f"{kind}, {plan_lib.gib(kinds[kind])} GiB a device, in the "
    f"{plan.largest.name}.",
  )


def _bytes(part: compilation.Part) -> dict[str, int]:
  return {
    **part.kinds,
    **part.held,
    "gradients": part.gradients,
    "activations": part.activations,
  }


def _after(part: compilation.Part, changes: tuple[Change, ...]) -> float:
  """Returns a part's bytes after some changes."""
  kinds: dict[str, float] = {**_bytes(part)}
  for change in changes:
    factors = change.factors(part)
    kinds = {kind: factors.get(kind, 1) * n for kind, n in kinds.items()}
  # Bytes that belong to no kind do not change.
  return part.total - sum(_bytes(part).values()) + sum(kinds.values())


def _changes(plan: plan_lib.Plan) -> Iterator[Change]:
  """Yields the changes that could make a plan fit, the least first."""
  config, mesh = plan.config, plan.mesh
  batch, engine, pipeline = config.batch, config.engine, config.pipeline

  def samples(part: compilation.Part) -> bool:
    return not part.kinds.keys().isdisjoint(_SAMPLING)

  def activations(share: float) -> Callable[..., dict[str, float]]:
    return lambda part: {"activations": share} if part.trains else {}

  def sampling(factors: dict, part: compilation.Part) -> dict[str, float]:
    return factors if "KV cache" in part.kinds else {}

  if not (config.mesh.rollout or pipeline.async_level or engine.kind != "jax"):
    # Devices that sample and train in turns.
    if not engine.free_kv_while_training:
      yield Change(
        "free",
        "no KV cache while training (engine.free_kv_while_training)",
        lambda part: {} if samples(part) else {"KV cache": 0.0},
      )
    offloads = list(programs.OFFLOADED)  # The least first.
    for name in offloads[offloads.index(pipeline.offload) + 1 :]:
      away = dict.fromkeys(programs.OFFLOADED[name], 0.0)
      yield Change(
        "offload",
        "training state in host memory while sampling "
        f"(pipeline.offload={name})",
        functools.partial(sampling, away),
      )
  if any(part.held for part in plan.parts) and not config.mesh.rollout:
    yield Change(
      "rollout",
      "devices of its own for sampling (mesh.rollout)",
      lambda part: {
        kind: 0.0 for kind in part.held if (kind in _SAMPLING) != samples(part)
      },
    )
  # The largest KV cache that fits, if it holds one context.
  over = plan.largest.total - plan.target.capacity
  cache = max(_bytes(part).get("KV cache", 0) for part in plan.parts)
  most = plan.sized * cache
  tokens = engine.kv_tokens or engine.slots * engine.max_context
  fewer = int(tokens * (1 - over / most)) if most else 0
  fewer -= fewer % engine.page
  if fewer >= engine.max_context:
    yield Change(
      "kv_tokens",
      f"engine.kv_tokens={fewer}",
      lambda part: {"KV cache": 1 - plan.sized * (1 - fewer / tokens)},
    )
  # Down to one row for each shard.
  size = batch.micro_batch_tokens // 2
  while size >= config.mesh.rows * batch.row_lengths[-1]:
    yield Change(
      "tokens",
      f"batch.micro_batch_tokens={size}",
      activations(size / batch.micro_batch_tokens),
    )
    size //= 2
  if batch.remat != "full":
    yield Change("remat", "batch.remat=full, at best", activations(0.0))
  if not config.lora.rank:
    reward, loss = config.critic.reward_kl, config.objective.kl_coefficient
    if loss and not reward:
      yield Change(
        "reference",
        "objective.kl_coefficient=0 (no reference)",
        lambda part: {"reference": 0.0},
      )
    # A frozen base in bfloat16 takes half the bytes of float32 masters. With a
    # KL term it replaces the reference, which is in memory already.
    base = 0.0 if loss or reward else 0.5
    yield Change(
      "adapters",
      "adapters (lora.rank=64, lora.base_dtype=bfloat16; with experts also "
      "lora.targets=q,k,v,o)",
      lambda part: dict.fromkeys(_TRAINED, 0.0) | {"masters": base},
    )

  def divided(times: int, part: compilation.Part) -> dict[str, float]:
    # The KV cache does not shrink: there may be no more heads to shard.
    kinds = [*_TRAINED, "reference"]
    kinds += [] if samples(part) else ["activations", "batch"]
    return dict.fromkeys(kinds, 1 / times)

  named = " and more of them in mesh.trainer" if config.mesh.trainer else ""
  for times in (2, 4, 8):
    yield Change(
      "devices",
      f"{times} times the devices that train "
      f"(mesh.fsdp={times * mesh['fsdp']}{named})",
      functools.partial(divided, times),
    )
