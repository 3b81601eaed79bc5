"""Builds the programs of a run with abstract arguments; allocates nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax.planning import program
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, lora, serving, sharding, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy.attention import paged_attention
from anysearch_jax.rollout.jax_engine import kv_memory, kv_store
from anysearch_jax.rollout.jax_engine import model as model_lib
from anysearch_jax.training import batching, placement, ppo, train_step


class _Training(NamedTuple):
  """What the programs of training have in common.

  placed: the meshes and the architecture.
  compute, temperature: of their forward passes.
  critic: its configuration; None without one.
  reference: abstract weights of the KL reference or the frozen base, if any.
  batch: abstract, of an optimizer step.
  trips: micro-batches of each row length.
  segment: tokens of the episodes in a row.
  """

  placed: placement.Placement
  compute: decoder.Compute
  temperature: float
  critic: config_lib.CriticConfig | None
  reference: decoder.Params | None
  batch: batching.TrainBatch
  trips: int
  segment: int

  @property
  def tokens(self) -> int:
    """Positions of an optimizer step."""
    return sum(
      self.trips * math.prod(rows.tokens.shape[1:]) for rows in self.batch
    )


class _Engine(NamedTuple):
  """What prefill and decode have in common.

  mesh: of the rollout devices.
  config: of the engine.
  params, store: abstract weights and KV cache.
  columns: pages of a row at full context.
  blocks: iterations of attention over them.
  model: how they compute.
  """

  mesh: jax.sharding.Mesh
  config: config_lib.EngineConfig
  params: decoder.Params
  store: paged_attention.Pools
  columns: int
  blocks: int
  model: model_lib.Model

  @property
  def kinds(self) -> dict[str, Any]:
    return {"engine weights": self.params, "KV cache": self.store}

  def rows(self, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """Returns an abstract array, sharded by rows."""
    by_rows = jax.sharding.NamedSharding(self.mesh, jax.P("data"))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=by_rows)

  def reads(self, rows: int) -> tuple[decoder.Params, paged_attention.Pools]:
    """Returns what one step over `rows` rows reads at most."""
    return self.params, _read_pages(self.store, rows * self.columns)


def programs(
  config: config_lib.ExperimentConfig,
  a: architecture_lib.Architecture,
  *,
  devices: Sequence[jax.Device],
  micro_batches: int,
  segment: int,
) -> list[program.Program]:
  """Returns the train step, the passes before it, prefill and decode.

  The last one is decode, whose weights the hand-over replaces.

  Args:
    config: the whole configuration.
    a: the policy's architecture, without adapters.
    devices: of the target. Training uses those of `config.mesh`; sampling those
      of `config.mesh.rollout`, by default the training devices.
    micro_batches: number of micro-batches that one optimizer step fills.
    segment: tokens of the episodes that training rows are packed with.

  Raises:
    ValueError: the mesh does not suit the devices or the policy.
  """
  a = lora.attach(a, config.lora)
  placed = placement.Placement.of(
    a, config.mesh, dtype=config.compute_dtype, devices=devices
  )
  base_dtype = placed.dtype if a.lora is None else config.lora.base_dtype
  penalized = config.objective.kl_coefficient or config.critic.reward_kl
  batch = _batch(config.batch, placed)
  training = _Training(
    placed=placed,
    compute=placement.compute(
      a,
      config.batch,
      placed.trainer,
      dtype=config.compute_dtype,
      sequence_parallel=config.mesh.sequence_parallel,
    ),
    temperature=config.sampling.temperature,
    critic=config.critic if config.objective.has_critic else None,
    reference=(_reference(placed, base_dtype) if a.lora or penalized else None),
    batch=batch,
    # Each row length has its own loop; micro-batches are assumed to be divided
    # evenly among them.
    trips=math.ceil(micro_batches / len(batch)),
    segment=segment,
  )
  engine = _engine(config.engine, placed, base_dtype)
  return [
    *_training(
      training,
      config.optimizer,
      config.objective,
      on_policy=config.curriculum.steps_per_rollout == 1,
    ),
    _prefill(engine),
    _decode(engine, config.sampling),
  ]


def _training(
  t: _Training,
  optimizer: config_lib.OptimizerConfig,
  objective: config_lib.ObjectiveConfig,
  *,
  on_policy: bool,
) -> Iterator[program.Program]:
  """Yields the train step and the passes before it."""
  a = t.placed.a
  tx = train_step.optimizer(a, optimizer, critic=t.critic)
  shardings = train_step.shardings(a, tx, t.placed.trainer)
  state = _state(t, tx, shardings)
  loss = train_step.grpo_loss(
    a,
    objective,
    on_policy=on_policy,
    temperature=t.temperature,
    compute=t.compute,
  )
  if t.critic is not None:
    loss = ppo.with_critic(loss, a, t.critic, compute=t.compute)
  yield _train_step(t, train_step.make(loss, tx, shardings), state)
  if objective.old_logp == "trainer" and not on_policy:
    yield _old_logprobs(t, state.params)
  if t.critic is not None and state.critic is not None:
    yield _value_pass(t, t.critic, state.critic)


def _state(t: _Training, tx: Any, shardings: Any) -> train_step.TrainState:
  """Returns the abstract train state."""
  a = t.placed.a
  trained = weights.abstract(
    table.trainable_rows(a), shardings.params, jnp.float32
  )
  critic = t.critic and weights.abstract(
    table.critic_rows(a), shardings.critic, jnp.float32
  )
  shapes = jax.eval_shape(
    lambda params, critic: train_step.init(params, tx, critic=critic),
    trained,
    critic,
  )
  return _placed(shapes, shardings)


def _batch(
  config: config_lib.BatchConfig, placed: placement.Placement
) -> batching.TrainBatch:
  """Returns an abstract batch, sharded by rows."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=placed.rows if x.shape else placed.whole
    ),
    batching.abstract(config, multiple=placed.row_multiple),
  )


