"""The retriever that a configuration names, whose values must fit together."""

from __future__ import annotations

import contextlib
import json
import operator
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import settings
from anysearch_jax.host import counting, json_files, plugins
from anysearch_jax.launch import parts
from anysearch_jax.retrieval import requests as requests_lib

if TYPE_CHECKING:
  from anysearch_jax.methods import zerosearch
  from anysearch_jax.retrieval import milvus

# The setting that each kind of retriever needs; "": none.
_NEEDED = {
  "lexical": "",
  "index": "index",
  "http": "url",
  "web": "web",
  "milvus": "milvus",
  "mcp": "",
}
# Further settings that a kind may have, and no other kind. Settings that are in
# no row are of all kinds.
_OPTIONAL = {
  "lexical": (),
  "index": ("encoder", "ranking", "key_variable"),
  "http": ("key_variable", "concurrency", "rate", "wait"),
  "web": (
    "url",
    "price",
    "key_variable",
    "pages.first",
    "concurrency",
    "rate",
    "wait",
  ),
  "milvus": ("collection", "encoder", "ranking", "filter", "key_variable"),
  "mcp": ("mcp", "url", "price", "key_variable", "concurrency", "rate", "wait"),
}
_SETTINGS = {
  kind: {needed, *_OPTIONAL[kind]} - {""} for kind, needed in _NEEDED.items()
}
_DEFAULTS = config_lib.RetrievalConfig()


class IdentifiedRetriever:
  """A retriever with an identity.

  Args:
    retriever: the wrapped retriever.
    identity: JSON values; retrievers with equal values give equal answers.
    counted: the part that the retriever asks in turn, whose counters are added
      to its own; None: none.

  `counters` has those of the retriever and of `counted`.
  """

  def __init__(
    self, retriever: types.Retriever, identity: Any, counted: Any = None
  ):
    self._retriever = retriever
    self._counted = counted
    # The retriever's own methods, so that a search makes no further call.
    self.search = retriever.search
    if isinstance(retriever, types.BatchRetriever):
      self.search_many = retriever.search_many
    if isinstance(retriever, types.ContextualRetriever):
      self.context_key = retriever.context_key
    self._identity = {
      "identity": identity,
      "sha256": json_files.sha256(identity),
    }

  @property
  def counters(self) -> Counter[str]:
    return counting.counters(self._retriever) + counting.counters(self._counted)

  def identity(self, corpora: Sequence[str] = ("",)) -> dict[str, Any]:
    """Returns the identity and its hash, the same for all corpora."""
    return self._identity


class ProgramsOwnRetriever:
  """Stands for the retrievers of programs, which search by themselves."""

  def identity(self, corpora: Sequence[str]) -> dict[str, str]:
    return {"kind": "program"}

  async def search(
    self, request: types.SearchRequest
  ) -> Sequence[types.Passage]:
    raise types.RetrievalError(
      "Found a search where a program plays the episodes (agents.program); "
      "expected it to search by itself."
    )


def make(config: config_lib.ExperimentConfig, lexical: Any) -> Any:
  """Returns the retriever that `config.retrieval` names.

  A retriever that asks the policy itself gets the engine later, from the code
  that plays the episodes (`searching.attach`).

  Args:
    config: configuration of the run.
    lexical: the retriever that the source of the questions has, for kind
      "lexical".

  Raises:
    ValueError: the configuration is invalid or the retriever cannot be opened.
  """
  if config.agents.program:
    return ProgramsOwnRetriever()
  validate(config.retrieval)
  c = config.retrieval
  if "world" in (c.simulated, c.refined) and config.data.source != "world":
    raise ValueError(
      f"retrieval: found 'world' for simulated {c.simulated!r} or refined "
      f"{c.refined!r} with data.source {config.data.source!r}; expected "
      "'policy' or the address of a model."
    )
  if c.simulated:
    retriever = _simulated(config, lexical)
  else:
    retriever = _real(config, lexical)
  if c.refined:
    retriever = _refined(config, retriever)
  return _tools(config, retriever)


