"""Loads the parts of an agent: a policy and a retriever."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Collection
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import settings as config_settings
from anysearch_jax.host import json_files
from anysearch_jax.host import plugins as plugins_lib
from anysearch_jax.methods import systems
from anysearch_jax.policy import converted
from anysearch_jax.rollout import endpoints, searching
from anysearch_jax.training import validation

# Defaults without a configuration: tokens of an episode, and questions that are
# sampled in one batch.
_CONTEXT = 8192
_SLOTS = 16
# Stands for the questions that users will ask. No chat template contains it.
ANY_QUESTION = types.Question("any", "Who asks this?", ())
_SEED = 0  # Of the engine; the seed of a question is part of its address.


def load(
  policy: str | os.PathLike | endpoints.Endpoint,
  *,
  retriever: types.Retriever | str | os.PathLike,
  config: config_lib.ExperimentConfig | None,
  plugins: Collection[str] = (),
) -> dict[str, Any]:
  """Returns the keyword arguments of an agent.

  Args:
    policy, retriever, config, plugins: as for `agent.Agent.load`.

  Raises:
    ValueError, types.EngineError, types.RetrievalError: as `agent.Agent.load`.
  """
  engine: Any
  if isinstance(policy, endpoints.Endpoint):
    config = with_answer_room(config or endpoints.default_config())
    searcher = searching.BatchingRetriever(
      _open_retriever(retriever), config.search
    )
    connection = endpoints.open_endpoint(
      policy,
      episode=config.episode,
      sampling=config.sampling,
      concurrency=config.engine.slots,
    )
    config = dataclasses.replace(config, episode=connection.fit(config.episode))
    engine = connection.engine
    codec = connection.codec
    try:
      _check_prompts(codec, config)
    except ValueError:
      engine.close()
      raise
  else:
    # Imports JAX, which a model elsewhere needs not.
    from anysearch_jax.policy import hf, sharding
    from anysearch_jax.rollout import engines

    folder = pathlib.Path(converted.folder(os.fspath(policy)))
    architecture, codec = hf.describe(folder)
    if config is None:
      config = _config_of_run(
        folder.resolve().parent / "config.json",
        default=default_config(architecture.max_context),
        plugins=plugins,
      )
    config = with_answer_room(config)
    _check_prompts(codec, config)
    # Before the weights, so that a wrong retriever is refused within seconds.
    searcher = searching.BatchingRetriever(
      _open_retriever(retriever), config.search
    )
    mesh = sharding.rollout_mesh(config.mesh, architecture)
    loaded = hf.load(folder, mesh=mesh)
    engine = engines.make(loaded, config, seed=_SEED, trains=False)
    codec = loaded.tokenizer
  return {
    "engine": engine,
    "codec": codec,
    "retriever": searcher,
    "config": config.episode,
    "slots": config.engine.slots,
    "scaffold": config.evaluation.scaffold,
    "close": engine.close,
  }


def _config_of_run(
  file: pathlib.Path,
  *,
  default: config_lib.ExperimentConfig,
  plugins: Collection[str],
) -> config_lib.ExperimentConfig:
  """Returns the configuration that a run stored, for the engine in here.

  The file may be a stranger's: it neither runs code nor chooses servers, which
  would be sent a key of this machine.

  Args:
    file: `config.json` of the run; may be missing.
    default: is returned if the file is missing.
    plugins: as for `agent.Agent.load`.

  Raises:
    ValueError: the file is malformed, or names code that `plugins` does not.
  """
  stored = json_files.read(file, missing={})
  if not stored:
    return default
  config = config_settings.from_dict(type(default), stored)
  plugins_lib.require_named(
    config.episode.prompts.rpartition("#")[0],
    plugins,
    setting=f"{file}: episode.prompts",
    argument="plugins=[{!r}] of Agent.load",
  )
  if config.engine.kind == "jax":
    return config
  # The mesh of a run over servers is for training.
  return config_lib.changed(
    dataclasses.replace(config, mesh=config_lib.MeshConfig()),
    engine={"kind": "jax"},
  )


def _check_prompts(
  codec: types.TextCodec, config: config_lib.ExperimentConfig
) -> None:
  """Checks a tokenizer and its template; see `validation.check_prompts`."""
  validation.check_prompts(
    [ANY_QUESTION],
    codec,
    config=config.episode,
    environment=systems.of_episode(config.episode),
    max_budget=config.curriculum.max_budget,
  )


def with_answer_room(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Reserves an eighth of the tokens of an episode for its answer.

  A configuration that has `episode.answer_room` is returned unchanged.
  """
  episode = config.episode
  if episode.answer_room:
    return config
  room = max(1, min(episode.max_generated, episode.max_context) // 8)
  return config_lib.changed(config, episode={"answer_room": room})


def default_config(max_context: int) -> config_lib.ExperimentConfig:
  """Returns the paper's environment for any instruct model."""
  import jax

  context = min(max_context, _CONTEXT)
  accelerated = jax.default_backend() != "cpu"
  return config_lib.ExperimentConfig(
    compute_dtype="bfloat16" if accelerated else "float32",
    episode=config_lib.EpisodeConfig(max_context=context),
    engine=config_lib.EngineConfig(
      slots=_SLOTS, max_context=context, lanes=(_SLOTS,)
    ),
  )


def _open_retriever(retriever: types.Retriever | str | os.PathLike) -> Any:
  """Opens a URL or a folder; a retriever is returned unchanged."""
  if not isinstance(retriever, str | os.PathLike):
    return retriever
  name = os.fspath(retriever)
  if name.startswith(("http://", "https://")):
    from anysearch_jax.retrieval import http_retriever

    return http_retriever.HttpRetriever(name)
  from anysearch_jax.retrieval.index import opening, search

  return search.LocalRetriever(opening.open_index(name))
