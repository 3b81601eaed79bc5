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
  """A model elsewhere.

  Attributes:
    name: MODEL@URL.
    identity: what identifies it, with the way it is asked.
    engine, codec: of its episodes.
    asked: whether the server has replied already.
  """

  name: str
  identity: dict[str, str]
  engine: Any
  codec: Any
  asked: bool


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
  from anysearch_jax.host import http_calls, redaction
  from anysearch_jax.rollout import chat_completions, completions

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
  own = prompts in _DOCUMENTS.values()
  if calls == "auto" and f.hf:
    calls = _COMPLETIONS
  if f.hf and calls != _COMPLETIONS:
    raise app.UsageError(
      f"--openai_calls={calls} --hf={f.hf}: expected no tokenizer, because the "
      "server renders chats itself; or --openai_calls=completions."
    )
  if calls == "tools" and not own:
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
  model = f.openai_model or _only_model(f.openai, key)
  name, folder = f"{model}@{f.openai}", shipped.find(f.hf) if f.hf else ""
  codec = completions.PlainText()
  if folder:
    from anysearch_jax.policy import tokenizer

    codec = tokenizer.Tokenizer.from_folder(folder)

  def engine(calls: str) -> Any:
    settings: dict[str, Any] = {
      "model": model,
      "key_variable": key,
      "sampling": config.sampling,
      "deadline": config.episode.turn_deadline,
      "concurrency": config.engine.slots,
    }
    if calls == _COMPLETIONS:
      return completions.CompletionsEngine(f.openai, codec, **settings)
    mode = calls.removeprefix("auto")
    return chat_completions.ChatEngine(f.openai, codec, mode=mode, **settings)

  if calls == "auto":
    asking = engine(calls if own else "tags")
    try:
      calls, why = loop.run(asking.probe()), asking.why
    except http_calls.StatusError as error:
      if error.status not in chat_completions.MISSING:
        raise
      asking, why = engine(_COMPLETIONS), "the server has no /chat/completions"
      try:
        calls = loop.run(asking.probe())
      except types.EngineError:
        raise error from None  # Rather the model's name is wrong.
    print(f"{name}: {_MEANING[calls]} ({why}).", file=sys.stderr)
  else:
    asking, why = engine(calls), ""
  if own:
    prompts = _DOCUMENTS.get(calls, _DOCUMENTS["tags"])
    config = config_lib.changed(config, episode={"prompts": prompts})
  identity = {"openai": name, "tokenizer": folder}
  if calls != _COMPLETIONS:
    identity["calls"] = calls
  return config, Endpoint(name, identity, asking, codec, asked=bool(why))


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