def _tools(config: config_lib.ExperimentConfig, retriever: Any) -> Any:
  """Returns a retriever for all tools of the episode's environment."""
  from anysearch_jax.environment import protocol
  from anysearch_jax.methods import systems
  from anysearch_jax.rollout import tool_retrievers

  c = config.retrieval
  prompts = config.episode.prompts
  names = [tool.name for tool in systems.of_episode(config.episode).tools]
  assignments = [text.partition("=")[::2] for text in config.search.tools]
  own_tools = dict(assignments)
  if len(own_tools) < len(assignments):
    raise ValueError(
      f"search.tools: found {', '.join(config.search.tools)}; expected each "
      "tool once."
    )
  if unused := sorted(own_tools.keys() - set(names)):
    raise ValueError(
      f"search.tools: found {unused[0]!r}; the tools of the environment "
      f"{prompts!r} are {', '.join(names)}."
    )
  retrievers_by_tool = {protocol.SEARCH: retriever}
  for name in names:
    if name in own_tools:
      tool_and_identity = load_own(
        own_tools[name], config, setting="search.tools"
      )
      retrievers_by_tool[name] = IdentifiedRetriever(*tool_and_identity)
    elif name == "fetch" and c.kind == "web":
      # A log that answers without a retriever has the answers of one retriever,
      # so pages are logged in a file of their own.
      is_strict = c.log_mode == "strict"
      reader = None if is_strict else page_reader(c.pages, c.pages.opened_words)
      retrievers_by_tool[name] = _logged(
        c, f"{c.log}.pages" if c.log else "", reader
      )
    elif name == "fetch":
      retrievers_by_tool[name] = tool_retrievers.PageRetriever(retriever)
    elif name not in retrievers_by_tool:
      raise ValueError(
        f"search.tools: found none for the tool {name!r} of the environment "
        f"{prompts!r}; expected {name}=path/to/file.py:NAME, a function that "
        "is given the configuration and returns a retriever."
      )
  if names == [protocol.SEARCH]:
    return retrievers_by_tool[protocol.SEARCH]
  return tool_retrievers.Toolbox(
    {n: retrievers_by_tool[n] for n in names}, config.search
  )


def _simulated(config: config_lib.ExperimentConfig, lexical: Any) -> Any:
  """Returns a retriever that makes passages up.

  Only the world's script also searches the real passages, in `lexical`.
  """
  from anysearch_jax.generative_retrieval import simulation
  from anysearch_jax.methods import systems
  from anysearch_jax.world import world_retrieval

  simulator: Any
  if config.retrieval.simulated == "world":
    simulator = world_retrieval.WorldSimulator(
      parts.generated_world(config.data), lexical, seed=config.seed
    )
  elif config.retrieval.simulated == "policy" and config.data.source == "world":
    simulator = world_retrieval.SelfSimulator(
      _model(config, "policy"), prompt=systems.of_episode(config.episode).plain
    )
  else:
    simulator = simulation.ModelSimulator(
      _model(config, config.retrieval.simulated),
      _texts(config.episode, "simulator_useful"),
    )
  c = config.curriculum
  return simulation.SimulatedRetriever(
    simulator,
    _noise(config),
    rollouts=c.total_steps // c.steps_per_rollout,
    seed=config.seed,
  )


def _noise(config: config_lib.ExperimentConfig) -> zerosearch.Options:
  """Returns the noise of simulated searches, which only ZeroSearch has."""
  from anysearch_jax.methods import systems, zerosearch

  if config.method.name != zerosearch.METHOD.name:
    return zerosearch.NO_NOISE
  return systems.get(config.method.name).constants_of(config)


