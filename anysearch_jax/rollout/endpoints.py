"""Opens a model behind OpenAI's interface, and decides how to ask it.

A model can search by its own calls of tools, by tags in its messages, or by
tags in one text that it continues (text completions). Unless the user says
which, a probe asks the model one question and sees whether it calls the tool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import http_calls, loop, openai_endpoint, redaction
from anysearch_jax.rollout import chat_completions, completions, plain_text

COMPLETIONS = "completions"
# The ways to ask a model, with a clause for messages.
CALLS = {
  "tools": "the search is a tool that it calls",
  "tags": "it writes the search as tags in its messages",
  COMPLETIONS: "it continues one text",
}
KEY = openai_endpoint.KEY
# The environment of a user's own documents, by the way the model is asked.
_DOCUMENTS = {"tools": "documents_tools", "tags": "documents_tags"}
SEARCH_FIRST = "documents_short"
PLAIN_RETRIEVAL = "plain_retrieval"
# Their requests are whole texts, which any chat model can read.
_SHORT = (SEARCH_FIRST, PLAIN_RETRIEVAL)
# Measured with Qwen2.5-Coder-0.5B: a conversation with tools or tags is worse
# than plain retrieval. Models from some 1.5 billion parameters on call tools.
_SMALL_PARAMETERS = 1_500_000_000
_LISTED_MODELS = 10  # Of a server, in an error.
_CONTEXT_SHARE = 0.9  # That episodes use of what a server says.
_CONTEXT_TOKENS = 16384  # Of a model whose context is unknown.


class Endpoint(NamedTuple):
  """A model behind an address.

  Attributes:
    url: address of the server's interface, such as
      `http://localhost:11434/v1`.
    model: its name there; "": the server's only model.
    calls: how the model is asked: `tools`, `tags` or `completions`; `auto`: the
      first of these that works, or `completions` if there is a tokenizer.
    tokenizer: folder of its tokenizer, for `completions`; "": none.
    key_variable: environment variable with the key; "": no key; None: `KEY` if
      it is set and the address is https.
    searches_first: whether questions about documents are played in short
      prompts, see `short_prompts`; None: if the server says that the model has
      fewer than 1.5 billion parameters.
  """

  url: str
  model: str = ""
  calls: str = "auto"
  tokenizer: str = ""
  key_variable: str | None = None
  searches_first: bool | None = None


class OpenEndpoint(NamedTuple):
  """A model that is ready to play episodes.

  Attributes:
    name: MODEL@URL.
    identity: identifies the model and the way it is asked, for records.
    engine: samples its turns.
    codec: the text side of its tokenizer.
    prompts: the environment, for `episode.prompts`.
    why: why it is asked in this way; "" if no probe was needed.
    context: tokens of a conversation; 0: the server does not say.
  """

  name: str
  identity: dict[str, str]
  engine: completions.CompletionsEngine
  codec: Any
  prompts: str
  why: str
  context: int = 0

  def fit(self, limits: config_lib.EpisodeConfig) -> config_lib.EpisodeConfig:
    """Returns settings with the model's environment, within its context."""
    if self.context:
      # Tokens are counted by an estimate.
      limits = limits.within(int(_CONTEXT_SHARE * self.context))
    return dataclasses.replace(limits, prompts=self.prompts)


def default_config() -> config_lib.ExperimentConfig:
  """Returns a configuration for an untrained chat model over documents."""
  return config_lib.ExperimentConfig(
    name="documents",
    data=config_lib.DataConfig(source="prepared"),
    retrieval=config_lib.RetrievalConfig(kind="index"),
    episode=config_lib.EpisodeConfig(
      prompts="documents",
      top_k=4,
      max_generated=_CONTEXT_TOKENS // 4,
      max_context=_CONTEXT_TOKENS,
      turn_deadline=120.0,
    ),
    # Greedy models repeat themselves when they reason.
    sampling=config_lib.SamplingConfig(temperature=0.6, top_p=0.95),
    engine=config_lib.EngineConfig(slots=16, max_context=_CONTEXT_TOKENS),
    # An untrained model plans better if it reads its remaining budget.
    evaluation=config_lib.EvaluationConfig(budgets=(0, 1, 2, 3), scaffold=True),
  )


