"""Refuses configurations that cannot run."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import curriculum, grpo, rewards
from anysearch_jax.config import ranges
from anysearch_jax.methods import otc, systems
from anysearch_jax.policy import decoder, lora
from anysearch_jax.policy.attention import paged_attention, self_attention
from anysearch_jax.rollout import episode
from anysearch_jax.rollout.jax_engine import kv_memory, sampling
from anysearch_jax.training import batching, checkpoint, rewards_and_advantages


def validate(config: config_lib.ExperimentConfig) -> None:
  """Checks a training configuration before anything is allocated.

  It does not look at the machine's devices: the planner validates
  configurations for hardware that is not there.

  Raises:
    ValueError: names the setting, its value and the expected values.
  """
  validate_playing(config)
  validate_sampling(config)
  curriculum.validate(config.curriculum)
  sampling.validate_training(config.sampling)
  checkpoint.validate(config.checkpoint)
  lora.validate(config.lora)
  _one_of("reward.gamma_mode", config.reward.gamma_mode, rewards.GAMMA_MODES)
  _method(config)
  _best_metric(config)
  _objective(config.objective)
  _batch(config.batch)
  _rows_over_tensor(config.mesh, config.batch)
  _pipeline(config)
  _critic(config)
  if config.group < 2 and not config.objective.has_critic:
    raise ValueError(
      f"group: found {config.group}, expected at least 2: an advantage is a "
      "difference from the others of the group."
    )
  if config.engine.kind == "sglang":
    # Otherwise the driver gives up turns that the engine still waits for.
    _at_least(
      "episode.turn_deadline",
      config.episode.turn_deadline,
      config.sglang.deadline,
    )
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
  _room(config)


def _method(config: config_lib.ExperimentConfig) -> None:
  """Checks that the method can be trained as configured."""
  method = systems.get(config.method.name)
  _one_of("method.otc.form", config.method.otc.form, otc.FORMS)
  if method.reward is None:
    raise ValueError(
      f"method.name: {method.name!r} is a system without training; evaluate a "
      f"policy with episode.prompts={method.prompts} instead."
    )
  _one_of(
    f"episode.prompts of method.name {method.name}",
    config.episode.prompts,
    tuple(method.environments),
  )
  if method.steps is not None and not config.objective.has_critic:
    raise ValueError(
      f"objective.advantage: found {config.objective.advantage!r}, expected "
      f"'gae' for method.name {method.name!r}, which rewards single searches."
    )


def _best_metric(config: config_lib.ExperimentConfig) -> None:
  """Checks a name that is otherwise only used after the first rollout.

  Calls the user's own reward function once, also if the name is not used.
  """
  if config.checkpoint.keep_best or config.reward.function:
    known = sorted(
      rewards_and_advantages.reward_metrics(
        systems.trained(config),
        samples=config.group,
        max_budget=config.curriculum.max_budget,
        traced=not config.reward.function,
      )
    )
  if config.checkpoint.keep_best:
    _one_of("checkpoint.best_metric", config.checkpoint.best_metric, known)


def validate_playing(config: config_lib.ExperimentConfig) -> None:
  """Checks the settings of playing episodes, in training or evaluation.

  Raises:
    ValueError: names the setting, its value and the expected values.
  """
  ranges.check(config)
  _name(config.name)
  _one_of("compute_dtype", config.compute_dtype, ("float32", "bfloat16"))
  systems.environment(config.episode.prompts)
  _mesh(config.mesh)
  for name in ("budgets", "seeds"):
    values = getattr(config.evaluation, name)
    if len(set(values)) < len(values):
      raise ValueError(
        f"evaluation.{name}: found {values}, expected each once."
      )
  _one_of("evaluation.scorer", config.evaluation.scorer, ("paper", "official"))


def validate_sampling(config: config_lib.ExperimentConfig) -> None:
  """Checks that the engine can sample the episodes of a configuration.

  Raises:
    ValueError: names the setting, its value and the expected values.
  """
  _one_of("engine.kind", config.engine.kind, ("jax", "sglang"))
  if config.engine.kind == "sglang":
    # Imported late: the in-process engine needs no HTTP.
    from anysearch_jax.rollout.sglang import server as sglang_server

    sglang_server.validate(config.sglang)
    return
  kv_memory.validate(config.engine)
  _one_of(
    "engine.attention",
    config.engine.attention,
    ("auto", *paged_attention.IMPLEMENTATIONS),
  )
  if config.episode.max_context > config.engine.max_context:
    raise ValueError(
      f"episode.max_context {config.episode.max_context} exceeds "
      f"engine.max_context {config.engine.max_context}; raise that."
    )


def validate_prompts(
  config: config_lib.ExperimentConfig,
  questions: Sequence[types.Question],
  codec: types.TextCodec,
) -> None:
  """Checks that the median question's prompt fits the context.

  A single question that is too long only ends its own episodes.

  Args:
    config: of the run.
    questions: that will be asked.
    codec: tokenizer of the policy.

  Raises:
    ValueError: there is no question, or the prompt of the question of median
      length leaves no room for a token of the model.
  """
  if not questions:
    raise ValueError("Found no question, expected at least one.")
  middle = sorted(questions, key=lambda q: len(q.text))[len(questions) // 2]
  tokens = max(
    len(
      episode.prompt(
        middle,
        budget=config.curriculum.max_budget,
        scaffold=scaffold,
        config=config.episode,
        codec=codec,
      )[1]
    )
    for scaffold in (True, False)
  )
  if tokens >= config.episode.max_context:
    raise ValueError(
      f"episode.max_context: found {config.episode.max_context}, expected "
      f"more than the {tokens} tokens of the prompt of {middle.text[:80]!r}; "
      "raise it (and engine.max_context, batch.row_lengths)."
    )


def validate_engine(
  config: config_lib.ExperimentConfig, engine: types.TrainableEngine
) -> None:
  """Checks that the engine supports `pipeline.async_level`.

  Args:
    config: the whole configuration.
    engine: the engine that samples.

  Raises:
    ValueError: names the setting, its value and the expected values.
  """
  level = config.pipeline.async_level
  most = engine.max_async_level
  if level > most:
    raise ValueError(
      f"pipeline.async_level: found {level}, expected at most {most} with the "
      "servers that sample; lower it, or start newer ones."
    )


def validate_processes(
  config: config_lib.ExperimentConfig, processes: int
) -> None:
  """Checks that several processes can run the configuration.

  Raises:
    ValueError: names the setting, its value and the expected values.
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
  # Written so that NaN is refused too.
  if not found >= least:
    raise ValueError(f"{name}: found {found}, expected at least {least}.")


