"""Refuses configurations that cannot run, before anything is made.

`check` reads the values alone and imports nothing that computes, so a command
can call it first. `validate` calls it and then asks the systems, the engine and
the rewards. What the configuration does not decide is checked when it is known:
`check_prompts` by the questions and the tokenizer, `placement.check` by the
policy's architecture and the devices.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.config import settings


def check(
  config: config_lib.ExperimentConfig,
  *,
  trains: bool = True,
  samples: bool = True,
) -> None:
  """Checks the values of a configuration, each alone and among each other.

  Args:
    config: the whole configuration.
    trains: whether a policy is trained by reinforcement learning.
    samples: whether an engine samples a policy.

  Raises:
    ValueError: names the setting, its value and the expected values.
  """
  settings.check(config)
  _name(config.name)
  _mesh(config.mesh)
  _evaluation(config.evaluation)
  if samples and config.engine.kind == "jax":
    if config.episode.max_context > config.engine.max_context:
      raise ValueError(
        f"episode.max_context {config.episode.max_context} exceeds "
        f"engine.max_context {config.engine.max_context}; raise that."
      )
  if trains:
    _training(config)


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
  check(config, trains=trains, samples=samples)
  # These rooms import JAX.
  from anysearch_jax.methods import systems
  from anysearch_jax.rollout import control
  from anysearch_jax.rollout.jax_engine import kv_memory

  systems.of_episode(config.episode)
  rule = control.of(config.episode)
  if trains and rule is not None:
    raise ValueError(
      f"config.episode.control: found {config.episode.control!r} in a "
      "training; expected none, because a rule steers a policy that is trained "
      "already. Evaluate with it."
    )
  _tool_prices(config)
  if samples and config.engine.kind == "sglang":
    from anysearch_jax.rollout.sglang import server as sglang_server

    sglang_server.validate(config.sglang)
  elif samples:
    kv_memory.validate(config.engine)
  if not trains:
    return
  if config.pipeline.async_level and processes > 1:
    raise ValueError(
      f"pipeline.async_level: found {config.pipeline.async_level} in "
      f"{processes} processes, expected 0: processes that sample and train at "
      "the same time would wait for each other in different orders. Set 0, or "
      "train in one process."
    )
  _prices(config)
  name = config.method.name
  method = systems.trained(config)
  known = systems.prompts_of(name)
  _one_of(
    f"episode.prompts of method.name {name}", config.episode.prompts, known
  )
  own = systems.has_own_reward(config)
  if not config.checkpoint.keep_best and not own:
    return
  from anysearch_jax.training import rewards_and_advantages

  # Calls the user's own reward function once, also if the name is not used.
  metrics = rewards_and_advantages.reward_metrics(
    method,
    samples=config.group,
    max_budget=config.curriculum.max_budget,
    traced=not own,
  )
  if config.checkpoint.keep_best:
    best = config.checkpoint.best_metric
    _one_of("checkpoint.best_metric", best, sorted(metrics))


def _training(config: config_lib.ExperimentConfig) -> None:
  """Checks the settings of a training."""
  c, objective, batch = config.curriculum, config.objective, config.batch
  _curriculum(c)
  _sampling(config.sampling)
  _lora(config.lora)
  _objective(objective)
  _critic(config.critic, objective, steps=c.total_steps)
  if list(batch.row_lengths) != sorted(set(batch.row_lengths)):
    raise ValueError(
      f"batch.row_lengths: found {batch.row_lengths}, expected ascending "
      "lengths."
    )
  _rows(config.mesh, batch)
  _async_level(config.pipeline.async_level, objective)
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
    _separate(config.pipeline.async_level, config.mesh)
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
  _room(
    batch,
    multiple=config.mesh.data * config.mesh.fsdp,
    episodes=trajectories // c.batches_per_rollout,
    tokens=config.episode.max_context,
  )


def _prices(config: config_lib.ExperimentConfig) -> None:
  from anysearch_jax.methods import systems

  cost = config.reward.rel_cost
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
  from anysearch_jax.methods import systems

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
  from anysearch_jax.rollout import episode

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


def _one_of(name: str, found: str, known: Sequence[str]) -> None:
  if found not in known:
    raise ValueError(
      f"{name}: found {found!r}, expected one of {', '.join(known)}."
    )


def _at_least(name: str, found: float, least: float) -> None:
  # Written so that NaN is refused too.
  if not found >= least:
    raise ValueError(f"{name}: found {found}, expected at least {least}.")


def _curriculum(c: config_lib.CurriculumConfig) -> None:
  """Refuses a curriculum whose numbers of steps do not fit together.

  Args:
    c: its numbers are within their ranges.

  Raises:
    ValueError: the message names the value and what was expected.
  """
  if list(c.token_levels) != sorted(set(c.token_levels)):
    raise ValueError(
      f"Found the token_levels {c.token_levels}; expected ascending numbers."
    )
  if c.token_levels and c.fixed_budget >= 0:
    raise ValueError(
      f"Found the token_levels {c.token_levels} with a fixed_budget of "
      f"{c.fixed_budget}; expected one of them. A fixed budget draws no pair."
    )
  _cents(c)
  if c.phase1_steps > c.total_steps:
    raise ValueError(
      f"Found {c.phase1_steps} phase1_steps in {c.total_steps} total_steps; "
      "expected at most all of them. Lower phase1_steps."
    )
  if c.total_steps % c.steps_per_rollout:
    raise ValueError(
      f"Found {c.total_steps} total_steps; expected a multiple of "
      f"steps_per_rollout, {c.steps_per_rollout}: a rollout is used up whole."
    )
  if c.steps_per_rollout % c.epochs:
    raise ValueError(
      f"Found {c.steps_per_rollout} steps_per_rollout; expected a multiple of "
      f"epochs, {c.epochs}: every pass over a rollout has as many steps."
    )
  if c.phase1_steps % c.max_budget:
    raise ValueError(
      f"Found {c.phase1_steps} phase1_steps; expected a multiple of "
      f"max_budget, {c.max_budget}: every level gets as many steps."
    )
  level_steps = c.phase1_steps // c.max_budget
  if level_steps % c.steps_per_rollout:
    raise ValueError(
      f"Found {level_steps} steps per level (phase1_steps / max_budget); "
      f"expected a multiple of steps_per_rollout, {c.steps_per_rollout}: a "
      "rollout has one level. Change phase1_steps."
    )


def _cents(c: config_lib.CurriculumConfig) -> None:
  if not c.cent_levels:
    return
  if list(c.cent_levels) != sorted(set(c.cent_levels)):
    raise ValueError(
      f"Found the cent_levels {c.cent_levels}; expected ascending numbers."
    )
  if len(c.cent_levels) != c.max_budget:
    raise ValueError(
      f"Found {len(c.cent_levels)} cent_levels and a max_budget of "
      f"{c.max_budget}; expected as many: each level is one cap on cents."
    )
  if c.token_levels or c.fixed_budget >= 0:
    raise ValueError(
      f"Found the cent_levels {c.cent_levels} with token_levels or a "
      "fixed_budget; expected one of the three."
    )


def _sampling(config: config_lib.SamplingConfig) -> None:
  """Raises ValueError for settings that training cannot use.

  With temperature 0, top-p or top-k the recorded log-probabilities are not
  those of the distribution that was sampled.
  """
  if config.temperature <= 0 or config.top_p < 1 or config.top_k:
    raise ValueError(
      f"sampling: found temperature {config.temperature}, top_p "
      f"{config.top_p}, top_k {config.top_k}; training needs temperature > 0, "
      "top_p 1 and top_k 0 (the others are for evaluation)."
    )


def _lora(c: config_lib.LoraConfig) -> None:
  known = config_lib.LoraConfig.targets
  repeated = len(set(c.targets)) < len(c.targets)
  if set(c.targets) - set(known) or repeated or (c.rank and not c.targets):
    raise ValueError(
      f"lora.targets: found {', '.join(c.targets) or 'none'}; expected some of "
      f"{', '.join(known)}, each once."
    )


def _mesh(c: config_lib.MeshConfig) -> None:
  """Checks that the devices are distinct and that their number fits the axes.

  Raises:
    ValueError: names the setting, its value and the expected values.
  """
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


def _rows(c: config_lib.MeshConfig, batch: config_lib.BatchConfig) -> None:
  """Checks that sequence parallelism can cut every packed row evenly.

  Raises:
    ValueError: names a row length that the tensor axis does not divide.
  """
  uneven = [n for n in batch.row_lengths if n % c.tensor]
  if c.sequence_parallel and uneven:
    raise ValueError(
      f"mesh.sequence_parallel: found a row of {uneven[0]} tokens in "
      f"batch.row_lengths, expected multiples of mesh.tensor, {c.tensor}, over "
      "which positions are cut."
    )


def _separate(level: int, mesh: config_lib.MeshConfig) -> None:
  """Checks that sampling and training, at the same time, share no devices.

  Args:
    level: `pipeline.async_level`, for the message.
    mesh: has the devices of both.

  Raises:
    ValueError: names a device that is in both.
  """
  trainer = set(mesh.trainer or range(mesh.data * mesh.fsdp * mesh.tensor))
  shared = trainer & set(mesh.rollout or trainer)
  if shared and len(trainer | set(mesh.rollout)) > 1:
    raise ValueError(
      f"pipeline.async_level: found {level} with device {min(shared)} both in "
      "mesh.trainer and in mesh.rollout; expected devices of their own, or one "
      "device for both: programs of several devices that start at the same "
      "time may wait for each other."
    )


def _room(
  config: config_lib.BatchConfig,
  *,
  multiple: int,
  episodes: int,
  tokens: int,
) -> None:
  """Checks that an optimizer step of only longest episodes fits its batch.

  Args:
    config: the shapes of the batch.
    multiple: the number of devices that rows are sharded over.
    episodes: of a step.
    tokens: of the longest episode.

  Raises:
    ValueError: it does not; names the setting to raise.
  """
  longest = config.row_lengths[-1]
  if tokens > longest + 1:  # The first token is not predicted.
    raise ValueError(
      f"episode.max_context {tokens} exceeds the longest training row, "
      f"batch.row_lengths[-1] {longest}."
    )
  row = min(config.max_segments, longest // max(1, tokens - 1))
  rows = config.rows(longest, multiple)
  needed = -(-episodes // (row * rows))
  if needed > config.max_micro_batches:
    raise ValueError(
      f"batch.max_micro_batches: found {config.max_micro_batches}, expected at "
      f"least {needed}: an optimizer step has {episodes} episodes of up to "
      f"{tokens} tokens, and {row} of them fit a row, {rows} rows a "
      "micro-batch. Raise it, or batch.micro_batch_tokens."
    )


def _objective(c: config_lib.ObjectiveConfig) -> None:
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


def _async_level(level: int, objective: config_lib.ObjectiveConfig) -> None:
  if not level:
    return
  if objective.old_logp == "trainer" and not objective.importance_cap:
    raise ValueError(
      f"pipeline.async_level: found {level} with objective.old_logp 'trainer' "
      "and importance_cap 0, where nothing tells tokens of older weights from "
      "the trainer's own; set importance_cap (2.0, say) or old_logp 'engine'."
    )


def _offload(config: config_lib.PipelineConfig, engine: str) -> None:
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
