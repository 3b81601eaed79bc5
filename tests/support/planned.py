"""Small targets, programs and policies that the planner's tests share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest
import small_policy

from anysearch_jax import config as config_lib
from anysearch_jax.host import hardware
from anysearch_jax.planning import compilation, plan, targets, whole_step

AXES = ("fsdp", "tensor")

# A tenth of everything that a data sheet could say.
CPU = hardware.Hardware(
  name="cpu",
  platform="cpu",
  memory=100 * 2**20,
  head_room=0.5,
  flops=1e12,
  memory_bandwidth=1e11,
  host_bandwidth=1e9,
  source="No data sheet",
)


A = small_policy.qwen3(
  512, d_model=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_dim=128
)
CONFIG = config_lib.ExperimentConfig(
  name="toy",
  policy="some/toy",
  questions=16,
  mesh=config_lib.MeshConfig(fsdp=2, tensor=2),
  engine=config_lib.EngineConfig(
    slots=8, max_context=48, lanes=(4,), prefill_lanes=2, decode_steps=4
  ),
  batch=config_lib.BatchConfig(
    row_lengths=(128,), micro_batch_tokens=512, max_micro_batches=4
  ),
)


def target(count: int) -> targets.Target:
  """Returns a target made of `count` of this process's own devices."""
  return targets.Target(CPU, (count,))


def need(name: str) -> None:
  """Skips the test if the compiler for a target is not installed."""
  try:
    targets._require(hardware.HARDWARE[name.partition(":")[0]])
  except ModuleNotFoundError as error:
    pytest.skip(str(error))


@contextlib.contextmanager
def optimized() -> Iterator[None]:
  """Has this process and the commands it starts compile as for users.

  `make test` compiles without most optimizations, which changes plans.
  """
  before = jax.config.read("jax_disable_most_optimizations")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
      yield
    finally:
      jax.config.update("jax_disable_most_optimizations", before)


def mesh(devices, *shape: int) -> jax.sharding.Mesh:
  count = int(np.prod(shape))
  return jax.sharding.Mesh(np.array(devices[:count]).reshape(shape), AXES)


def part(name="train step", *, total=0.0, **changes) -> compilation.Part:
  """Returns a part of a plan by its GiB; the rest of `kinds` is activations."""

  def taken(name: str) -> dict[str, int]:
    sizes = changes.pop(name, {})
    return {kind: int(n * hardware.GIB) for kind, n in sizes.items()}

  kinds, held = taken("kinds"), taken("held")
  peak = int(total * hardware.GIB) - sum(held.values())
  whole = compilation.Part(
    name=name,
    devices=4,
    kinds=kinds,
    held=held,
    arguments=sum(kinds.values()),
    temporary=peak - sum(kinds.values()),
    peak=peak,
  )
  return dataclasses.replace(whole, **changes)


def made(*parts: compilation.Part, config=CONFIG, **changes) -> plan.Plan:
  """Returns a plan of some parts for four H100s."""
  whole = plan.Plan(
    config=config,
    target=targets.parse("h100:4"),
    parameters=8 * 10**9,
    trained=8 * 10**9,
    parts=parts,
    assumptions=("This is assumed.",),
    step=whole_step.Step({"decode": 2.0}, training=4.0, overlapped=False),
  )
  return dataclasses.replace(whole, **changes)


def on_cpu(monkeypatch, memory=10 * hardware.GIB) -> targets.Target:
  """Makes plans compile for this process's own devices."""
  cpu = dataclasses.replace(CPU, memory=memory)
  monkeypatch.setattr(
    targets, "devices", lambda target: jax.devices()[: target.count]
  )
  return targets.Target(cpu, (4,))