def open_endpoint(
  endpoint: Endpoint,
  *,
  episode: config_lib.EpisodeConfig,
  sampling: config_lib.SamplingConfig,
  concurrency: int,
) -> OpenEndpoint:
  """Opens a model behind an address.

  The server is asked for everything that `endpoint` leaves open.

  Args:
    endpoint: the model, and how it is asked.
    episode: names the environment, and has the deadline of turns.
    sampling: how tokens are drawn, unless a request says otherwise.
    concurrency: limit on concurrent turns.

  Raises:
    ValueError: the values contradict each other or the environment, the
      server has several models, or the key is missing.
    types.EngineError, types.RetrievalError: the server cannot be used.
  """
  url = endpoint.url
  calls = endpoint.calls
  folder = endpoint.tokenizer
  key = endpoint.key_variable
  if not redaction.is_address(url):
    raise ValueError(
      f"Found {redaction.shown(url)}, expected an address such as "
      "http://127.0.0.1:8000/v1."
    )
  prompts = episode.prompts
  is_documents = prompts in ("documents", *_DOCUMENTS.values())
  if calls == "auto" and folder:
    calls = COMPLETIONS
  if calls not in ("auto", *CALLS) or (folder and calls != COMPLETIONS):
    raise ValueError(
      f"Found calls {calls!r} and the tokenizer {folder!r}; expected one of "
      f"{', '.join(CALLS)}, and a tokenizer for {COMPLETIONS} only, because "
      "the server renders chats itself."
    )
  if calls == "tools" and not is_documents:
    raise ValueError(
      f"Found calls 'tools' and the environment {prompts!r}, whose prompt asks "
      f"for tags; expected {_DOCUMENTS['tools']} in episode.prompts, or tags."
    )
  if key is None:
    key = openai_endpoint.default_key_variable(url)
  model, served_model = _describe(endpoint, key)
  if served_model.slots:
    # More requests would wait there while their deadlines run.
    concurrency = min(concurrency, served_model.slots)
  why = ""
  searches_first = endpoint.searches_first
  if searches_first is None and prompts == "documents" and calls == "auto":
    searches_first = 0 < served_model.parameters < _SMALL_PARAMETERS
    if searches_first:
      why = f"it has {served_model.parameters // 10**6:,} million parameters"
  if searches_first and is_documents:
    prompts = SEARCH_FIRST
  if prompts in _SHORT:
    is_documents = False
    calls = "tags" if calls == "auto" else calls
  codec: Any = plain_text.PlainText()
  if folder:
    from anysearch_jax.policy import tokenizer

    codec = tokenizer.Tokenizer.from_folder(folder)

  def make_engine(calls: str) -> Any:
    settings: dict[str, Any] = {
      "model": model,
      "key_variable": key,
      "sampling": sampling,
      "deadline": episode.turn_deadline,
      "concurrency": concurrency,
    }
    if calls == COMPLETIONS:
      return completions.CompletionsEngine(url, codec, **settings)
    mode = calls.removeprefix("auto")
    return chat_completions.ChatEngine(url, codec, mode=mode, **settings)

  # Only the documents have an environment for models that call tools.
  engine = make_engine(calls if calls != "auto" or is_documents else "tags")
  if calls == "auto":
    try:
      calls = loop.run(engine.probe())
      why = engine.why
    except http_calls.StatusError as error:
      engine.close()
      if error.status == 401 and not key:
        raise ValueError(
          f"{error} No key was sent; --openai_key_variable={KEY} sends the one "
          "in that variable, also without https."
        ) from None
      if error.status not in chat_completions.MISSING:
        raise
      engine = make_engine(COMPLETIONS)
      why = "the server has no /chat/completions"
      try:
        calls = loop.run(engine.probe())
      except types.EngineError:
        # Neither route works: the model's name is wrong, which the first error
        # says.
        raise error from None
  if is_documents:
    prompts = _DOCUMENTS.get(calls, _DOCUMENTS["tags"])
  name = f"{model}@{url}"
  identity = {"openai": name, "tokenizer": folder}
  if calls != COMPLETIONS:
    identity["calls"] = calls
  return OpenEndpoint(
    name=name,
    identity=identity,
    engine=engine,
    codec=codec,
    prompts=prompts,
    why=why,
    context=served_model.context,
  )


def _describe(
  endpoint: Endpoint, key_variable: str
) -> tuple[str, openai_endpoint.ServedModel]:
  """Returns the model's name, and what the server says of the model."""
  server = openai_endpoint.OpenAIEndpoint(
    endpoint.url, "/chat/completions", key_variable=key_variable, deadline=30.0
  )
  try:
    model = endpoint.model or _only_model(
      endpoint.url, loop.run(server.models())
    )
    return model, loop.run(server.served_model(model))
  finally:
    server.close()


def _only_model(url: str, names: Sequence[str]) -> str:
  """Returns the name of a server's only model."""
  if len(names) == 1:
    return names[0]
  listed = ", ".join(sorted(names)[:_LISTED_MODELS]) or "them"
  ellipsis = ", ..." if len(names) > _LISTED_MODELS else ""
  raise ValueError(
    f"Found no name of a model (--openai_model), and {len(names)} models at "
    f"{url}; expected one of {listed}{ellipsis}."
  )
