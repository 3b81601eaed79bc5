"""Refuses configurations that cannot run, before anything is made.

`check_settings` imports nothing that computes, so a command can call it first.
Later checks need more than the configuration: `check_prompts` the questions and
the tokenizer, `placement.check_devices` the policy's architecture and the
devices.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from anysearch_jax import budgets, types
from anysearch_jax import config as config_lib
from anysearch_jax.config import settings
from anysearch_jax.environment import protocol, spec
from anysearch_jax.host import plugins

if TYPE_CHECKING:
  from anysearch_jax.algorithms import method as method_lib

# Settings of `servers` that vLLM servers cannot follow.
_SGLANG_SETTINGS = ("gateway", "router", "deltas")
# Texts before a tag with which a tokenizer could merge it.
_BEFORE_TAGS = ("a ", "a.", "a\n", "a", "?")


def check_settings(
  config: config_lib.ExperimentConfig,
  *,
  trains: bool = True,
  samples: bool = True,
) -> None:
  """Checks the values of a configuration, each alone and among each other.

  Args:
    config: the configuration.
    trains: whether a policy is trained by reinforcement learning.
    samples: whether an engine samples a policy.

  Raises:
    ValueError: names the setting, its value and the expected values.
  """
  settings.check(config)
  name = config.name
  plain = pathlib.PurePath(name).name == name and name not in ("", "..")
  if not plain or not name.isprintable():
    raise ValueError(
      f"name: found {name!r}, expected the name of a folder, without a path to "
      "it (--output takes one)."
    )
  _lists(config)
  mesh = config.mesh
  if mesh.trainer and mesh.size % len(mesh.trainer):
    raise ValueError(
      f"mesh.trainer: found {len(mesh.trainer)} devices of each process for a "
      f"mesh of {mesh} = {mesh.size}; expected a number that divides it."
    )
  for text in config.evaluation.pairs:
    try:
      budgets.parse(text)
    except ValueError as error:
      raise ValueError(f"evaluation.pairs: {error}") from error
  context = config.episode.max_context
  engine_context = config.engine.max_context
  if samples and config.engine.kind == "jax" and context > engine_context:
    raise ValueError(
      f"episode.max_context {context} exceeds engine.max_context "
      f"{engine_context}; raise that."
    )
  if trains:
    _curriculum(config.curriculum)
    _learning(config)
    _pipeline(config)
    _batches(config)


def validate(
  config: config_lib.ExperimentConfig,
  *,
  environment: spec.Environment,
  method: method_lib.TrainedMethod | None = None,
  samples: bool = True,
  processes: int = 1,
) -> None:
  """Checks a configuration with its environment, engine and reward.

  It needs no device; `check_settings` has passed.

  Args:
    config: the configuration.
    environment: the one that episodes are played in.
    method: the system that is trained; None trains none.
    samples: as for `check_settings`.
    processes: number of processes that train together.

  Raises:
    ValueError: names the setting, its value and the expected values.
  """
  # Imported late, because it imports JAX.
  from anysearch_jax.rollout.jax_engine import kv_memory

  try:
    prices = config.evaluation.prices
  except ValueError as error:
    raise ValueError(f"evaluation.tool_prices: {error}") from error
  for name, _ in prices.tools:
    tools = [tool.name for tool in environment.tools]
    settings.require("evaluation.tool_prices", name, tools)
  if samples and config.engine.has_servers:
    from anysearch_jax.rollout.servers import server as server_lib

    server_lib.validate(config.servers)
    for name in _SGLANG_SETTINGS if config.engine.kind == "vllm" else ():
      if value := getattr(config.servers, name):
        raise ValueError(
          f"servers.{name}: found {value!r} with engine.kind 'vllm', expected "
          "'sglang': vLLM servers have none of it, see docs/rollouts.md."
        )
  elif samples:
    kv_memory.validate(config.engine)
  if method is None:
    return
  kind = config.engine.kind
  level = config.pipeline.async_level
  if level and processes > 1 and kind == "jax":
    raise ValueError(
      f"pipeline.async_level: found {level} in {processes} processes with "
      "engine.kind 'jax', expected 0: processes that sample and train at the "
      "same time would wait for each other in different orders. Set 0, train "
      "in one process, or let servers sample (engine.kind sglang or vllm)."
    )
  scores_alone = kind == "jax" and not level and processes == 1
  is_exact = scores_alone and config.objective.old_logp == "engine"
  if config.engine.exact and not is_exact:
    raise ValueError(
      f"engine.exact: found engine.kind {kind!r}, pipeline.async_level {level} "
      f"and objective.old_logp {config.objective.old_logp!r} in {processes} "
      "processes; expected 'jax', 0 and 'engine' in one process, whose engine "
      "scores each step."
    )
  if config.reward.rel_cost == "dollars" and not environment.prices(prices):
    raise ValueError(
      "reward.rel_cost: found dollars where nothing has a price; expected a "
      "price of searches, of tokens or of a tool in evaluation."
    )
  if config.episode.prompts == "program" and not config.agents.program:
    raise ValueError(
      "episode.prompts: found 'program' without a program, expected --agents "
      "too, or the name of another environment."
    )
  if config.agents.program:
    _programs(config, method)
    is_named = config.agents.port or config.agents.address
    if processes > 1 and kind == "jax" and is_named:
      raise ValueError(
        f"agents.port, agents.address: found {config.agents.port} and "
        f"{config.agents.address!r} with {processes} processes that sample, "
        "expected 0 and nothing: each opens an endpoint of its own."
      )
  if method.turns and (config.objective.has_critic or config.searchless):
    raise ValueError(
      f"method.name: {config.method.name!r} has advantages of turns; found "
      f"objective.advantage {config.objective.advantage!r} and "
      f"{config.searchless} trajectories without searches, expected 'group' "
      "and 0."
    )
  # JAX may be unable to trace a reward of the user's.
  is_own = bool(config.reward.function) or plugins.is_name(config.method.name)
  if not config.checkpoint.keep_best and not is_own:
    return
  from anysearch_jax.training import rewards_and_advantages

  # Calls the user's own reward function once, also if the name is not used.
  metrics = rewards_and_advantages.reward_metrics(
    method,
    samples=config.group,
    max_budget=config.curriculum.max_budget,
    traced=not is_own,
  )
  if config.checkpoint.keep_best:
    best = config.checkpoint.best_metric
    settings.require("checkpoint.best_metric", best, sorted(metrics))


def _programs(
  config: config_lib.ExperimentConfig, method: method_lib.TrainedMethod
) -> None:
  """Checks that nothing needs to know what a program's searches found."""
  if config.objective.baseline == "turn":
    raise ValueError(
      "objective.baseline: found 'turn' with agents.program, expected 'group': "
      "turns are compared by the passages that they saw, and a program does "
      "not tell them."
    )
  if method.steps or method.turns or method.environment.step:
    raise ValueError(
      f"method.name: found {config.method.name!r} with agents.program; expected"
      " a system whose rewards are of whole episodes, without a course of its "
      "own: a program plays the episodes."
    )
  if config.objective.has_critic:
    raise ValueError(
      f"objective.advantage: found {config.objective.advantage!r} with "
      "agents.program, expected 'group': a critic needs one context an episode."
    )
  batch = config.batch
  episodes = (
    config.questions * config.group // config.curriculum.batches_per_rollout
  )
  shorter = 0  # The longest of the shorter rows, in tokens.
  for length in batch.row_lengths:
    # An episode has so many contexts that fit no shorter row. At worst each is
    # in a row of its own.
    longer_contexts = config.episode.max_context // (shorter + 1)
    count = max(1, min(config.agents.segments, longer_contexts))
    row_count = episodes * count
    if length == batch.row_lengths[-1] and count > 1:
      # All contexts of an episode fit one such row. Best fit of falling sizes
      # needs at most 11 / 9 as many rows as the best packing, and one more:
      # https://doi.org/10.1137/0203025
      row_count = min(row_count, math.ceil(episodes * 11 / 9) + 1)
    needed = -(-row_count // batch.rows(length, config.mesh.rows))
    if needed > batch.max_micro_batches:
      raise ValueError(
        f"batch.max_micro_batches: found {batch.max_micro_batches}, expected "
        f"at least {needed} with agents.segments={config.agents.segments}: an "
        f"optimizer step has {episodes} episodes, each of up to {count} "
        f"contexts of {length} tokens."
      )
    shorter = length


def lost_tags(codec: types.TextCodec, tags: Sequence[str]) -> list[str]:
  """Returns the tags that a tokenizer does not give back as they are.

  Args:
    codec: of the policy.
    tags: texts such as `<search>`.
  """

  def survives(tag: str) -> bool:
    samples = (f"{prefix}{tag} b" for prefix in _BEFORE_TAGS)
    return all(tag in codec.decode(codec.encode(text)) for text in samples)

  return [tag for tag in dict.fromkeys(tags) if not survives(tag)]


def check_codec(codec: types.TextCodec, environment: spec.Environment) -> None:
  """Checks that a tokenizer keeps the tags of actions and can end a turn.

  A tag that is a special token of the tokenizer is left out of decoded turns,
  so a policy's searches and answers could not be seen.

  Args:
    codec: of the policy.
    environment: has the tags.

  Raises:
    ValueError: a tag is lost, texts are joined by a space that neither has, or
      no token ends a turn.
  """
  tags = [*protocol.tags(("search", "answer"))]
  for tool in environment.tools:
    marks = (tool.opens, tool.closes)
    tags += [mark for mark in marks if mark in codec.control_tokens]
  missing_tags = lost_tags(codec, tags)
  if missing_tags:
    raise ValueError(
      f"The policy's tokenizer loses {', '.join(missing_tags)}; expected one "
      "that writes plain text as it is. A tag that is a special token must be "
      'an ordinary one: set "special" to false in tokenizer.json.'
    )
  # SentencePiece's tokenizers with a prefix, as Llama 2's, begin every text by
  # a space, also that of the environment in the middle of a response.
  joined_text = codec.decode([*codec.encode("a"), *codec.encode("\nb")])
  if "a \n" in joined_text:
    raise ValueError(
      "The policy's tokenizer adds a space where two texts are joined (found "
      f"{joined_text!r} of 'a' and '\\nb'); expected one without a prefix "
      "space, as the byte-level tokenizers of Qwen and Llama 3."
    )
  if not codec.end_of_turn_ids:
    raise ValueError(
      "Found no token that ends a turn; name eos_token_id in "
      "generation_config.json of the policy's folder."
    )


def check_prompts(
  questions: Sequence[types.Question],
  codec: types.TextCodec,
  *,
  config: config_lib.EpisodeConfig,
  environment: spec.Environment,
  max_budget: int,
) -> None:
  """Checks the tokenizer, and that the prompt of a question fits the context.

  The question is that of median length.

  A single question that is too long only ends its own episodes.

  Args:
    questions: all questions of the training.
    codec: of the policy.
    config: has the limit on the context.
    environment: makes the prompts.
    max_budget: the budget that the prompts name.

  Raises:
    ValueError: there is no question, or no room for a token of the model, the
      chat template leaves out the question, or as for `check_codec`.
  """
  if not questions:
    raise ValueError("Found no question, expected at least one.")
  from anysearch_jax.rollout import episode

  check_codec(codec, environment)
  by_length = sorted(questions, key=lambda question: len(question.text))
  median = by_length[len(by_length) // 2]
  prompts = [
    episode.prompt(
      median,
      budget=max_budget,
      scaffold=scaffold,
      environment=environment,
      codec=codec,
    )
    for scaffold in (True, False)
  ]
  markers = (*codec.control_tokens, *environment.all_markers)
  shown_question = protocol.neutralise(median.text, markers).strip()
  if not all(shown_question in text for text, _ in prompts):
    raise ValueError(
      "The chat template leaves the question out of the prompt; expected one "
      "that shows the user's message; look at chat_template in the policy's "
      "folder."
    )
  tokens = max(len(ids) for _, ids in prompts)
  if tokens >= config.max_context:
    raise ValueError(
      f"episode.max_context: found {config.max_context}, expected more than "
      f"the {tokens} tokens of the prompt of {median.text[:80]!r}; raise it "
      "(and engine.max_context, batch.row_lengths)."
    )


def _lists(config: config_lib.ExperimentConfig) -> None:
  """Refuses lists that name something twice, or are not in order."""
  for name, values in (
    ("evaluation.budgets", config.evaluation.budgets),
    ("evaluation.pairs", config.evaluation.pairs),
    ("evaluation.seeds", config.evaluation.seeds),
    ("mesh.trainer", config.mesh.trainer),
    ("mesh.rollout", config.mesh.rollout),
  ):
    if len(set(values)) < len(values):
      raise ValueError(f"{name}: found {values}, expected each once.")
  for name, values in (
    ("batch.row_lengths", config.batch.row_lengths),
    ("curriculum.token_levels", config.curriculum.token_levels),
  ):
    if list(values) != sorted(set(values)):
      raise ValueError(f"{name}: found {values}, expected ascending numbers.")


def _curriculum(c: config_lib.CurriculumConfig) -> None:
  """Refuses levels and numbers of steps that do not fit together."""
  if c.token_levels and c.fixed_budget >= 0:
    raise ValueError(
      f"Found the token_levels {c.token_levels} with a fixed_budget of "
      f"{c.fixed_budget}; expected one of them. A fixed budget draws no pair."
    )
  if c.phase1_steps > c.total_steps:
    raise ValueError(
      f"Found {c.phase1_steps} phase1_steps in {c.total_steps} total_steps; "
      "expected at most all of them. Lower phase1_steps."
    )
  for name, unit, reason in (
    ("total_steps", "steps_per_rollout", "a rollout is used up whole"),
    ("steps_per_rollout", "epochs", "every pass has as many steps"),
    ("phase1_steps", "max_budget", "every level gets as many steps"),
  ):
    steps = getattr(c, name)
    divisor = getattr(c, unit)
    if steps % divisor:
      raise ValueError(
        f"Found {steps} {name}; expected a multiple of {unit}, {divisor}: "
        f"{reason}."
      )
  level_steps = c.phase1_steps // c.max_budget
  if level_steps % c.steps_per_rollout:
    raise ValueError(
      f"Found {level_steps} steps per level (phase1_steps / max_budget); "
      f"expected a multiple of steps_per_rollout, {c.steps_per_rollout}: a "
      "rollout has one level. Change phase1_steps."
    )


def _learning(config: config_lib.ExperimentConfig) -> None:
  """Refuses settings of sampling, adapters, objective and critic."""
  sampling = config.sampling
  # With these the recorded log-probabilities are not those of the distribution
  # that was sampled.
  if sampling.temperature <= 0 or sampling.top_p < 1 or sampling.top_k:
    raise ValueError(
      f"sampling: found temperature {sampling.temperature}, top_p "
      f"{sampling.top_p}, top_k {sampling.top_k}; training needs temperature > "
      "0, top_p 1 and top_k 0 (the others are for evaluation)."
    )
  targets = config.lora.targets
  supported = config_lib.LoraConfig.targets
  repeated = len(set(targets)) < len(targets)
  if (
    {*targets} - {*supported} or repeated or (config.lora.rank and not targets)
  ):
    raise ValueError(
      f"lora.targets: found {', '.join(targets) or 'none'}; expected some of "
      f"{', '.join(supported)}, each once."
    )
  objective = config.objective
  critic = config.critic
  if objective.baseline != "group" and objective.has_critic:
    raise ValueError(
      f"objective.baseline: found {objective.baseline!r} with "
      "objective.advantage 'gae', whose baseline is the critic; set one of "
      "them to 'group'."
    )
  cap = objective.importance_cap
  clip = 1 + objective.clip_high
  if objective.old_logp == "engine" and 0 < cap < clip:
    raise ValueError(
      f"objective.importance_cap: found {cap} with old_logp 'engine', where it "
      f"bounds the ratio; expected 0 (off) or at least {clip:g}, the end of "
      "the clip range."
    )
  if critic.reward_kl and not objective.has_critic:
    raise ValueError(
      f"critic.reward_kl: found {critic.reward_kl} with objective.advantage "
      f"{objective.advantage!r}, where no token has a reward of its own; set "
      "objective.kl_coefficient, or objective.advantage 'gae'."
    )
  steps = config.curriculum.total_steps
  if objective.has_critic and critic.alone_steps >= steps:
    raise ValueError(
      f"critic.alone_steps: found {critic.alone_steps}, expected below "
      f"curriculum.total_steps, {steps}: the policy would never learn."
    )
  if config.group < 2 and not objective.has_critic:
    raise ValueError(
      f"group: found {config.group}, expected at least 2: an advantage is a "
      "difference from the others of the group."
    )
  if config.searchless and objective.baseline != "group":
    raise ValueError(
      f"objective.baseline: found {objective.baseline!r} with "
      f"{config.searchless} trajectories without searches, which are a group "
      "of their own; set it to 'group'."
    )
  if config.searchless and not 2 <= config.searchless <= config.group - 2:
    raise ValueError(
      f"searchless: found {config.searchless} of {config.group} trajectories; "
      "expected 0, or at least 2 with a search and 2 without."
    )


def _pipeline(config: config_lib.ExperimentConfig) -> None:
  """Refuses sampling and training that cannot alternate or overlap as asked."""
  pipeline = config.pipeline
  kind = config.engine.kind
  objective = config.objective
  level = pipeline.async_level
  if level and objective.old_logp == "trainer" and not objective.importance_cap:
    raise ValueError(
      f"pipeline.async_level: found {level} with objective.old_logp 'trainer' "
      "and importance_cap 0, where nothing tells tokens of older weights from "
      "the trainer's own; set importance_cap (2.0, say) or old_logp 'engine'."
    )
  if pipeline.partial and not (level and config.engine.has_servers):
    raise ValueError(
      f"pipeline.partial: found True with pipeline.async_level {level} and "
      f"engine.kind {kind!r}, expected at least 1 and 'sglang' or 'vllm': "
      "only then are there new weights while servers sample."
    )
  if level and config.servers_share:
    raise ValueError(
      f"servers.colocated: found True with pipeline.async_level {level}, "
      "expected 0: on the trainer's GPUs servers sample while nothing trains."
    )
  if pipeline.offload != "none" and (
    level or not (kind == "jax" or config.servers_share)
  ):
    raise ValueError(
      f"pipeline.offload: found {pipeline.offload!r} with pipeline.async_level "
      f"{level} and engine.kind {kind!r}, expected 0 and 'jax', or servers "
      "with servers.colocated: only then do sampling and training take turns "
      "on the same devices. Set pipeline.offload none."
    )
  turn = config.episode.turn_deadline
  deadline = config.servers.deadline
  # Otherwise the driver gives up turns that the engine still waits for.
  if config.engine.has_servers and turn < deadline:
    raise ValueError(
      f"episode.turn_deadline: found {turn}, expected at least {deadline}."
    )
  # With servers this process only publishes weights, without a collective.
  mesh = config.mesh
  trainer = {*mesh.trainer} or {*range(mesh.size)}
  shared = trainer & ({*mesh.rollout} or trainer)
  if kind == "jax" and level and shared and len(trainer | {*mesh.rollout}) > 1:
    raise ValueError(
      f"pipeline.async_level: found {level} with device {min(shared)} both in "
      "mesh.trainer and in mesh.rollout; expected devices of their own, or one "
      "device for both: programs of several devices that start at the same "
      "time may wait for each other."
    )


def _batches(config: config_lib.ExperimentConfig) -> None:
  """Checks that an optimizer step of only longest episodes fits its batch."""
  batch = config.batch
  mesh = config.mesh
  curriculum = config.curriculum
  trajectories = config.questions * config.group
  if trajectories % curriculum.batches_per_rollout:
    raise ValueError(
      f"{config.questions} questions x {config.group} samples = {trajectories} "
      "trajectories do not divide into "
      f"{curriculum.batches_per_rollout} batches "
      "(curriculum.steps_per_rollout / curriculum.epochs)."
    )
  shards = mesh.context * (mesh.tensor if mesh.sequence_parallel else 1)
  if uneven := [n for n in batch.row_lengths if n % shards]:
    raise ValueError(
      f"batch.row_lengths: found a row of {uneven[0]} tokens, expected "
      f"multiples of {shards}, over which positions are cut (mesh.context, and "
      "mesh.tensor with mesh.sequence_parallel)."
    )
  tokens = config.episode.max_context
  longest = batch.row_lengths[-1]
  if tokens > longest + 1:  # The first token is not predicted.
    raise ValueError(
      f"episode.max_context {tokens} exceeds the longest training row, "
      f"batch.row_lengths[-1] {longest}."
    )
  episodes = trajectories // curriculum.batches_per_rollout
  row_segments = min(batch.max_segments, longest // max(1, tokens - 1))
  rows = batch.rows(longest, mesh.rows)
  needed = -(-episodes // (row_segments * rows))
  if needed > batch.max_micro_batches:
    raise ValueError(
      f"batch.max_micro_batches: found {batch.max_micro_batches}, expected at "
      f"least {needed}: an optimizer step has {episodes} episodes of up to "
      f"{tokens} tokens, and {row_segments} of them fit a row, {rows} rows a "
      "micro-batch. Raise it, or batch.micro_batch_tokens."
    )
