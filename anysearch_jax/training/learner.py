"""The learner: a policy's training state, its steps and its weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import processes
from anysearch_jax.policy import decoder, hf, lora
from anysearch_jax.training import (
  batching,
  health,
  metrics,
  optimizers,
  placement,
  ppo,
  rewards_and_advantages,
  throughput,
  train_step,
)
from anysearch_jax.training import timeline as timeline_lib

# Maps parameters and sequences, int32 `[T]`, to log-probs, float32 `[T - 1]`.
Scorer = Callable[[decoder.Params, list[np.ndarray]], list[np.ndarray]]


class Learner:
  """Trains a policy on its mesh.

  Attributes:
    architecture: the policy's, with its adapters.
    placement: says where arrays are.
    state: the training state; each step donates it and replaces it. While the
      engine samples, arrays of it may be in host memory (`move`).
    scorer: the engine's `score_exactly`, if `engine.exact` is on.

  Args:
    config: the whole configuration.
    policy: the initial policy, also the reference of the KL term; with several
      processes, its arrays are on the training mesh.
    supervised: whether the loss is the cross-entropy of the tokens that have a
      weight, instead of the configured objective.

  Raises:
    ValueError: the devices cannot run the configuration.
  """

  def __init__(
    self,
    config: config_lib.ExperimentConfig,
    policy: hf.Policy,
    *,
    supervised: bool = False,
  ):
    self._config = config
    a = lora.attach(policy.architecture, config.lora)
    placed = placement.Placement.of(a, config)
    self.architecture = a
    self.placement = placed
    curriculum = config.curriculum
    scoring: dict[str, Any] = {
      "temperature": config.sampling.temperature,
      "compute": placement.compute(a, config, placed.trainer),
    }
    critic = config.critic if config.objective.has_critic else None
    tx = optimizers.adamw(
      a, config.optimizer, critic=critic, total_steps=curriculum.total_steps
    )
    shardings = train_step.shardings(a, tx, placed.trainer)
    trained = (
      policy.params if a.lora is None else lora.initialize(a, config.seed)
    )
    trained = jax.device_put(trained, shardings.params)
    critic_params = None
    if critic is not None:
      critic_params = ppo.initialize(trained, a)
      critic_params = jax.device_put(critic_params, shardings.critic)
    self.state = train_step.init(trained, tx, shardings, critic=critic_params)
    has_penalty = config.objective.kl_coefficient or config.critic.reward_kl
    self._reference: decoder.Params | None = None
    if a.lora or has_penalty:
      self._reference = placed.frozen(policy.params)
    # The frozen base under adapters, here and on the engine's devices.
    self._base: decoder.Params = {}
    if a.lora and self._reference:
      self._base = self._reference
    self._engine_base = placed.to_engine(self._base) if self._base else {}
    # The first step's log-probs are under the old weights. Those of later steps
    # need a forward pass before the weights change; so do those of the first,
    # if another epoch needs them again.
    recomputes = config.objective.old_logp == "trainer"
    self._first_is_old = recomputes and curriculum.epochs == 1
    # The number of a rollout's steps that need such a forward pass.
    self._scored_steps = 0
    if recomputes:
      self._scored_steps = curriculum.steps_per_rollout - self._first_is_old
    if supervised:
      loss = train_step.cross_entropy_loss(a, compute=scoring["compute"])
    else:
      loss = train_step.grpo_loss(a, config.objective, **scoring)
    self._estimator: ppo.Estimator | None = None
    if critic is not None:
      loss = ppo.with_critic(loss, a, critic, compute=scoring["compute"])
      self._estimator = ppo.Estimator(
        a, critic, sharding=placed.rows, **scoring
      )
    self._step = train_step.make(loss, tx, shardings)
    self.scorer: Scorer | None = None
    self._recorded = placement.recorded(a, config)
    self._score = train_step.make_scorer(a, sharding=placed.rows, **scoring)

  def params(self) -> decoder.Params:
    """Returns all current parameters of the policy, frozen base included."""
    if self.architecture.lora is None:
      return self.state.params
    return lora.combine(self._base, self.state.params)

  def published(self) -> decoder.Params:
    """Returns the parameters for the engine, see `Placement.to_engine`.

    All processes call this together. With `pipeline.async_level` 0 they may
    share arrays with `state`, which the next step donates; otherwise such
    arrays are copied.
    """
    trained = self.placement.publish(self.state.params)
    if self._config.pipeline.async_level:
      own_arrays = {id(x) for x in jax.tree.leaves(self.state.params)}
      trained = jax.tree.map(
        lambda x: jnp.copy(x) if id(x) in own_arrays else x, trained
      )
    a = self.architecture
    if a.lora is None or not trained:
      return trained
    return lora.combine(self._engine_base, trained)

  def scores(self, prompt: Sequence[int]) -> np.ndarray:
    """Scores a prompt with the weights that the engine gets, see `health`.

    All processes call this together.
    """
    a = self.architecture
    placed = self.placement
    params = self.state.params
    params = hf.cast(params, a, placed.dtype)
    if a.lora is not None:
      params = lora.combine(self._base, params)
    return health.scores(params, prompt, a=a, placed=placed)

  @property
  def steps_alone(self) -> bool:
    """Whether no step of a rollout needs values from before its first step.

    Training can then resume between two of them.
    """
    return not self._scored_steps and self._estimator is None

  def move(self, offload: str, memory: str) -> int:
    """Moves arrays of the state between host and devices.

    Args:
      offload: `pipeline.offload`, which says which arrays.
      memory: "pinned_host" or "device".

    Returns:
      Their bytes on one device.
    """
    state = self.state._asdict()
    arrays = {name: state[name] for name in placement.OFFLOADED[offload]}
    shardings = jax.tree.map(
      lambda x: x.sharding.with_memory_kind(memory), arrays
    )
    moved = jax.block_until_ready(jax.device_put(arrays, shardings))
    self.state = self.state._replace(**moved)
    return sum(
      x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(moved)
    )

  def release(self) -> train_step.TrainState[jax.ShapeDtypeStruct]:
    """Frees the state and returns its shapes, dtypes and shardings.

    The caller sets `state` again: there may be no memory for two.
    """
    like = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      self.state,
    )
    del self.state
    return like

  def pack(
    self, scored: rewards_and_advantages.Experience | None
  ) -> list[batching.HostBatch]:
    """Packs a rollout into a host batch for each step of an epoch.

    All processes call this together and get the batches of the first one;
    `scored` may be None in the others.
    """
    batches = processes.on_main(lambda: self._batches(scored))
    # Tuples of another process arrive as lists.
    return [
      tuple(batching.Rows(*arrays) for arrays in batch) for batch in batches
    ]

  def _batches(
    self, scored: rewards_and_advantages.Experience | None
  ) -> list[batching.HostBatch]:
    """Packs a rollout into a host batch for each step of an epoch."""
    assert scored is not None
    size = scored.valid.size
    batch_size = size // self._config.curriculum.batches_per_rollout
    return [
      batching.pack(
        rewards_and_advantages.examples(scored, start, start + batch_size),
        config=self._config.batch,
        multiple=self.placement.row_multiple,
        rewards=self._estimator is not None,
        experts=self._recorded,
      )
      for start in range(0, size, batch_size)
    ]

  def steps(
    self, packed: Sequence[batching.HostBatch], start: int = 0
  ) -> Iterator[dict[str, float]]:
    """Takes the steps of a rollout, epoch after epoch.

    Args:
      packed: the batches of an epoch.
      start: number of steps that were taken before; above 0 only with
        `steps_alone`.

    Yields:
      The metrics of each step.
    """
    batches = []
    for i, batch in enumerate(packed):
      is_first = i == 0 and self._first_is_old
      if is_first:
        batch = tuple(
          rows._replace(old_logp=np.full_like(rows.old_logp, batching.OWN))
          for rows in batch
        )
      placed = self.placement.batch(batch)
      if self._scored_steps and not is_first:
        scores = self._score(self.state.params, self._reference, placed)
        placed = tuple(
          rows._replace(old_logp=logp) for rows, logp in zip(placed, scores)
        )
      batches.append(placed)
    if self._estimator is not None:
      batches = self._estimator(self.state, self._reference, batches)
    count = len(packed) * self._config.curriculum.epochs
    for step in range(start, count):
      batch = packed[step % len(packed)]
      placed = batches[step % len(packed)]
      if self.scorer is not None:
        # The weights of a rollout's first step are those that sampled it.
        exact = [rows.behaviour_logp for rows in batch]
        if step:
          score = functools.partial(self.scorer, self.published())
          exact = batching.rescored(batch, score)
        arrays = jax.device_put(exact, self.placement.rows)
        placed = tuple(
          rows._replace(exact=x) for rows, x in zip(placed, arrays)
        )
      self.state, values = self._step(self.state, self._reference, placed)
      yield ppo.metrics(metrics.plain_values(jax.device_get(values)))

  def speed(
    self, packed: Sequence[batching.HostBatch], seconds: float
  ) -> dict[str, float]:
    """Returns metrics of speed, device memory and compiled programs.

    Args:
      packed: the batches of an epoch of a rollout.
      seconds: duration of the training on the whole rollout.
    """
    config = self._config
    estimator = self._estimator
    scored_share = self._scored_steps / config.curriculum.steps_per_rollout
    epochs = config.curriculum.epochs
    work = throughput.count([*packed] * epochs, self.architecture)
    operations = throughput.operations(
      self.architecture,
      work,
      forwards=int(bool(config.objective.kl_coefficient)),
      first_forwards=bool(config.critic.reward_kl) + scored_share,
      critic=estimator is not None,
      epochs=epochs,
    )
    devices = list(self.placement.trainer.devices.flat)
    values = throughput.metrics(
      work, operations.flops, seconds=seconds, devices=devices
    )
    values |= throughput.memory(jax.local_devices())
    values["compile/train_step"] = throughput.programs(self._step)
    values["compile/old_logp"] = throughput.programs(self._score)
    if estimator is not None:
      values["compile/values"] = throughput.programs(estimator.value)
    return values


class Phases:
  """Frees memory that the next phase does not need.

  The trainer's thread calls it. Where sampling and training take turns on the
  same devices, the KV cache of a `types.CachingEngine` is freed while training
  (with servers, their weights too), and the training state may be in host
  memory while sampling (`pipeline.offload`). Host memory of a sharding:
  https://docs.jax.dev/en/latest/201/memory-spaces.html
  """

  def __init__(
    self,
    learner: Learner,
    engine: types.TrainableEngine | None,
    *,
    config: config_lib.ExperimentConfig,
    timeline: timeline_lib.Timeline,
  ):
    self._learner = learner
    self._offload = config.pipeline.offload
    frees = config.servers_share
    if not config.engine.has_servers:
      frees = config.engine.free_kv_while_training
    level = config.pipeline.async_level
    self._engine: types.CachingEngine | None = None
    if frees and isinstance(engine, types.CachingEngine):
      if placement.take_turns(learner.placement, async_level=level):
        self._engine = engine
    # Only the first of several processes may have an engine.
    self._frees = processes.on_main(lambda: self._engine is not None)
    self._timeline = timeline

  def sample(self, rollout: int) -> None:
    """Moves the training state to host memory, before a rollout is sampled."""
    if self._offload == "none":
      return
    with self._timeline.span(rollout, timeline_lib.TRAINER, "sync"):
      size = self._learner.move(self._offload, "pinned_host")
      logging.log_first_n(
        logging.INFO,
        "Moved %.2f GiB of the training state to host memory for sampling "
        "(pipeline.offload).",
        1,
        size / 2**30,
      )

  def train(self, rollout: int) -> None:
    """Frees the KV cache and fetches the state, before training."""
    if not self._frees and self._offload == "none":
      return
    with self._timeline.span(rollout, timeline_lib.TRAINER, "sync"):
      if self._frees:
        size = processes.barrier_call(self._free_cache)
        if size:  # Servers do not say what they free.
          logging.log_first_n(
            logging.INFO,
            "Freed %.2f GiB of KV cache for training "
            "(engine.free_kv_while_training).",
            1,
            size / 2**30,
          )
      self._learner.move(self._offload, "device")

  def _free_cache(self) -> int:
    """Frees the KV cache; returns its bytes on a device."""
    if self._engine is None:
      return 0
    with processes.alone():
      return self._engine.free_cache()
