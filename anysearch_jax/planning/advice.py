"""Suggests changes that would make a plan fit, by estimates without compiling.

A change scales kinds of bytes: state is inversely proportional to the devices
that shard it, activations are proportional to the tokens of a micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from anysearch_jax import config as config_lib
from anysearch_jax.planning import plan as plan_lib

_TRAINED = ("masters", "critic", "moments", "gradients")
_SEARCH = "--search compiles other micro-batches, recomputation and meshes."


class Change(NamedTuple):
  """A change of a setting, and its factors on the kinds of a program's bytes.

  Of several changes with the same `value`, only the first sufficient one is
  suggested.
  """

  value: str
  words: str
  factors: Callable[[plan_lib.Part], Mapping[str, float]]


def of(plan: plan_lib.Plan, config: config_lib.ExperimentConfig) -> list[str]:
  """Returns suggestions as sentences; none if the plan fits.

  They are single changes that suffice or, if there is none, pairs of changes.
  """
  if plan.fits:
    return []
  changes = list(_changes(plan, config))
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
      return [*found.values(), _SEARCH]
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


def _changes(
  plan: plan_lib.Plan, config: config_lib.ExperimentConfig
) -> Iterator[Change]:
  """Yields possible changes, the cheapest first."""
  if any(part.held for part in plan.parts) and not plan.own_rollout:
    yield Change(
      "rollout",
      "devices of its own for sampling (mesh.rollout)",
      lambda part: {
        kind: 0.0 for kind in part.held if _samples(kind) != _samples_in(part)
      },
    )
  yield from _smaller_cache(plan, config)
  yield from _fewer_tokens(plan, config)
  if config.batch.remat != "full":
    yield Change(
      "remat",
      "batch.remat=full, at best",
      lambda part: {"activations": 0.0} if _trains(part) else {},
    )
  alone = config.objective.kl_coefficient and not config.critic.reward_kl
  if alone and not config.lora.rank:
    yield Change(
      "reference",
      "objective.kl_coefficient=0 (no reference)",
      lambda part: {"reference": 0.0},
    )
  if not config.lora.rank:
    # A frozen base in bfloat16 takes half the bytes of float32 masters. With a
    # KL term it replaces the reference, which is in memory already.
    penalized = config.objective.kl_coefficient or config.critic.reward_kl
    base = 0.0 if penalized else 0.5
    yield Change(
      "adapters",
      "adapters (lora.rank=64, lora.base_dtype=bfloat16)",
      lambda part: dict.fromkeys(_TRAINED, 0.0) | {"masters": base},
    )
  named = " and more of them in mesh.trainer" if config.mesh.trainer else ""
  for times in (2, 4, 8):
    yield Change(
      "devices",
      f"{times} times the devices that train "
      f"(mesh.fsdp={times * plan.mesh['fsdp']}{named})",
      lambda part, times=times: _cut(part, times),
    )


def _smaller_cache(
  plan: plan_lib.Plan, config: config_lib.ExperimentConfig
) -> Iterator[Change]:
  """Yields the largest KV cache that fits, if it holds one context."""
  over = max(part.total for part in plan.parts) - plan.target.capacity
  most = max(_bytes(part).get("KV cache", 0) for part in plan.parts)
  engine = config.engine
  tokens = engine.kv_tokens or engine.slots * engine.max_context
  fewer = int(tokens * (1 - over / most)) if most else 0
  if fewer >= engine.max_context:
    yield Change(
      "kv_tokens",
      f"engine.kv_tokens={fewer}",
      lambda part: {"KV cache": fewer / tokens},
    )


def _fewer_tokens(
  plan: plan_lib.Plan, config: config_lib.ExperimentConfig
) -> Iterator[Change]:
  """Yields halvings of the micro-batch, down to one row for each shard."""
  batch = config.batch
  least = plan.mesh["data"] * plan.mesh["fsdp"] * batch.row_lengths[-1]
  tokens = batch.micro_batch_tokens // 2
  while tokens >= least:
    share = tokens / batch.micro_batch_tokens
    yield Change(
      "tokens",
      f"batch.micro_batch_tokens={tokens}",
      lambda part, share=share: {"activations": share} if _trains(part) else {},
    )
    tokens //= 2


def _cut(part: plan_lib.Part, times: int) -> dict[str, float]:
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