def _train_step(
  t: _Training, step: Any, state: train_step.TrainState
) -> program.Program:
  batch = t.batch
  if t.critic is not None:
    batch = tuple(
      rows._replace(old_value=rows.advantage, returns=rows.advantage)
      for rows in batch
    )
  return program.Program(
    "train step",
    step,
    (state, t.reference, batch),
    {},
    tokens=t.tokens,
    trips=t.trips,
    kinds={
      "masters": state.params,
      "critic": state.critic,
      "moments": state.opt_state,
      "reference": t.reference,
      "batch": batch,
    },
    reads=(state.trained, t.reference),
    segment=t.segment,
  )


def _old_logprobs(t: _Training, params: decoder.Params) -> program.Program:
  score = train_step.make_scorer(
    t.placed.a,
    sharding=t.placed.rows,
    temperature=t.temperature,
    compute=t.compute,
  )
  return program.Program(
    "old log-probabilities",
    score,
    (params, t.reference, t.batch),
    {},
    tokens=t.tokens,
    trips=t.trips,
    kinds={"masters": params, "reference": t.reference, "batch": t.batch},
    reads=(params, t.reference),
    segment=t.segment,
  )


def _value_pass(
  t: _Training, config: config_lib.CriticConfig, critic: decoder.Params
) -> program.Program:
  estimator = ppo.Estimator(
    t.placed.a,
    config,
    sharding=t.placed.rows,
    temperature=t.temperature,
    compute=t.compute,
  )
  base = None if t.placed.a.lora is None else t.reference
  return program.Program(
    "value pass",
    estimator.value,
    (critic, base, t.batch),
    {},
    tokens=t.tokens,
    trips=t.trips,
    kinds={"critic": critic, "reference": base, "batch": t.batch},
    segment=t.segment,
  )


def _engine(
  config: config_lib.EngineConfig, placed: placement.Placement, base_dtype: Any
) -> _Engine:
  """Returns the engine at its largest: all rows at full context."""
  a, mesh = placed.a, placed.rollout
  model = model_lib.make(config, a, mesh, dtype=placed.dtype)
  return _Engine(
    mesh=mesh,
    config=config,
    params=_engine_weights(model, placed, base_dtype),
    store=_cache(config, placed),
    columns=kv_memory.pages_of(config.max_context, config),
    blocks=math.ceil(config.max_context / max(model.paged.block, config.page)),
    model=model,
  )


