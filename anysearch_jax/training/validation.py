"""Refuses configurations that cannot run: one call before anything is made.

A command calls `validate` once, and nothing checks these values again. What the
configuration alone does not decide is checked when it is known, once too:
`check_prompts` by the questions and the tokenizer, `check_engine` by the engine
that samples, `placement.check` by the policy's architecture and the devices.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import curriculum, grpo, rewards
from anysearch_jax.config import ranges
from anysearch_jax.methods import method as method_lib
from anysearch_jax.methods import otc, systems
from anysearch_jax.policy import decoder, lora
from anysearch_jax.policy.attention import paged_attention, self_attention
from anysearch_jax.rollout import control, episode, trainable_engine
from anysearch_jax.rollout.jax_engine import kv_memory, sampling
from anysearch_jax.training import (
  batching,
  checkpoint,
  mesh_checks,
  placement,
  rewards_and_advantages,
  turn_baselines,
)


def validate(
  config: config_lib.ExperimentConfig,
  *,
  trains: bool = True,
  samples: bool = True,
  processes: int = 1,
) -> None:
  """Checks a configuration before anything is allocated.

  It does not look at the machine's devices: the planner validates
  configurations for hardware that is not there.

  Args:
    config: the whole configuration.
    trains: whether a policy is trained by reinforcement learning.
    samples: whether an engine samples a policy.
    processes: number of processes that train together.

  Raises:
    ValueError: names the setting, its value and the expected values.
  """
  ranges.check(config)
  _name(config.name)
  _one_of("compute_dtype", config.compute_dtype, ("float32", "bfloat16"))
  systems.of_episode(config.episode)
  rule = control.of(config.episode)
  if trains and rule is not None:
    raise ValueError(
      f"config.episode.control: found {config.episode.control!r} in a "
      "training; expected none, because a rule steers a policy that is trained "
      "already. Evaluate with it."
    )
  mesh_checks.check(config.mesh)
  _evaluation(config.evaluation)
  _tool_prices(config)
  if samples:
    _engine(config.engine, config.sglang, config.episode)
  if trains:
    _training(config, processes)


def _training(config: config_lib.ExperimentConfig, processes: int) -> None:
  """Checks the settings of a training."""
  c, objective, batch = config.curriculum, config.objective, config.batch
  curriculum.validate(c)
  sampling.validate_training(config.sampling)
  checkpoint.validate(config.checkpoint)
  lora.validate(config.lora)
  _one_of("reward.gamma_mode", config.reward.gamma_mode, rewards.GAMMA_MODES)
  _rel_cost(config)
  _one_of("method.otc.form", config.method.otc.form, otc.FORMS)
  _objective(objective)
  _critic(config.critic, objective, steps=c.total_steps)
  method = systems.trained(config)
  _method(config.method.name, config.episode.prompts)
  _best_metric(
    config.checkpoint,
    method,
    samples=config.group,
    max_budget=c.max_budget,
    own=bool(config.reward.function),
  )
  _batch(batch)
  mesh_checks.check_rows(config.mesh, batch)
  _async_level(config.pipeline.async_level, objective, processes)
  _offload(config.pipeline, config.engine.kind)
  if config.engine.kind == "sglang":
    # Otherwise the driver gives up turns that the engine still waits for.
    _at_least(
      "episode.turn_deadline",
      config.episode.turn_deadline,
      config.sglang.deadline,
    )
  elif config.pipeline.async_level:
    # With servers this process only publishes weights, without a collective.
    mesh_checks.check_separate(config.pipeline.async_level, config.mesh)
  if config.group < 2 and not objective.has_critic:
    raise ValueError(
      f"group: found {config.group}, expected at least 2: an advantage is a "
      "difference from the others of the group."
    )
  trajectories = config.questions * config.group
  if trajectories % c.batches_per_rollout:
    raise ValueError(
      f"{config.questions} questions x {config.group} samples = {trajectories} "
      f"trajectories do not divide into {c.batches_per_rollout} batches "
      "(curriculum.steps_per_rollout / curriculum.epochs)."
    )
  batching.check_room(
    batch,
    multiple=config.mesh.data * config.mesh.fsdp,
    episodes=trajectories // c.batches_per_rollout,
    tokens=config.episode.max_context,
  )


def _method(name: str, prompts: str) -> None:
  """Checks that the method can be trained as configured."""
  known = tuple(systems.get(name).environments)
  _one_of(f"episode.prompts of method.name {name}", prompts, known)


def _best_metric(
  config: config_lib.CheckpointConfig,
  method: method_lib.TrainedMethod,
  *,
  samples: int,
  max_budget: int,
  own: bool,
) -> None:
  """Checks a name that is otherwise only used after the first rollout.

  Calls the user's own reward function once, also if the name is not used.
  """
  if not config.keep_best and not own:
    return
  known = rewards_and_advantages.reward_metrics(
    method, samples=samples, max_budget=max_budget, traced=not own
  )
  if config.keep_best:
    _one_of("checkpoint.best_metric", config.best_metric, sorted(known))


def _rel_cost(config: config_lib.ExperimentConfig) -> None:
  cost = config.reward.rel_cost
  _one_of("reward.rel_cost", cost, rewards.RELATIVE_COSTS)
  prices = systems.of_episode(config.episode).prices(config.evaluation.prices)
  if prices:
    return
  for name, found in (
    ("reward.rel_cost: found dollars", cost == "dollars"),
    ("curriculum.cent_levels: found caps", bool(config.curriculum.cent_levels)),
  ):
    if found:
      raise ValueError(
        f"{name} where nothing has a price; expected a price of searches, of "
        "tokens or of a tool in evaluation."
      )


def _tool_prices(config: config_lib.ExperimentConfig) -> None:
  names = [each.name for each in systems.of_episode(config.episode).tools]
  try:
    priced = config.evaluation.prices.tools
  except ValueError as error:
    raise ValueError(f"evaluation.tool_prices: {error}") from error
  for name, _ in priced:
    _one_of("evaluation.tool_prices", name, names)


def _evaluation(config: config_lib.EvaluationConfig) -> None:
  values: tuple[int, ...]
  for name, values in (("budgets", config.budgets), ("seeds", config.seeds)):
    if len(set(values)) < len(values):
      raise ValueError(
        f"evaluation.{name}: found {values}, expected each once."
      )
  for text in config.pairs:
    try:
      budgets.parse(text)
    except ValueError as error:
      raise ValueError(f"evaluation.pairs: {error}") from error
  _one_of("evaluation.scorer", config.scorer, ("paper", "official"))


def _engine(
  config: config_lib.EngineConfig,
  sglang: config_lib.SglangConfig,
  episode: config_lib.EpisodeConfig,
) -> None:
  """Checks that the engine can sample the episodes."""
  _one_of("engine.kind", config.kind, ("jax", "sglang"))
  if config.kind == "sglang":
    # Imported late: the in-process engine needs no HTTP.
    from anysearch_jax.rollout.sglang import server as sglang_server

    sglang_server.validate(sglang)
    return
  kv_memory.validate(config)
  _one_of(
    "engine.attention",
    config.attention,
    ("auto", *paged_attention.IMPLEMENTATIONS),
  )
  if episode.max_context > config.max_context:
    raise ValueError(
      f"episode.max_context {episode.max_context} exceeds engine.max_context "
      f"{config.max_context}; raise that."
    )


def check_prompts(
  questions: Sequence[types.Question],
  codec: types.TextCodec,
  *,
  config: config_lib.EpisodeConfig,
  max_budget: int,
) -> None:
  """Checks that the median question's prompt fits the context.

  A single question that is too long only ends its own episodes.

  Args:
    questions: that will be asked.
    codec: tokenizer of the policy.
    config: prompts and limits of the episodes.
    max_budget: the budget that the prompts name.

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
        budget=max_budget,
        scaffold=scaffold,
        config=config,
        codec=codec,
      )[1]
    )
    for scaffold in (True, False)
  )
  if tokens >= config.max_context:
    raise ValueError(
      f"episode.max_context: found {config.max_context}, expected more than "
      f"the {tokens} tokens of the prompt of {middle.text[:80]!r}; raise it "
      "(and engine.max_context, batch.row_lengths)."
    )


