"""Makes the parts of a training from its configuration.

Each part takes the values that it needs; this module and `learner` know the
whole configuration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import curriculum
from anysearch_jax.methods import systems
from anysearch_jax.policy import hf
from anysearch_jax.rollout import engines, episode, searching, trainable_engine
from anysearch_jax.training import (
  collection,
  fingerprint,
  health,
  phases,
  sampler,
  validation,
)
from anysearch_jax.training import learner as learner_lib
from anysearch_jax.training import timeline as timeline_lib


class Parts(NamedTuple):
  """The parts of one training."""

  learner: learner_lib.Learner
  engine: trainable_engine.TrainableEngine
  stream: collection.QuestionStream
  sampler: sampler.Sampler
  monitor: health.HealthMonitor
  phases: phases.Phases


def make(
  config: config_lib.ExperimentConfig,
  *,
  policy: hf.Policy,
  questions: Sequence[types.Question],
  retriever: types.Retriever,
  engine: trainable_engine.TrainableEngine | None,
  timeline: timeline_lib.Timeline,
) -> Parts:
  """Makes the parts; the arguments are those of `loop.Trainer`.

  Raises:
    ValueError: the devices cannot run the configuration, or the engine does not
      support `pipeline.async_level`.
  """
  learner = learner_lib.Learner(config, policy)
  if engine is None:
    engine = engines.make(
      policy._replace(
        params=learner.published(), architecture=learner.architecture
      ),
      config,
      seed=config.seed,
    )
  level = config.pipeline.async_level
  validation.check_engine(engine, async_level=level)
  searching.attach(retriever, engine, policy.tokenizer)
  stream = collection.QuestionStream(
    questions,
    groups=config.questions,
    samples=config.group,
    extra_groups=config.pipeline.extra_groups,
  )
  made = sampler.Sampler(
    engine,
    collection.Collector(
      stream,
      engine=engine,
      retriever=retriever,
      codec=policy.tokenizer,
      config=config.episode,
      slots=config.engine.slots,
      quiet_seconds=config.watch.quiet_seconds,
      timeline=timeline,
      prices=systems.of_episode(config.episode).prices(
        config.evaluation.prices
      ),
    ),
    _fingerprint(config, engine, learner, policy.tokenizer, questions[0]),
    settings=sampler.Settings(
      config.curriculum,
      systems.trained(config),
      config.objective,
      async_level=level,
      max_failed=config.watch.max_failed,
    ),
    state=sampler.SamplerState(
      curriculum.init(config.curriculum, config.seed),
      {"run": Counter(), "engine": Counter()},
    ),
    timeline=timeline,
  )
  monitor = health.HealthMonitor(
    config.watch, stream=stream, curriculum=config.curriculum
  )
  turns = phases.Phases(
    learner,
    engine,
    free_kv=config.engine.free_kv_while_training,
    offload=config.pipeline.offload,
    async_level=level,
    timeline=timeline,
  )
  return Parts(learner, engine, stream, made, monitor, turns)


def _fingerprint(
  config: config_lib.ExperimentConfig,
  engine: trainable_engine.TrainableEngine,
  learner: learner_lib.Learner,
  codec: types.TextCodec,
  question: types.Question,
) -> fingerprint.Fingerprint:
  """Returns what verifies the engine's weights by a question's prompt."""
  _, prompt = episode.prompt(
    question,
    budget=config.curriculum.max_budget,
    scaffold=config.curriculum.phase1_scaffold,
    config=config.episode,
    codec=codec,
  )
  return fingerprint.Fingerprint(
    engine,
    architecture=learner.architecture,
    dtype=config.compute_dtype,
    prompt=prompt,
    bound=config.watch.max_fingerprint_gap,
  )


def prompts(
  question: types.Question,
  codec: types.TextCodec,
  *,
  config: config_lib.EpisodeConfig,
  budget: int,
) -> dict[str, str]:
  """Returns both prompts of a question, as the policy reads them, by name."""
  return {
    name: episode.prompt(
      question, budget=budget, scaffold=scaffold, config=config, codec=codec
    )[0]
    for name, scaffold in (("scaffold", True), ("plain", False))
  }
