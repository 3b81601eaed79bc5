"""The retriever that a configuration names."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax import types

KINDS = ("lexical", "index", "http", "web", "milvus")
_FIELDS = {"index": "index", "http": "url", "web": "web", "milvus": "milvus"}
# Optional fields, and the kinds that accept them.
_EXTRAS = {
  "encoder": ("index", "milvus"),
  "collection": ("milvus",),
  "ranking": ("milvus",),
  "engine": ("web",),
  "price": ("web",),
  "key_variable": ("http", "web", "milvus"),
}
_LOG_MODES = ("record", "replay", "strict")
# Values of `simulated` and `refined` that are not the address of a model.
_WITHOUT_ADDRESS = ("", "world", "policy")


class IdentifiedRetriever:
  """A retriever with an identity.

  Args:
    retriever: the wrapped retriever.
    identity: JSON values; retrievers with equal values give equal answers.
  """

  def __init__(self, retriever: types.BatchRetriever, identity: Any):
    self._retriever = retriever
    canonical = json.dumps(identity, sort_keys=True).encode()
    self._identity = {
      "identity": identity,
      "sha256": hashlib.sha256(canonical).hexdigest(),
    }

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


def validate(c: config_lib.RetrievalConfig) -> None:
  """Checks that the values of a retrieval configuration fit together.

  Raises:
    ValueError: a value is invalid or contradicts another.
  """
  if c.kind not in KINDS:
    raise ValueError(
      f"retrieval.kind: found {c.kind!r}, expected one of {', '.join(KINDS)}."
    )
  _validate_secrets(c)
  for kind, field in _FIELDS.items():
    if (kind, c.kind, c.web) == ("http", "web", "searxng") and c.url:
      continue  # The address of the search engine.
    if bool(getattr(c, field)) != (c.kind == kind):
      raise ValueError(
        f"retrieval.{field}: found {getattr(c, field)!r} with retrieval.kind "
        f"{c.kind!r}; expected a value for kind {kind!r} and none for others."
      )
  for field, kinds in _EXTRAS.items():
    if getattr(c, field) and c.kind not in kinds:
      raise ValueError(
        f"retrieval.{field}: found {getattr(c, field)!r} with retrieval.kind "
        f"{c.kind!r}; expected it with kind {' or '.join(kinds)} only."
      )
  if c.log_mode not in _LOG_MODES:
    raise ValueError(
      f"retrieval.log_mode: found {c.log_mode!r}, expected one of "
      f"{', '.join(_LOG_MODES)}."
    )
  if not c.log and c.log_mode != "record":
    raise ValueError(
      f"retrieval.log_mode: found {c.log_mode!r} without retrieval.log; "
      "expected the file to answer from."
    )
  _validate_models(c)


def _validate_secrets(c: config_lib.RetrievalConfig) -> None:
  """Checks that a configuration, which is stored with a run, has no keys in it.

  Raises:
    ValueError: a URL or a variable name is invalid; no key is shown.
  """
  named = {"simulated": c.simulated, "refined": c.refined}
  urls = {k: [url] for k, url in named.items() if url.startswith("http")}
  if c.url:
    # Several are shards and their replicas.
    urls["url"] = [each.strip() for each in re.split(r"[,|]", c.url)]
  variables = {
    "key_variable": c.key_variable,
    "model.key_variable": c.model.key_variable,
  }
  variables = {k: name for k, name in variables.items() if name}
  if not urls and not variables:
    return
  # Imported late: a run without a service needs no HTTP.
  from anysearch_jax.host.http import redaction

  for field, url in [(name, url) for name in urls for url in urls[name]]:
    if not redaction.is_address(url):
      raise ValueError(
        f"retrieval.{field}: found {redaction.shown(url)}, expected an address "
        "such as http://127.0.0.1:8000."
      )
  for field, variable in variables.items():
    redaction.check_variable(variable, f"retrieval.{field}")


def _validate_models(c: config_lib.RetrievalConfig) -> None:
  """Checks the fields of simulated and refined passages, as `validate`."""
  addresses = 0
  for field in ("simulated", "refined"):
    found = getattr(c, field)
    if found in _WITHOUT_ADDRESS:
      continue
    addresses += 1
    if not found.startswith(("http://", "https://")):
      raise ValueError(
        f"retrieval.{field}: found {found!r}, expected 'world', 'policy', the "
        "address of a model (http://127.0.0.1:8000/v1), or nothing."
      )
  if addresses and not c.model.name:
    raise ValueError(
      "retrieval.model.name: found nothing with retrieval.simulated "
      f"{c.simulated!r} and retrieval.refined {c.refined!r}; expected the name "
      "of the model at the address."
    )
  if c.simulated and c.log:
    raise ValueError(
      f"retrieval.log: found {c.log!r} with retrieval.simulated "
      f"{c.simulated!r}; expected no log, for simulated passages are those of "
      "one search of one episode."
    )
  for name, holds, expected in (
    ("concurrency", c.model.concurrency >= 1, "at least 1"),
    ("temperature", c.model.temperature >= 0, "at least 0"),
    ("top_p", 0 < c.model.top_p <= 1, "above 0, at most 1"),
    ("max_tokens", c.model.max_tokens >= 1, "at least 1"),
    ("deadline", c.model.deadline > 0, "seconds above 0"),
  ):
    if not holds:
      raise ValueError(
        f"retrieval.model.{name}: found {getattr(c.model, name)}, expected "
        f"{expected}."
      )


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
  validate(config.retrieval)
  c = config.retrieval
  if "world" in (c.simulated, c.refined) and config.data.source != "world":
    raise ValueError(
      f"retrieval: found 'world' for simulated {c.simulated!r} or refined "
      f"{c.refined!r} with data.source {config.data.source!r}; expected "
      "'policy' or the address of a model."
    )
  made = _simulated(config, lexical) if c.simulated else _real(config, lexical)
  return _tools(config.episode, _refined(config, made) if c.refined else made)


def _tools(episode: config_lib.EpisodeConfig, made: Any) -> Any:
  """Returns a retriever for all tools of the episode's environment."""
  from anysearch_jax.environment import protocol
  from anysearch_jax.methods import systems
  from anysearch_jax.rollout import toolbox

  found = {protocol.SEARCH: made, "fetch": toolbox.PageRetriever(made)}
  names = [each.name for each in systems.of_episode(episode).tools]
  if unknown := [name for name in names if name not in found]:
    raise ValueError(
      f"episode.prompts: found {episode.prompts!r} with the tool "
      f"{unknown[0]!r}; expected tools among {', '.join(found)}, because no "
      "command has a retriever for others."
    )
  if names == [protocol.SEARCH]:
    return made
  return toolbox.Toolbox({name: found[name] for name in names})


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
    if not c.log:
      return IdentifiedRetriever(retriever, identity)
  from retrieval.recording import recorder

  try:
    recorded = recorder.Recorder(
      retriever, c.log, mode=c.log_mode, identity=identity
    )
  except types.RetrievalError as error:
    raise ValueError(f"retrieval.log: {error}") from error
  return IdentifiedRetriever(recorded, recorded.identity())


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
  if c.kind == "index":
    from retrieval.clients import local
    from retrieval.index import opening

    searching = opening.open_index(c.index, encoder=c.encoder or None)
    of_index = local.LocalRetriever(searching)
    return of_index, of_index.identity()
  if c.kind == "milvus":
    return _milvus(c)
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
    return found, found.identity()
  except types.RetrievalError as error:
    raise ValueError(f"retrieval: {error}") from error