def _objective(c: config_lib.ObjectiveConfig) -> None:
  _one_of("objective.kl_estimator", c.kl_estimator, grpo.KL_ESTIMATORS)
  _one_of("objective.reduction", c.reduction, grpo.REDUCTIONS)
  _one_of("objective.old_logp", c.old_logp, grpo.OLD_LOGPS)
  _one_of("objective.advantage", c.advantage, grpo.ADVANTAGES)
  if c.importance_cap and c.old_logp == "engine":
    raise ValueError(
      f"objective.importance_cap: found {c.importance_cap} with old_logp "
      "'engine', whose ratio already is to the policy that sampled; set "
      "importance_cap 0 or old_logp 'trainer'."
    )


def _critic(config: config_lib.ExperimentConfig) -> None:
  c, steps = config.critic, config.curriculum.total_steps
  if not config.objective.has_critic:
    if c.reward_kl:
      raise ValueError(
        f"critic.reward_kl: found {c.reward_kl} with objective.advantage "
        f"{config.objective.advantage!r}, where no token has a reward of its "
        "own; set objective.kl_coefficient, or objective.advantage 'gae'."
      )
  elif c.alone_steps >= steps:
    raise ValueError(
      f"critic.alone_steps: found {c.alone_steps}, expected below "
      f"curriculum.total_steps, {steps}: the policy would never learn."
    )


def _pipeline(config: config_lib.ExperimentConfig) -> None:
  c, o, mesh = config.pipeline, config.objective, config.mesh
  if not c.async_level:
    return
  if o.old_logp == "trainer" and not o.importance_cap:
    raise ValueError(
      f"pipeline.async_level: found {c.async_level} with objective.old_logp "
      "'trainer' and importance_cap 0, where nothing tells tokens of older "
      "weights from the trainer's own; set importance_cap (2.0, say) or "
      "old_logp 'engine'."
    )
  if config.engine.kind == "sglang":
    # This process then only publishes weights, which needs no collective.
    return
  trainer = set(mesh.trainer or range(mesh.data * mesh.fsdp * mesh.tensor))
  shared = trainer & set(mesh.rollout or trainer)
  if shared and len(trainer | set(mesh.rollout)) > 1:
    raise ValueError(
      f"pipeline.async_level: found {c.async_level} with device "
      f"{min(shared)} both in mesh.trainer and in mesh.rollout; expected "
      "devices of their own, or one device for both: programs of several "
      "devices that start at the same time may wait for each other."
    )


def _name(name: str) -> None:
  """Checks that the run's name can name its folder."""
  plain = pathlib.PurePath(name).name == name and name not in ("", "..")
  if not plain or not name.isprintable():
    raise ValueError(
      f"name: found {name!r}, expected the name of a folder, without a path to "
      "it (--output takes one)."
    )


def _batch(c: config_lib.BatchConfig) -> None:
  if list(c.row_lengths) != sorted(set(c.row_lengths)):
    raise ValueError(
      f"batch.row_lengths: found {c.row_lengths}, expected ascending lengths."
    )
  _one_of("batch.remat", c.remat, ("none", *decoder.REMAT))
  _one_of(
    "batch.attention",
    c.attention,
    ("auto", *self_attention.IMPLEMENTATIONS),
  )


def _room(config: config_lib.ExperimentConfig) -> None:
  """Checks that a step of only longest episodes fits the micro-batches."""
  c, longest = config.batch, config.batch.row_lengths[-1]
  step = config.questions * config.group // config.curriculum.steps_per_rollout
  size = max(1, config.episode.max_context - 1)  # The first is not predicted.
  row = min(c.max_segments, longest // size)
  rows = batching.rows_per_micro_batch(
    longest, config=c, multiple=config.mesh.data * config.mesh.fsdp
  )
  needed = -(-step // (row * rows))
  if needed > c.max_micro_batches:
    raise ValueError(
      f"batch.max_micro_batches: found {c.max_micro_batches}, expected at "
      f"least {needed}: an optimizer step has {step} episodes of up to "
      f"{config.episode.max_context} tokens, and {row} of them fit a row, "
      f"{rows} rows a micro-batch. Raise it, or batch.micro_batch_tokens."
    )


def _mesh(c: config_lib.MeshConfig) -> None:
  for name in ("trainer", "rollout"):
    indices = getattr(c, name)
    if len(set(indices)) < len(indices):
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


def _rows_over_tensor(
  c: config_lib.MeshConfig, batch: config_lib.BatchConfig
) -> None:
  uneven = [n for n in batch.row_lengths if n % c.tensor]
  if c.sequence_parallel and uneven:
    raise ValueError(
      f"mesh.sequence_parallel: found a row of {uneven[0]} tokens in "
      f"batch.row_lengths, expected multiples of mesh.tensor, {c.tensor}, over "
      "which positions are cut."
    )
