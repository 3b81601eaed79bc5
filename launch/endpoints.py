"""A model behind OpenAI's interface: its flags, and how it is asked.

One question decides how: by the model's own calls of tools, by tags in its
messages, or by text completions.
"""

from __future__ import annotations

import os
import sys
import typing
import urllib.parse
from typing import Any

from absl import app, flags

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import loop
from launch import shipped

if typing.TYPE_CHECKING:
  from anysearch_jax.rollout import completions

_COMPLETIONS = "completions"
# The environments of one's own documents, for models that call tools and for
# others.
_DOCUMENTS = {"tools": "documents_tools", "tags": "documents"}
_KEY = "OPENAI_API_KEY"
_LISTED = 10
_MEANING = {
  "tools": "the search is a tool that it calls",
  "tags": "it writes the search as tags in its messages",
  _COMPLETIONS: "it continues one text",
}


class Endpoint(typing.NamedTuple):
  """A model and how it is asked.

  Attributes:
    url, model: of the server and the model.
    calls: `tools`, `tags` or `completions`.
    tokenizer: folder of the model's tokenizer; "": there is none.
    key_variable: environment variable with the key; "": no key.
    refused: fields of requests that the server refuses.
    why: what decided `calls`; "" if the server has not been asked yet.
  """

  url: str
  model: str
  calls: str
  tokenizer: str = ""
  key_variable: str = ""
  refused: tuple[str, ...] = ()
  why: str = ""

  @property
  def name(self) -> str:
    return f"{self.model}@{self.url}"

  def identity(self) -> dict[str, str]:
    """Returns what identifies the policy."""
    named = {"openai": self.name, "tokenizer": self.tokenizer}
    return named | ({} if self.calls == _COMPLETIONS else {"calls": self.calls})


def define_flags() -> None:
  """Defines the flags; importing the module defines none."""
  flags.DEFINE_string(
    "openai", None, "Address of a server with OpenAI's interface (/v1)."
  )
  flags.DEFINE_string(
    "openai_model", "", "The model's name there; default: its only one."
  )
  flags.DEFINE_enum(
    "openai_calls",
    "auto",
    ("auto", *_MEANING),
    "How the model is asked. tools: it calls a tool; tags: it writes tags in "
    "chat messages; completions: it continues one text. auto: the first that "
    "works, or completions if --hf names its tokenizer.",
  )
  flags.DEFINE_string(
    "openai_key_variable",
    None,
    f"Environment variable with the key; default: {_KEY} if it is set and the "
    "address is https.",
  )


def read_flags(
  config: config_lib.ExperimentConfig,
) -> tuple[config_lib.ExperimentConfig, Endpoint]:
  """Returns the model of the flags, and a configuration with its environment.

  The server is asked for what the flags leave open, and what was decided is
  printed on standard error.

  Raises:
    app.UsageError: the flags contradict each other or the configuration.
    ValueError: the server has several models, or the key is missing.
    types.EngineError, types.RetrievalError: the server cannot be used.
  """
  # Imported late: a training needs no HTTP.
  from anysearch_jax.host import redaction

  f = flags.FLAGS
  for name in ("checkpoint", "scripted", "sglang"):
    if getattr(f, name):
      raise app.UsageError(
        f"--openai and --{name}: expected one of them; --hf may name the "
        "tokenizer of --openai."
      )
  if not redaction.is_address(f.openai):
    raise app.UsageError(
      f"--openai={redaction.shown(f.openai)}: expected an address such as "
      "http://127.0.0.1:8000/v1."
    )
  calls, prompts = f.openai_calls, config.episode.prompts
  if calls == "auto" and f.hf:
    calls = _COMPLETIONS
  if f.hf and calls != _COMPLETIONS:
    raise app.UsageError(
      f"--openai_calls={calls} --hf={f.hf}: expected no tokenizer, because the "
      "server renders chats itself; or --openai_calls=completions."
    )
  if calls == "tools" and prompts not in _DOCUMENTS.values():
    raise app.UsageError(
      f"--openai_calls=tools: found the environment {prompts!r}, whose prompt "
      f"asks for tags; expected {_DOCUMENTS['tools']} in episode.prompts, or "
      "--openai_calls=tags."
    )
  key = f.openai_key_variable
  if key is None:
    # Other hosts are sent this key over an encrypted connection only.
    is_safe = urllib.parse.urlsplit(f.openai).scheme == "https"
    key = _KEY if is_safe and os.environ.get(_KEY) else ""
  found = Endpoint(
    f.openai,
    f.openai_model or _only_model(f.openai, key),
    calls,
    shipped.find(f.hf) if f.hf else "",
    key,
  )
  if calls == "auto":
    found = _asked(found, config, tools=prompts in _DOCUMENTS.values())
    print(
      f"{found.name}: {_MEANING[found.calls]} ({found.why}).", file=sys.stderr
    )
  if prompts in _DOCUMENTS.values():
    prompts = _DOCUMENTS.get(found.calls, _DOCUMENTS["tags"])
    config = config_lib.changed(config, episode={"prompts": prompts})
  return config, found