def _refined(config: config_lib.ExperimentConfig, retriever: Any) -> Any:
  """Returns a retriever that refines the passages which `retriever` finds."""
  from anysearch_jax.generative_retrieval import refining
  from anysearch_jax.methods import systems
  from anysearch_jax.world import world_retrieval

  refiner: Any
  if config.retrieval.refined == "world":
    refiner = world_retrieval.WorldRefiner()
  else:
    markers = systems.of_episode(config.episode).all_markers
    start_markers = (x for x in markers if not x.startswith(("</", "<|end")))
    refiner = refining.ModelRefiner(
      _model(config, config.retrieval.refined),
      marks=(*start_markers, "<search>", "<information>"),
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
    if c.repetition_penalty != 1 and not config.engine.has_servers:
      raise ValueError(
        f"retrieval.model.repetition_penalty: found {c.repetition_penalty:g} "
        "for the policy's own engine, which has none; expected 1, servers "
        "(engine.kind), or a model at an address."
      )
    stops = systems.of_episode(config.episode).stops
    return text_model.EngineModel(c, stop=stops)
  return text_model.EndpointModel(name, c)


def _real(config: config_lib.ExperimentConfig, lexical: Any) -> Any:
  """Returns a retriever of existing passages, with its log if there is one."""
  c = config.retrieval
  if c.kind == "lexical" and not c.log:
    return lexical
  # A strict log answers alone, so no retriever is opened.
  if c.log and c.log_mode == "strict":
    return _logged(c, c.log, None)
  if c.kind == "lexical":
    identity = {"kind": "bm25", "world": parts.world(config.data)}
    return _logged(c, c.log, lexical, identity)
  if plugins.is_name(c.kind):
    return _logged(
      c, c.log, *load_own(c.kind, config, setting="retrieval.kind")
    )
  try:
    return _logged(c, c.log, _open(c))
  except types.RetrievalError as error:
    raise ValueError(f"retrieval: {error}") from error


def _logged(
  c: config_lib.RetrievalConfig, log: str, retriever: Any, identity: Any = None
) -> IdentifiedRetriever:
  """Returns a retriever with its identity, and with a log if there is one."""
  if identity is None and retriever is not None:
    identity = retriever.identity()
  if not log:
    return IdentifiedRetriever(retriever, identity)
  from anysearch_jax.retrieval import recording

  try:
    recorder = recording.Recorder(
      retriever, log, mode=c.log_mode, identity=identity
    )
  except types.RetrievalError as error:
    raise ValueError(f"retrieval.log: {error}") from error
  return IdentifiedRetriever(recorder, recorder.identity(), retriever)


def load_own(
  name: str, config: config_lib.ExperimentConfig, *, setting: str
) -> tuple[Any, Any]:
  """Returns a retriever that a function of the user makes, and its identity.

  Args:
    name: `module:NAME` or `file.py:NAME` of the function, which is given the
      configuration and returns a `types.Retriever`.
    config: configuration of the run.
    setting: the setting that names the function, for messages.

  Raises:
    ValueError: it cannot be loaded, or does not return a retriever.
  """
  plugin = plugins.load(
    name, setting=setting, expected=f"def {name.rpartition(':')[2]}(config)"
  )
  with plugins.as_sentence(f"{setting} {name!r}", plugin.path):
    retriever = plugin.value(config)
  if not isinstance(retriever, types.Retriever):
    raise ValueError(
      f"{setting}: {name!r} returned a {type(retriever).__name__}, expected a "
      "retriever: async def search(self, request)."
    )
  identity = {"kind": "own", "name": name, "sha256": plugin.sha256}
  return retriever, identity | {"of": requests_lib.identity(retriever)}


def _open(c: config_lib.RetrievalConfig) -> Any:
  """Opens the retriever of a kind that needs nothing but its settings."""
  match c.kind:
    case "index":
      from anysearch_jax.retrieval.index import opening, search

      index = opening.open_index(
        c.index,
        encoder=c.encoder or None,
        ranking=c.ranking,
        key_variable=c.key_variable,
      )
      return search.LocalRetriever(index)
    case "http":
      from anysearch_jax.retrieval import http_retriever

      return http_retriever.HttpRetriever(
        c.url, token_variable=c.key_variable, patience=_patience(c, 4)
      )
    case "web":
      return _web(c)
    case "milvus":
      return _milvus(c)
  with _needs_extra("serve", "MCP tools need"):
    from anysearch_jax.retrieval import mcp_tool
  return mcp_tool.McpRetriever(
    c.url,
    c.mcp,
    key_variable=c.key_variable,
    price=c.price,
    patience=_patience(c, 16),
  )


def _patience(c: config_lib.RetrievalConfig, concurrency: int) -> Any:
  """Returns the limits on the waiting for a service.

  `concurrency` is the default of the kind, if the configuration has none.
  """
  from anysearch_jax.host import http_calls

  return http_calls.Patience(
    concurrency=c.concurrency or concurrency, rate=c.rate, wait=c.wait
  )


def _web(c: config_lib.RetrievalConfig) -> Any:
  from anysearch_jax.retrieval import web_search

  retriever = web_search.WebRetriever(
    c.web,
    price=c.price,
    key_variable=c.key_variable,
    address=c.url,
    patience=_patience(c, 16),
  )
  if not c.pages.first:
    return retriever
  reader = page_reader(c.pages, c.pages.words)
  from anysearch_jax.retrieval.web_pages import pages

  return pages.SearchWithPages(retriever, reader, first=c.pages.first)


def page_reader(c: config_lib.PagesConfig, words: int) -> Any:
  """Returns a `pages.PageReader`."""
  with _needs_extra("web", "Pages of the web need"):
    from anysearch_jax.retrieval.web_pages import pages
  try:
    return pages.PageReader(c, words=words)
  except ValueError as error:
    raise ValueError(f"retrieval.pages.allow_private: {error}") from None


def _milvus(c: config_lib.RetrievalConfig) -> Any:
  name = c.collection or "passages"
  passages = open_collection(c.milvus, name, c.key_variable)
  from anysearch_jax.retrieval import filters, milvus

  encoder = None
  stored_encoder = passages.described().get("encoder")
  if c.ranking in ("dense", "hybrid") and c.encoder and stored_encoder:
    from anysearch_jax.retrieval.encoder import encoder as encoder_lib

    encoder = encoder_lib.Encoder.like(stored_encoder, c.encoder)
    encoder.compile()
  return milvus.MilvusRetriever(
    passages,
    ranking=c.ranking,
    encoder=encoder,
    filters=filters.parse(c.filter),
  )


def open_collection(
  address: str, name: str, variable: str
) -> milvus.Collection:
  """Returns a collection of Milvus.

  Args:
    address: address of a server, or path of a file.db.
    name: name of the collection.
    variable: environment variable with the key; "": no key.

  Raises:
    ValueError: the packages of the extra or the key are missing.
  """
  with _needs_extra("milvus", "milvus needs"):
    from anysearch_jax.retrieval import milvus
  key = ""
  if variable:
    # Imported late: a run without a service needs no HTTP.
    from anysearch_jax.host import http_calls

    key = http_calls.secret_in(variable, "Milvus's key")
  return milvus.Collection(address, name, key=key)


@contextlib.contextmanager
def _needs_extra(name: str, feature: str) -> Iterator[None]:
  """Wraps imports that need an extra, whose absence becomes a sentence."""
  try:
    yield
  except ImportError as error:
    raise ValueError(
      f"{feature} a package that is missing ({error}); run pip install -e "
      f"'.[{name}]'."
    ) from None


def validate(c: config_lib.RetrievalConfig) -> None:
  """Checks that the values of a retrieval configuration fit together.

  Raises:
    ValueError: a value is invalid or contradicts another.
  """
  settings.check(c, "retrieval")
  if c.kind not in _NEEDED and not plugins.is_name(c.kind):
    raise ValueError(
      f"retrieval.kind: found {c.kind!r}, expected one of "
      f"{', '.join(_NEEDED)}, or path/to/file.py:NAME."
    )
  _validate_secrets(c)
  for field in sorted(set().union(*_SETTINGS.values())):
    kinds = [kind for kind in _NEEDED if field in _SETTINGS[kind]]
    is_set = _value(c, field) != _value(_DEFAULTS, field)
    if is_set and c.kind not in kinds:
      raise _refusal(c, field, f"it with kind {' or '.join(kinds)} only")
    if not is_set and field == _NEEDED.get(c.kind, ""):
      raise _refusal(c, field, "one")
  if c.log_mode != "record" and not c.log:
    raise _refusal(c, "log_mode", "retrieval.log, the file to answer from")
  if not (c.pages.agent.strip() and re.fullmatch(r"[ -~]+", c.pages.agent)):
    raise _refusal(c, "pages.agent", "printable ASCII, for a header")
  if c.kind == "mcp" and bool(c.mcp.command) == bool(c.url):
    raise _refusal(c, "mcp.command", "it or an address in retrieval.url")
  if c.mcp.command and c.key_variable:
    raise _refusal(c, "key_variable", "it in retrieval.mcp.variables")
  if not _is_object(c.mcp.arguments or "{}"):
    raise _refusal(
      c, "mcp.arguments", 'a JSON object such as {"language": "en"}'
    )
  for field, value in (("simulated", c.simulated), ("refined", c.refined)):
    if value not in ("", "world", "policy") and not _is_url(value):
      raise _refusal(
        c,
        field,
        "'world', 'policy', the address of a model (http://127.0.0.1:8000/v1), "
        "or nothing",
      )
    if _is_url(value) and not c.model.name:
      raise _refusal(c, "model.name", f"the name of the model of {field}")
  # The passages of a simulation are those of one search of one episode.
  if c.log and c.simulated:
    raise _refusal(c, "log", "none with retrieval.simulated")


def _refusal(
  c: config_lib.RetrievalConfig, field: str, expected: str
) -> ValueError:
  return ValueError(
    f"retrieval.{field}: found {_value(c, field)!r} with retrieval.kind "
    f"{c.kind!r}; expected {expected}."
  )


def _validate_secrets(c: config_lib.RetrievalConfig) -> None:
  """Checks that a configuration, which a run stores, has no keys in it."""
  urls = [("url", c.url)] if c.url else []
  models = [
    ("encoder", c.encoder),
    ("simulated", c.simulated),
    ("refined", c.refined),
  ]
  urls += [model for model in models if _is_url(model[1])]
  variables = [
    ("key_variable", c.key_variable),
    ("model.key_variable", c.model.key_variable),
    *((f"mcp.variables[{i}]", x) for i, x in enumerate(c.mcp.variables)),
  ]
  if not urls and not any(variable for _, variable in variables):
    return
  # Imported late: a run without a service needs no HTTP.
  from anysearch_jax.host import redaction

  for field, url in urls:
    if not redaction.is_address(url):
      raise ValueError(
        f"retrieval.{field}: found {redaction.shown(url)}, expected an address "
        "such as http://127.0.0.1:8000."
      )
  for field, variable in variables:
    if variable:
      redaction.check_variable(variable, f"retrieval.{field}")


def _value(c: config_lib.RetrievalConfig, field: str) -> object:
  return operator.attrgetter(field)(c)


def _is_url(text: str) -> bool:
  return text.startswith(("http://", "https://"))


def _is_object(text: str) -> bool:
  try:
    return isinstance(json.loads(text), dict)
  except ValueError:
    return False