def check_engine(
  engine: trainable_engine.TrainableEngine, *, async_level: int
) -> None:
  """Checks that an engine supports `pipeline.async_level`.

  Raises:
    ValueError: names the setting, its value and the expected values.
  """
  most = engine.max_async_level
  if async_level > most:
    raise ValueError(
      f"pipeline.async_level: found {async_level}, expected at most {most} "
      "with the servers that sample; lower it, or start newer ones."
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
  _one_of("objective.normalize", c.normalize, grpo.NORMALIZERS)
  _one_of("objective.reduction", c.reduction, grpo.REDUCTIONS)
  _one_of("objective.old_logp", c.old_logp, grpo.OLD_LOGPS)
  _one_of("objective.advantage", c.advantage, grpo.ADVANTAGES)
  _one_of("objective.baseline", c.baseline, turn_baselines.BASELINES)
  if c.baseline == "turn" and c.has_critic:
    raise ValueError(
      "objective.baseline: found 'turn' with objective.advantage 'gae', whose "
      "baseline is the critic; set one of them to 'group'."
    )
  if c.importance_cap and c.old_logp == "engine":
    raise ValueError(
      f"objective.importance_cap: found {c.importance_cap} with old_logp "
      "'engine', whose ratio already is to the policy that sampled; set "
      "importance_cap 0 or old_logp 'trainer'."
    )


def _critic(
  config: config_lib.CriticConfig,
  objective: config_lib.ObjectiveConfig,
  *,
  steps: int,
) -> None:
  if not objective.has_critic:
    if config.reward_kl:
      raise ValueError(
        f"critic.reward_kl: found {config.reward_kl} with objective.advantage "
        f"{objective.advantage!r}, where no token has a reward of its own; set "
        "objective.kl_coefficient, or objective.advantage 'gae'."
      )
  elif config.alone_steps >= steps:
    raise ValueError(
      f"critic.alone_steps: found {config.alone_steps}, expected below "
      f"curriculum.total_steps, {steps}: the policy would never learn."
    )


def _async_level(
  level: int, objective: config_lib.ObjectiveConfig, processes: int
) -> None:
  if not level:
    return
  if objective.old_logp == "trainer" and not objective.importance_cap:
    raise ValueError(
      f"pipeline.async_level: found {level} with objective.old_logp 'trainer' "
      "and importance_cap 0, where nothing tells tokens of older weights from "
      "the trainer's own; set importance_cap (2.0, say) or old_logp 'engine'."
    )
  if processes > 1:
    raise ValueError(
      f"pipeline.async_level: found {level} in {processes} processes, expected "
      "0: processes that sample and train at the same time would wait for each "
      "other in different orders. Set 0, or train in one process."
    )


def _offload(config: config_lib.PipelineConfig, engine: str) -> None:
  _one_of("pipeline.offload", config.offload, tuple(placement.OFFLOADED))
  if config.offload != "none" and (config.async_level or engine != "jax"):
    raise ValueError(
      f"pipeline.offload: found {config.offload!r} with pipeline.async_level "
      f"{config.async_level} and engine.kind {engine!r}, expected 0 and 'jax': "
      "only then do sampling and training take turns on the same devices. Set "
      "pipeline.offload none."
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