def _engine_weights(
  model: model_lib.Model, placed: placement.Placement, base_dtype: Any
) -> decoder.Params:
  """Returns the abstract weights that decode reads, layer by layer."""
  a = placed.a
  cut = sharding.shardings(a, placed.rollout)
  base = _cast(table.base_rows(a), cut, base_dtype)
  if a.lora is not None:
    base = lora.combine(base, _cast(table.adapter_rows(a), cut, placed.dtype))
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    jax.eval_shape(functools.partial(model.prepare, a=a), base),
    serving.shardings(a, placed.rollout, fused=model.fused),
  )


def _cache(
  config: config_lib.EngineConfig, placed: placement.Placement
) -> paged_attention.Pools:
  """Returns the abstract KV cache."""
  shards = placed.rollout.shape["data"]
  store = jax.eval_shape(
    functools.partial(
      paged_attention.empty,
      placed.a,
      kv_memory.pages(config, shards=shards) * shards,
      config.page,
      placed.dtype,
    )
  )
  pages = kv_store.sharding(placed.a, placed.rollout)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pages), store
  )


def _prefill(e: _Engine) -> program.Program:
  rows, chunk = e.config.prefill_lanes, e.config.prefill_chunk
  starts = counts = e.rows(rows)
  return program.Program(
    "prefill",
    kv_store.prefill,
    (
      e.params,
      e.store,
      kv_store.Chunks(
        e.rows(rows, e.columns), e.rows(rows, chunk), starts, counts
      ),
    ),
    {"model": e.model},
    tokens=rows * chunk,
    trips=1,
    kinds=e.kinds,
    reads=e.reads(rows),
    blocks=e.blocks,
  )


def _decode(e: _Engine, sampling: config_lib.SamplingConfig) -> program.Program:
  rows, steps = e.config.lanes[-1], e.config.decode_steps
  tokens = starts = limits = sampled = e.rows(rows)
  vocabulary = e.model.a.vocab_size
  draws = jax.eval_shape(
    lambda: kv_store.Draws(jnp.zeros(vocabulary, bool), jax.random.key(0))
  )
  return program.Program(
    "decode",
    kv_store.decode,
    (
      e.params,
      e.store,
      kv_store.Turns(
        e.rows(rows, e.columns),
        tokens,
        starts,
        limits,
        e.rows(rows, 5, dtype=jnp.uint32),
        sampled,
      ),
      jax.ShapeDtypeStruct((), jnp.int32),
      draws,
    ),
    {"model": e.model, "steps": steps, "sampling": sampling},
    tokens=rows * steps,
    trips=steps,
    kinds=e.kinds,
    reads=e.reads(rows),
    blocks=e.blocks,
  )


def _read_pages(
  store: paged_attention.Pools, pages: int
) -> paged_attention.Pools:
  """Returns the part of the cache that one call reads at most."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      (x.shape[0], min(pages, x.shape[1]), *x.shape[2:]),
      x.dtype,
      sharding=x.sharding,
    ),
    store,
  )


def _reference(placed: placement.Placement, dtype: Any) -> decoder.Params:
  """Returns the KL reference or frozen base, as `learner.Learner` keeps it."""
  a = placed.a.without_lora()
  return _cast(table.rows(a), sharding.shardings(a, placed.trainer), dtype)


def _cast(
  rows: Sequence[weights.Weight], shardings: dict, dtype: Any
) -> decoder.Params:
  """Returns abstract weights in `dtype`, except float32 scales of norms."""

  def leaf(row: weights.Weight) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
      row.shape,
      jnp.float32 if row.init is None else dtype,
      sharding=weights.get(shardings, row.path),
    )

  return weights.tree(rows, leaf)


def _placed(shapes: Any, shardings: Any) -> Any:
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )
