"""Which configurations can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax import curriculum, objective
from anysearch_jax.policy import lora, self_attention, transformer
from anysearch_jax.rollout import sampling
from anysearch_jax.training import checkpoint


def validate(config: config_lib.ExperimentConfig) -> None:
  """Refuses what cannot run before anything is allocated.

  Nothing here asks for devices: a plan is validated where there are none.

  Raises:
    ValueError: what was found, what was expected.
  """
  curriculum.validate(config.curriculum)
  sampling.validate_training(config.sampling)
  checkpoint.validate(config.checkpoint)
  lora.validate(config.lora)
  _objective(config.objective)
  _batch(config.batch)
  _mesh(config.mesh, config.batch)
  _pipeline(config)
  _at_least("watch.bad_steps", config.watch.bad_steps, 1)
  _at_least("watch.max_stale", config.watch.max_stale, 1)
  if not 0 <= config.watch.max_failed <= 1:
    raise ValueError(
      f"watch.max_failed: found {config.watch.max_failed}, expected a share, "
      "0 to 1."
    )
  _one_of("engine.kind", config.engine.kind, ("jax", "sglang"))
  if config.engine.kind == "sglang":
    # Else the driver gives turns up that the engine still waits for.
    _at_least(
      "episode.turn_deadline",
      config.episode.turn_deadline,
      config.sglang.deadline,
    )
  _one_of("compute_dtype", config.compute_dtype, ("float32", "bfloat16"))
  trajectories = config.questions * config.group
  if trajectories % config.curriculum.steps_per_rollout:
    raise ValueError(
      f"{config.questions} questions x {config.group} samples = {trajectories} "
      f"trajectories do not divide into "
      f"{config.curriculum.steps_per_rollout} optimizer steps a rollout."
    )
  if config.episode.max_context > config.batch.row_lengths[-1] + 1:
    raise ValueError(
      f"episode.max_context {config.episode.max_context} exceeds the longest "
      f"training row, batch.row_lengths[-1] {config.batch.row_lengths[-1]}."
    )
  if config.episode.max_context > config.engine.max_context:
    raise ValueError(
      f"episode.max_context {config.episode.max_context} exceeds "
      f"engine.max_context {config.engine.max_context}; raise that."
    )


def validate_engine(config: config_lib.ExperimentConfig, engine: Any) -> None:
  """Refuses an engine that cannot sample so far ahead.

  Args:
    config: the whole configuration.
    engine: may have a `max_async_level`; one without has no bound.

  Raises:
    ValueError: what was found, what was expected.
  """
  level = config.pipeline.async_level
  most = getattr(engine, "max_async_level", level)
  if level > most:
    raise ValueError(
      f"pipeline.async_level: found {level}, expected at most {most} with the "
      "servers that sample; lower it, or start newer ones."
    )


def validate_processes(
  config: config_lib.ExperimentConfig, processes: int
) -> None:
  """Refuses what only one process can run.

  Raises:
    ValueError: what was found, what was expected.
  """
  level = config.pipeline.async_level
  if level and processes > 1:
    raise ValueError(
      f"pipeline.async_level: found {level} in {processes} processes, expected "
      "0: processes that sample and train at the same time would wait for each "
      "other in different orders. Set 0, or train in one process."
    )


def _one_of(name: str, found: str, known: Sequence[str]) -> None:
  if found not in known:
    raise ValueError(
      f"{name}: found {found!r}, expected one of {', '.join(known)}."
    )


def _at_least(name: str, found: float, least: float) -> None:
  # Said so that NaN is refused too.
  if not found >= least:
    raise ValueError(f"{name}: found {found}, expected at least {least}.")


def _objective(c: config_lib.ObjectiveConfig) -> None:
  _one_of("objective.kl_estimator", c.kl_estimator, objective.KL_ESTIMATORS)
  _one_of("objective.reduction", c.reduction, objective.REDUCTIONS)
  _one_of("objective.old_logp", c.old_logp, objective.OLD_LOGPS)
  _at_least("objective.importance_cap", c.importance_cap, 0)
  if c.importance_cap and c.old_logp == "engine":
    raise ValueError(
      f"objective.importance_cap: found {c.importance_cap} with old_logp "
      "'engine', whose ratio already is to the policy that sampled; set "
      "importance_cap 0 or old_logp 'trainer'."
    )


def _pipeline(config: config_lib.ExperimentConfig) -> None:
  c, o, mesh = config.pipeline, config.objective, config.mesh
  _at_least("pipeline.async_level", c.async_level, 0)
  _at_least("pipeline.extra_groups", c.extra_groups, 0)
  if not c.async_level:
    return
  if o.old_logp == "trainer" and not o.importance_cap:
    raise ValueError(
      f"pipeline.async_level: found {c.async_level} with objective.old_logp "
      "'trainer' and importance_cap 0, where nothing tells tokens of older "
      "weights from the trainer's own; set importance_cap (2.0, say) or "
      "old_logp 'engine'."
    )
  trainer = set(mesh.trainer or range(mesh.data * mesh.fsdp * mesh.tensor))
  shared = trainer & set(mesh.rollout or trainer)
  if shared and len(trainer | set(mesh.rollout)) > 1:
    raise ValueError(
      f"pipeline.async_level: found {c.async_level} with device "
      f"{min(shared)} both in mesh.trainer and in mesh.rollout; expected "
      "devices of their own, or one device for both: programs of several "
      "devices that start at the same time may wait for each other."
    )


def _batch(c: config_lib.BatchConfig) -> None:
  if not c.row_lengths or list(c.row_lengths) != sorted(set(c.row_lengths)):
    raise ValueError(
      f"batch.row_lengths: found {c.row_lengths}, expected ascending lengths."
    )
  _at_least("batch.row_lengths[0]", c.row_lengths[0], 1)
  for name in (
    "micro_batch_tokens",
    "max_micro_batches",
    "max_segments",
    "attention_chunk",
    "logprob_chunk",
  ):
    _at_least(f"batch.{name}", getattr(c, name), 1)
  _one_of("batch.remat", c.remat, ("none", *transformer.REMAT))
  _one_of(
    "batch.attention",
    c.attention,
    ("auto", *self_attention.IMPLEMENTATIONS),
  )


def _mesh(c: config_lib.MeshConfig, batch: config_lib.BatchConfig) -> None:
  for axis in ("data", "fsdp", "tensor"):
    _at_least(f"mesh.{axis}", getattr(c, axis), 1)
  uneven = [n for n in batch.row_lengths if n % c.tensor]
  if c.sequence_parallel and uneven:
    raise ValueError(
      f"mesh.sequence_parallel: found a row of {uneven[0]} tokens in "
      f"batch.row_lengths, expected multiples of mesh.tensor, {c.tensor}, over "
      "which positions are cut."
    )
  for name in ("trainer", "rollout"):
    indices = getattr(c, name)
    if any(i < 0 for i in indices) or len(set(indices)) < len(indices):
      raise ValueError(
        f"mesh.{name}: found {indices}, expected indices of devices from 0, "
        "each once."
      )
  devices = c.data * c.fsdp * c.tensor
  if c.trainer and devices % len(c.trainer):
    raise ValueError(
      f"mesh.trainer: found {len(c.trainer)} devices of each process for a "
      f"mesh of data {c.data} x fsdp {c.fsdp} x tensor {c.tensor} = {devices}; "
      "expected a number that divides it."
    )