def milvus_client() -> Any:
  """Returns the module `retrieval.clients.milvus`.

  Raises:
    ValueError: Milvus's own client is not installed.
  """
  try:
    from retrieval.clients import milvus
  except ModuleNotFoundError as error:
    raise ValueError(
      f"Milvus needs a package that is missing ({error}); run pip install -r "
      "requirements-milvus.txt."
    ) from None
  return milvus


def _milvus(
  c: config_lib.RetrievalConfig,
) -> tuple[types.BatchRetriever, Any]:
  """Returns a retriever over a collection of Milvus, and its identity."""
  milvus = milvus_client()
  token = ""
  if c.key_variable:
    from anysearch_jax.host.http import calls

    token = calls.secret_in(c.key_variable, "the token of Milvus")
  client = milvus.connect(c.milvus, token=token)
  collection, ranking = c.collection or "passages", c.ranking or "bm25"
  encoder = None
  if ranking != "bm25":
    named = milvus.described(client, collection).get("encoder")
    if not c.encoder or named is None:
      raise ValueError(
        f"retrieval.encoder: found {c.encoder!r} for ranking {ranking} of a "
        f"collection with {'vectors' if named else 'no vectors'}; expected the "
        "folder of the encoder that launch.build_milvus had."
      )
    from retrieval.encoder import encoder as encoder_lib

    encoder = encoder_lib.Encoder.like(named, c.encoder)
  found = milvus.MilvusRetriever(
    client, collection, ranking=ranking, encoder=encoder, token=token
  )
  return found, found.identity()
