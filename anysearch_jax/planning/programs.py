"""The programs of a run with abstract arguments, to compile ahead of time."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, lora, serving, sharding, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.rollout.jax_engine import kv_memory, kv_store
from anysearch_jax.rollout.jax_engine import sampling as sampling_lib
from anysearch_jax.training import (
  batching,
  optimizers,
  placement,
  ppo,
  train_step,
)

# The kind whose arrays are in memory only while their program runs; arrays of
# other kinds remain.
BATCH = "batch"
# The kind of each field of the training state.
_KINDS = {"params": "masters", "opt_state": "moments", "critic": "critic"}
# The kinds that leave the device while it samples, by `pipeline.offload`.
OFFLOADED = {
  name: frozenset(_KINDS[field] for field in fields)
  for name, fields in placement.OFFLOADED.items()
}


class Program(NamedTuple):
  """One jitted function of a run.

  Attributes:
    name: such as `train step` or `decode`.
    fn: the jitted function, with donation and shardings.
    args: abstract arguments (`jax.ShapeDtypeStruct` with their shardings).
    kwargs: static arguments.
    kinds: abstract arrays by kind: `masters`, `critic`, `moments`, `reference`,
      `KV cache`, `engine weights`, `batch`. The same kind in two programs is
      the same arrays; all but `batch` remain between calls, unless another
      program has them freed or offloaded.
    freed: kinds of other programs that are in no memory while it runs.
    offloaded: kinds of other programs that are in host memory meanwhile.
  """

  name: str
  fn: Any
  args: tuple[Any, ...]
  kwargs: Mapping[str, Any]
  kinds: Mapping[str, Any]
  freed: frozenset[str] = frozenset()
  offloaded: frozenset[str] = frozenset()


def programs(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  *,
  devices: Sequence[jax.Device],
) -> list[Program]:
  """Returns the train step, the passes before it, prefill and decode.

  Args:
    config: the whole configuration.
    a: the policy's architecture, without adapters.
    devices: of the target. Training uses those of `config.mesh`; sampling those
      of `config.mesh.rollout`, by default the training devices.

  Raises:
    ValueError: the mesh does not suit the devices or the policy.
  """
  a = lora.attach(a, config.lora)
  placed = placement.Placement.of(a, config, devices)
  base_dtype = placed.dtype if a.lora is None else config.lora.base_dtype
  # What a run takes off the devices while it trains and while it samples.
  freed: frozenset[str] = frozenset()
  offloaded: frozenset[str] = frozenset()
  turns = placement.take_turns(placed, async_level=config.pipeline.async_level)
  if turns and (config.engine.kind == "jax" or config.servers_share):
    offloaded = OFFLOADED[config.pipeline.offload]
    if config.servers_share:
      freed = frozenset(["KV cache", "engine weights"])
    elif config.engine.free_kv_while_training:
      freed = frozenset(["KV cache"])
  trained = _training(config, placed, base_dtype)
  sampled = sampling(config.engine, config.sampling, placed, base_dtype)
  return [
    *(program._replace(freed=freed) for program in trained),
    *(program._replace(offloaded=offloaded) for program in sampled),
  ]


def _training(
  config: config_lib.ExperimentConfig,
  placed: placement.Placement,
  base_dtype: Any,
) -> Iterator[Program]:
  """Yields the train step and the passes before it."""
  a = placed.a
  objective = config.objective
  critic = config.critic if objective.has_critic else None
  scoring: dict[str, Any] = {
    "temperature": config.sampling.temperature,
    "compute": placement.compute(a, config, placed.trainer),
  }
  # The KL reference or frozen base, as `learner.Learner` keeps it.
  reference = None
  if a.lora or objective.kl_coefficient or config.critic.reward_kl:
    base = a.without_lora()
    base_shardings = sharding.shardings(base, placed.trainer)
    reference = weights.abstract(table.rows(base), base_shardings, base_dtype)
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=placed.rows if x.shape else placed.replicated
    ),
    batching.abstract(
      config.batch,
      multiple=placed.row_multiple,
      experts=placement.recorded(a, config),
    ),
  )

  def program(name, fn, state, reference, batch, **kinds) -> Program:
    return Program(
      name,
      fn,
      (state, reference, batch),
      {},
      kinds=kinds | {"reference": reference, BATCH: batch},
    )

  tx = optimizers.adamw(a, config.optimizer, critic=critic)
  shardings = train_step.shardings(a, tx, placed.trainer)
  state = _placed(
    jax.eval_shape(
      lambda params, critic: train_step.init(params, tx, critic=critic),
      weights.abstract(table.trainable_rows(a), shardings.params, jnp.float32),
      critic
      and weights.abstract(table.critic_rows(a), shardings.critic, jnp.float32),
    ),
    shardings,
  )
  loss = train_step.grpo_loss(a, objective, **scoring)
  step_batch = batch
  if config.engine.exact:
    step_batch = tuple(r._replace(exact=r.behaviour_logp) for r in step_batch)
  if critic is not None:
    loss = ppo.with_critic(loss, a, critic, compute=scoring["compute"])
    step_batch = tuple(
      rows._replace(old_value=rows.advantage, returns=rows.advantage)
      for rows in step_batch
    )
  yield program(
    "train step",
    train_step.make(loss, tx, shardings),
    state,
    reference,
    step_batch,
    masters=state.params,
    critic=state.critic,
    moments=state.opt_state,
  )
  on_policy = config.curriculum.steps_per_rollout == 1
  if objective.old_logp == "trainer" and not on_policy:
    yield program(
      "old log-probabilities",
      train_step.make_scorer(a, sharding=placed.rows, **scoring),
      state.params,
      reference,
      batch,
      masters=state.params,
    )
  if critic is not None:
    estimator = ppo.Estimator(a, critic, sharding=placed.rows, **scoring)
    yield program(
      "value pass",
      estimator.value,
      state.critic,
      None if a.lora is None else reference,
      batch,
      critic=state.critic,
    )


def sampling(
  config: config_lib.EngineConfig,
  sampling_config: config_lib.SamplingConfig,
  placed: placement.Placement,
  base_dtype: Any,
) -> tuple[Program, Program]:
  """Returns prefill and decode at their largest: all rows at full context.

  Args:
    config: sizes of the engine.
    sampling_config: temperature and limits of the draws.
    placed: the architecture and the meshes.
    base_dtype: dtype of the weights that are not trained.
  """
  a = placed.a
  mesh = placed.rollout
  model = kv_store.make_model(config, a, mesh, dtype=placed.dtype)
  params = _engine_weights(model, placed, base_dtype)
  pages = kv_memory.pool_sizes(config, a, shards=mesh.shape["data"])
  store = jax.eval_shape(
    kv_store.allocator(a, pages, config.page, model.stored, mesh=mesh)
  )
  columns = kv_memory.page_count(config.max_context, config)
  listed = columns * len(pages)
  by_rows = jax.sharding.NamedSharding(mesh, jax.P("data"))

  def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=by_rows)

  def program(name, fn, *args, **options) -> Program:
    return Program(
      name,
      fn,
      (params, store, *args),
      {"model": model, **options},
      kinds={"engine weights": params, "KV cache": store},
    )

  lanes = config.prefill_lanes
  prefill = program(
    "prefill",
    kv_store.prefill,
    kv_store.Chunks(
      array(lanes, listed),
      array(lanes, config.prefill_chunk),
      array(lanes),
      array(lanes),
    ),
  )
  rows = config.lanes[-1]
  steps = config.decode_steps
  # The rows that decode gathers: () but on CPUs.
  gathered = jax.eval_shape(
    functools.partial(
      kv_store.empty_rows, model, lanes=rows, columns=columns, steps=steps
    ),
    store,
  )
  ints = array(rows)
  floats = array(rows, dtype=jnp.float32)
  decode = program(
    "decode",
    kv_store.decode,
    jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_rows),
      gathered,
    ),
    # In the order of the fields.
    kv_store.Turns(
      array(rows, listed),
      ints,
      ints,
      ints,
      array(rows, 5, dtype=jnp.uint32),
      ints,
      array(rows, dtype=jnp.uint32),
      sampling_lib.Settings(floats, floats, ints),
      array(rows, steps) if config.exact else None,
    ),
    jax.ShapeDtypeStruct((), jnp.int32),
    jax.eval_shape(
      lambda: kv_store.Draws(
        jnp.zeros(a.vocab_size, jnp.uint32), jax.random.key(0)
      )
    ),
    steps=steps,
    restricted=sampling_lib.restricts(sampling_config),
  )
  return prefill, decode


def _engine_weights(
  model: kv_store.Model, placed: placement.Placement, base_dtype: Any
) -> decoder.Params:
  """Returns the abstract weights that decode reads, layer by layer."""
  a = placed.a
  shardings = sharding.shardings(a, placed.rollout)
  base = weights.abstract(table.base_rows(a), shardings, base_dtype)
  if a.lora is not None:
    adapters = weights.abstract(table.adapter_rows(a), shardings, placed.dtype)
    base = lora.combine(base, adapters)
  return _placed(
    jax.eval_shape(functools.partial(model.prepare, a=a), base),
    serving.shardings(a, placed.rollout, fused=model.fused),
  )


def _placed(shapes: Any, shardings: Any) -> Any:
  """Returns a tree of abstract arrays with these shardings."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )
