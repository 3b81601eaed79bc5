"""The retriever that a configuration names."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import counting
from launch import databases, live_retrievers, retrieval_settings


class IdentifiedRetriever:
  """A retriever with an identity.

  Args:
    retriever: the wrapped retriever.
    identity: JSON values; retrievers with equal values give equal answers.
    counted: what it asks in turn, whose counters belong to it.

  `counters` has those of the retriever and of `counted`.
  """

  def __init__(
    self,
    retriever: types.BatchRetriever,
    identity: Any,
    counted: Any = None,
  ):
    self._retriever, self._counted = retriever, counted
    canonical = json.dumps(identity, sort_keys=True).encode()
    self._identity = {
      "identity": identity,
      "sha256": hashlib.sha256(canonical).hexdigest(),
    }

  @property
  def counters(self) -> Counter[str]:
    return counting.counters(self._retriever) + counting.counters(self._counted)

  def identity(self, corpora: Sequence[str] = ("",)) -> dict[str, Any]:
    """Returns the identity and its hash, the same for all corpora."""
    del corpora
    return self._identity

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    """Answers one query. Raises `types.RetrievalError` if that fails."""
    return await self._retriever.search(request)

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> Sequence[Sequence[types.Passage] | Exception]:
    """Returns answers in request order; see `types.BatchRetriever`."""
    return await self._retriever.search_many(requests)


def make(config: config_lib.ExperimentConfig, lexical: Any) -> Any:
  """Returns the retriever that `config.retrieval` names.

  A retriever that asks the policy itself gets the engine later, from the code
  that plays the episodes (`searching.attach`).

  Args:
    config: configuration of the run.
    lexical: the retriever of the source of the questions, for kind "lexical".

  Raises:
    ValueError: the configuration is invalid or the retriever cannot be opened.
  """
  retrieval_settings.validate(config.retrieval)
  c = config.retrieval
  if "world" in (c.simulated, c.refined) and config.data.source != "world":
    raise ValueError(
      f"retrieval: found 'world' for simulated {c.simulated!r} or refined "
      f"{c.refined!r} with data.source {config.data.source!r}; expected "
      "'policy' or the address of a model."
    )
  made = _simulated(config, lexical) if c.simulated else _real(config, lexical)
  return _tools(config, _refined(config, made) if c.refined else made)


def _tools(config: config_lib.ExperimentConfig, made: Any) -> Any:
  """Returns a retriever for all tools of the episode's environment."""
  from anysearch_jax.environment import protocol
  from anysearch_jax.methods import systems
  from anysearch_jax.rollout import toolbox

  episode = config.episode
  found = {
    protocol.SEARCH: lambda: made,
    "fetch": lambda: (
      _web_pages(config.retrieval)
      if config.retrieval.kind == "web"
      else toolbox.PageRetriever(made)
    ),
    "cheap": lambda: _cheap(config.data),
  }
  names = [each.name for each in systems.of_episode(episode).tools]
  if unknown := [name for name in names if name not in found]:
    raise ValueError(
      f"episode.prompts: found {episode.prompts!r} with the tool "
      f"{unknown[0]!r}; expected tools among {', '.join(found)}, because no "
      "command has a retriever for others."
    )
  if names == [protocol.SEARCH]:
    return made
  return toolbox.Toolbox({name: found[name]() for name in names})


def _cheap(data: config_lib.DataConfig) -> Any:
  """Returns the cheap retriever of the generated world."""
  from anysearch_jax.world import cheap_retrieval, versions, world

  if data.source != "world":
    raise ValueError(
      f"data.source: found {data.source!r} with the tool 'cheap', which finds "
      "facts of the generated world alone; expected 'world'."
    )
  return cheap_retrieval.CheapRetriever(
    world.World(versions.config(data.world, data.world_seed))
  )


def _web_pages(c: config_lib.RetrievalConfig) -> Any:
  """Returns a retriever of pages of the web, with its log if there is one.

  Their log is beside the one of searches: a log that answers without a
  retriever has answers of one only.
  """
  reader = None
  if c.log_mode != "strict":
    reader = live_retrievers.page_reader(c.pages, c.pages.opened_words)
  return _logged(c, f"{c.log}.pages" if c.log else "", reader)


def _simulated(config: config_lib.ExperimentConfig, lexical: Any) -> Any:
  """Returns a retriever that makes passages up.

  Only the world's script also searches the real passages, in `lexical`.
  """
  from anysearch_jax.generative_retrieval import simulation
  from anysearch_jax.methods import systems
  from anysearch_jax.world import versions, world, world_retrieval

  simulator: simulation.Simulator
  if config.retrieval.simulated == "world":
    simulator = world_retrieval.WorldSimulator(
      world.World(versions.config(config.data.world, config.data.world_seed)),
      lexical,
      seed=config.seed,
    )
  elif config.retrieval.simulated == "policy" and config.data.source == "world":
    simulator = world_retrieval.SelfSimulator(
      _model(config, "policy"),
      prompt=systems.of_episode(config.episode).plain,
    )
  else:
    simulator = simulation.ModelSimulator(
      _model(config, config.retrieval.simulated),
      _texts(config.episode, "simulator_useful"),
    )
  c = config.curriculum
  return simulation.SimulatedRetriever(
    simulator,
    config.method.zerosearch,
    rollouts=c.total_steps // c.steps_per_rollout,
    seed=config.seed,
  )


def _refined(config: config_lib.ExperimentConfig, retriever: Any) -> Any:
  """Returns a retriever that refines the passages which `retriever` finds."""
  from anysearch_jax.generative_retrieval import refining
  from anysearch_jax.methods import systems
  from anysearch_jax.world import world_retrieval

  refiner: refining.Refiner
  if config.retrieval.refined == "world":
    refiner = world_retrieval.WorldRefiner()
  else:
    markers = systems.of_episode(config.episode).markers
    refiner = refining.ModelRefiner(
      _model(config, config.retrieval.refined),
      marks=(*markers, "<search>", "<information>"),
      texts=_texts(config.episode, "reader"),
    )
  return refining.RefiningRetriever(retriever, refiner, config=config.search)


def _texts(episode: config_lib.EpisodeConfig, name: str) -> Any:
  """Returns the episode's texts if `name` is one, otherwise None."""
  from anysearch_jax.methods import systems

  texts = systems.texts(episode)
  return texts if texts and name in texts.values else None


def _model(config: config_lib.ExperimentConfig, name: str) -> Any:
  """Returns the policy's own engine, or a model at an address."""
  from anysearch_jax.generative_retrieval import text_model
  from anysearch_jax.methods import systems

  c = config.retrieval.model
  if name == "policy":
    stops = systems.of_episode(config.episode).stops
    return text_model.EngineModel(c, stop=stops)
  return text_model.EndpointModel(name, c)


def _real(config: config_lib.ExperimentConfig, lexical: Any) -> Any:
  """Returns a retriever of existing passages, with its log if there is one."""
  c = config.retrieval
  if c.kind == "lexical" and not c.log:
    return lexical
  retriever: types.BatchRetriever | None = None
  identity = None
  # A strict log answers alone, so no retriever is opened.
  if not c.log or c.log_mode != "strict":
    retriever, identity = _make(config, lexical)
  return _logged(c, c.log, retriever, identity)


def _logged(
  c: config_lib.RetrievalConfig,
  log: str,
  retriever: Any,
  identity: Any = None,
) -> IdentifiedRetriever:
  """Returns a retriever with its identity, and with a log if there is one.

  Raises:
    ValueError: the log cannot be used.
  """
  if identity is None and retriever is not None:
    identity = retriever.identity()
  if not log:
    return IdentifiedRetriever(retriever, identity)
  from retrieval.recording import recorder

  try:
    recorded = recorder.Recorder(
      retriever, log, mode=c.log_mode, identity=identity
    )
  except types.RetrievalError as error:
    raise ValueError(f"retrieval.log: {error}") from error
  return IdentifiedRetriever(recorded, recorded.identity(), retriever)


def _make(
  config: config_lib.ExperimentConfig, lexical: Any
) -> tuple[types.BatchRetriever, Any]:
  """Returns a retriever and its identity."""
  c = config.retrieval
  if c.kind == "lexical":
    identity = {"kind": "bm25", "world_seed": config.data.world_seed}
    # Identities of the first version are older than the names of versions.
    if config.data.world != "fixed":
      identity["world"] = config.data.world
    return lexical, identity
  if c.kind == "pipeline":
    from launch import pipelines

    made = pipelines.make(c.pipeline, open_one)
    return made, made.identity()
  return open_one(c)


def open_one(
  c: config_lib.RetrievalConfig, *, devices: Sequence[Any] | None = None
) -> tuple[types.BatchRetriever, Any]:
  """Opens the retriever of a kind that needs nothing else of a run.

  Args:
    c: names an index, a server, a search engine or a collection; valid.
    devices: JAX devices for an index; None: the CPU.

  Returns:
    The retriever and its identity.

  Raises:
    ValueError: it cannot be opened.
  """
  if c.kind == "index":
    from retrieval.clients import local
    from retrieval.index import opening

    searching = opening.open_index(
      c.index, encoder=c.encoder or None, devices=devices
    )
    of_index = local.LocalRetriever(searching)
    return of_index, of_index.identity()
  if c.kind in databases.KINDS:
    return databases.make(c)
  if c.kind == "mcp":
    return live_retrievers.mcp_tool(c)
  from retrieval.clients import client, sharded, web

  found: client.HttpRetriever | sharded.ShardedRetriever | web.WebRetriever
  try:
    if c.kind == "http" and ("," in c.url or "|" in c.url):
      found = sharded.ShardedRetriever(
        sharded.addresses(c.url), token_variable=c.key_variable
      )
    elif c.kind == "http":
      found = client.HttpRetriever(c.url, token_variable=c.key_variable)
    else:
      found = web.WebRetriever(
        c.web,
        price=c.price,
        key_variable=c.key_variable,
        engine=c.engine,
        address=c.url,
      )
      if c.pages.first:
        return live_retrievers.with_pages(c, found)
    return found, found.identity()
  except types.RetrievalError as error:
    raise ValueError(f"retrieval: {error}") from error