def engine(
  endpoint: Endpoint, config: config_lib.ExperimentConfig
) -> tuple[completions.CompletionsEngine, Any]:
  """Returns the engine that asks a model, and its codec.

  Raises:
    ValueError: the key is missing, or the folder has no tokenizer.
  """
  from anysearch_jax.rollout import chat_completions, completions

  used = codec(endpoint.tokenizer)
  settings: dict[str, Any] = {
    "model": endpoint.model,
    "key_variable": endpoint.key_variable,
    "sampling": config.sampling,
    "deadline": config.episode.turn_deadline,
    "concurrency": config.engine.slots,
    "refused": endpoint.refused,
  }
  if endpoint.calls == _COMPLETIONS:
    return completions.CompletionsEngine(endpoint.url, used, **settings), used
  mode = endpoint.calls.removeprefix("auto")
  chat = chat_completions.ChatEngine(endpoint.url, used, mode=mode, **settings)
  return chat, used


def codec(folder: str) -> Any:
  """Returns the codec of a tokenizer's folder; "": one that estimates.

  Raises:
    ValueError: the folder has no tokenizer.
  """
  if folder:
    from anysearch_jax.policy import tokenizer

    return tokenizer.Tokenizer.from_folder(folder)
  from anysearch_jax.rollout import completions

  return completions.PlainText()


def _asked(
  endpoint: Endpoint, config: config_lib.ExperimentConfig, *, tools: bool
) -> Endpoint:
  """Asks one question, which decides how the model is asked.

  Args:
    endpoint: with `calls` that is `auto`.
    config: sampling and deadlines.
    tools: whether the environment can do without tags.
  """
  from anysearch_jax.host import http_calls
  from anysearch_jax.rollout import chat_completions

  tried = endpoint if tools else endpoint._replace(calls="tags")
  asking, _ = engine(tried, config)
  assert isinstance(asking, chat_completions.ChatEngine)
  try:
    calls, why = loop.run(asking.probe()), asking.why
  except http_calls.StatusError as error:
    if error.status not in chat_completions.MISSING:
      raise
    asking.close()
    asking, _ = engine(endpoint._replace(calls=_COMPLETIONS), config)
    why = "the server has no /chat/completions"
    try:
      calls = loop.run(asking.probe())
    except types.EngineError:
      # Rather the model's name is wrong.
      raise error from None
  finally:
    asking.close()
  return endpoint._replace(
    calls=calls, why=why, refused=tuple(sorted(asking.refused))
  )


def _only_model(url: str, key_variable: str) -> str:
  """Returns the name of a server's only model.

  Raises:
    ValueError: it has several, or none.
    types.RetrievalError: the server does not list them.
  """
  from anysearch_jax.host import openai_endpoint

  server = openai_endpoint.OpenAIEndpoint(
    url,
    "/chat/completions",
    key_variable=key_variable,
    advice="Does a server with OpenAI's interface run there?",
  )
  try:
    names = loop.run(server.models())
  finally:
    server.close()
  if len(names) == 1:
    return names[0]
  more = ", ..." if len(names) > _LISTED else ""
  raise ValueError(
    f"--openai_model: found nothing, and {len(names)} models at {url}; "
    f"expected one of {', '.join(sorted(names)[:_LISTED]) or 'them'}{more}."
  )
