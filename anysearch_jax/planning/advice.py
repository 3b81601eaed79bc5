"""Suggests changes that would make a plan fit, by estimates without compiling.

A change scales kinds of bytes: state is inversely proportional to the devices
that shard it, activations are proportional to the tokens of a micro-batch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from anysearch_jax import config as config_lib
from anysearch_jax.planning import plan as plan_lib

_TRAINED = ("masters", "critic", "moments", "gradients")
# Kinds that leave the device while it samples, least first.
_OFFLOADS = {
  "moments": ("moments",),
  "state": ("moments", "masters", "critic"),
}
_SEARCH = "--search compiles other micro-batches, recomputation and meshes."


class Change(NamedTuple):
  """A change of a setting, and its factors on the kinds of a program's bytes.

  Of several changes with the same `value`, only the first sufficient one is
  suggested.
  """

  value: str
  words: str
  factors: Callable[[plan_lib.Part], Mapping[str, float]]


def of(
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
