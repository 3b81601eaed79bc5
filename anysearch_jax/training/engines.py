"""Makes the engine that a run's configuration names."""

from __future__ import annotations

from anysearch_jax import config as config_lib
from anysearch_jax.methods import systems
from anysearch_jax.policy import hf
from anysearch_jax.rollout.jax_engine import engine
from anysearch_jax.rollout.sglang import engine as sglang
from anysearch_jax.training import collection, learner


def make(
  config: config_lib.ExperimentConfig,
  policy: hf.Policy,
  learning: learner.Learner,
) -> collection.Engine:
  """Makes an engine that has the learner's weights, as version 0.

  Args:
    config: of the run.
    policy: the initial policy, for its tokenizer and files.
    learning: the learner whose weights are published to the engine.
  """
  placed, a = learning.placement, learning.architecture
  params = learning.published()
  if config.engine.kind == "sglang":
    return sglang.SglangEngine(
      policy._replace(params=params, architecture=a),
      config=config.sglang,
      sampling=config.sampling,
      dtype=placed.dtype,
    )
  return engine.JaxEngine(
    params,
    a,
    policy.tokenizer,
    config=config.engine,
    sampling=config.sampling,
    seed=config.seed,
    dtype=placed.dtype,
    mesh=placed.rollout,
    stop=systems.environment(config.episode.prompts).stops,
  )
