"""Builds the programs of a run with abstract arguments; allocates nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax.planning import engine_programs, program
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, lora, sharding, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.training import (
  batching,
  optimizers,
  placement,
  ppo,
  train_step,
)

# The kind of each field of the training state.
_KINDS = {"params": "masters", "opt_state": "moments", "critic": "critic"}


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
  engine = engine_programs.make(config.engine, placed, base_dtype)
  freed, offloaded = away(config, placed)
  trained = _training(
    training,
    config.optimizer,
    config.objective,
    on_policy=config.curriculum.steps_per_rollout == 1,
  )
  sampled = (
    engine_programs.prefill(engine),
    engine_programs.decode(engine, config.sampling),
  )
  return [
    *(program._replace(freed=freed) for program in trained),
    *(program._replace(offloaded=offloaded) for program in sampled),
  ]


def away(
  config: config_lib.ExperimentConfig, placed: placement.Placement
) -> tuple[frozenset[str], frozenset[str]]:
  """Returns the kinds that a run takes off the devices (`learner.Phases`).

  Returns:
    Those that are freed while it trains, and those that are in host memory
    while it samples.
  """
  turns = placement.take_turns(placed, async_level=config.pipeline.async_level)
  if not turns or config.engine.kind != "jax":
    return frozenset(), frozenset()
  fields = placement.OFFLOADED[config.pipeline.offload]
  return (
    frozenset(["KV cache"] if config.engine.free_kv_while_training else []),
    frozenset(_KINDS[field] for field in fields),
  )


def _training(
  t: _Training,
  optimizer: config_lib.OptimizerConfig,
  objective: config_lib.ObjectiveConfig,
  *,
  on_policy: bool,
) -> Iterator[program.Program]:
  """Yields the train step and the passes before it."""
  a = t.placed.a
  tx = optimizers.adamw(a, optimizer, critic=t.critic)
  shardings = train_step.shardings(a, tx, t.placed.trainer)
  state = _state(t, tx, shardings)
  loss = train_step.grpo_loss(
    a,
    objective,
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
  return program.placed(shapes, shardings)


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


def _reference(placed: placement.Placement, dtype: Any) -> decoder.Params:
  """Returns the KL reference or frozen base, as `learner.Learner` keeps it."""
  a = placed.a.without_lora()
  return program.cast(
    table.rows(a), sharding.shardings(a, placed.trainer), dtype
  )
