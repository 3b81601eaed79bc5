"""Small targets, programs and policies that the planner's tests share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.host import hardware
from anysearch_jax.planning import (
  collectives,
  compilation,
  plan,
  programs,
  targets,
)
from anysearch_jax.policy import architecture as architecture_lib

AXES = ("fsdp", "tensor")
# Shards of whole tiles of a TPU, which pads what is narrower.
WIDTH, HIDDEN, LAYERS, ROWS = 256, 512, 3, 16

# A tenth of everything that a data sheet could say.
CPU = hardware.Hardware(
  name="cpu",
  platform="cpu",
  memory=100 * 2**20,
  head_room=0.5,
  flops=1e12,
  memory_bandwidth=1e11,
  link_bandwidth=1e10,
  network_bandwidth=1e9,
  host_bandwidth=1e9,
  source="No data sheet",
)


A = architecture_lib.Architecture(
  family="qwen3",
  vocab_size=512,
  d_model=64,
  layers=2,
  heads=4,
  kv_heads=2,
  head_dim=16,
  mlp_dim=128,
  qk_norm=True,
  tied=True,
)
CONFIG = config_lib.ExperimentConfig(
  name="toy",
  policy="some/toy",
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


def train_step(devices, fsdp: int, tensor: int) -> programs.Program:
  """Makes a train step with two scanned products per layer.

  It takes as many micro-batches as `used` says. Weights are sharded over both
  axes, rows over `fsdp`. The state, with Adam's two moments, is donated; there
  is also a bfloat16 reference.
  """
  m = mesh(devices, fsdp, tensor)

  def placed(*spec):
    return jax.sharding.NamedSharding(m, jax.P(*spec))

  def weights(dtype):
    return {
      "up": jax.ShapeDtypeStruct(
        (LAYERS, WIDTH, HIDDEN), dtype, sharding=placed(None, "fsdp", "tensor")
      ),
      "down": jax.ShapeDtypeStruct(
        (LAYERS, HIDDEN, WIDTH), dtype, sharding=placed(None, "tensor", "fsdp")
      ),
    }

  def forward(params, x):
    def layer(x, w):
      hidden = jax.nn.relu(x @ w["up"].astype(x.dtype))
      return x + hidden @ w["down"].astype(x.dtype), None

    return jax.lax.scan(layer, x, params)[0]

  def loss(params, reference, x):
    return jnp.sum((forward(params, x) - forward(reference, x)) ** 2)

  def step(state, reference, batch, used):
    params, first, second = state

    def add(i, grads):
      new = jax.grad(loss)(params, reference, batch[i])
      return jax.tree.map(jnp.add, grads, new)

    grads = jax.tree.map(jnp.zeros_like, params)
    grads = jax.lax.fori_loop(0, used, add, grads)
    first = jax.tree.map(lambda m, g: 0.9 * m + g, first, grads)
    second = jax.tree.map(lambda v, g: 0.9 * v + g * g, second, grads)
    params = jax.tree.map(
      lambda p, m, v: p - m / (1 + jnp.sqrt(v)), params, first, second
    )
    return params, first, second

  state = tuple(weights(jnp.float32) for _ in range(3))
  reference = weights(jnp.bfloat16)
  batch = jax.ShapeDtypeStruct(
    (4, ROWS, WIDTH), jnp.float32, sharding=placed(None, "fsdp")
  )
  used = jax.ShapeDtypeStruct((), jnp.int32, sharding=placed())
  return programs.Program(
    name="train step",
    fn=jax.jit(
      step,
      donate_argnums=0,
      out_shardings=jax.tree.map(lambda x: x.sharding, state),
    ),
    args=(state, reference, batch, used),
    kwargs={},
    tokens=2 * ROWS,
    trips=2,
    kinds={
      "masters": state[0],
      "moments": state[1:],
      "reference": reference,
      "batch": (batch, used),
    },
  )


def sampler(devices, fsdp: int, tensor: int) -> programs.Program:
  """Makes a product with resident weights and a resident cache."""
  m = mesh(devices, fsdp, tensor)

  def placed(*spec):
    return jax.sharding.NamedSharding(m, jax.P(*spec))

  weights = jax.ShapeDtypeStruct(
    (WIDTH, HIDDEN), jnp.bfloat16, sharding=placed(None, ("fsdp", "tensor"))
  )
  cache = jax.ShapeDtypeStruct((9, WIDTH), jnp.float32, sharding=placed())
  return programs.Program(
    name="decode",
    fn=jax.jit(lambda w, cache: cache @ w.astype(cache.dtype)),
    args=(weights, cache),
    kwargs={},
    tokens=9,
    trips=1,
    kinds={"engine weights": weights, "KV cache": cache},
  )


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
    tokens=1000,
    read=10**9,
    kinds=kinds,
    held=held,
    arguments=sum(kinds.values()),
    temporary=peak - sum(kinds.values()),
    peak=peak,
    traffic={"all-gather": collectives.Traffic(3, 2e9)},
    predicted=targets.Prediction(0.4, 0.1, 0.1, 0.5, 0.2),
    flops=10**15,
    replications=0,
    seconds=1.0,
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
  )
  return dataclasses.replace(whole, **changes)


def on_cpu(monkeypatch, memory=10 * hardware.GIB) -> targets.Target:
  """Makes plans compile for this process's own devices."""
  cpu = dataclasses.replace(CPU, memory=memory)
  monkeypatch.setattr(
    targets, "devices", lambda target: jax.devices()[: target.count]
  )
  return targets.Target(cpu, (4,))
