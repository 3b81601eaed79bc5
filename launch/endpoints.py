"""The flags that name a model behind OpenAI's interface."""

from __future__ import annotations

import sys
import typing

from absl import app, flags

from anysearch_jax import config as config_lib
from launch import shipped

if typing.TYPE_CHECKING:
  from anysearch_jax.rollout import endpoints


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
    ("auto", "tools", "tags", "completions"),
    "How the model is asked. tools: it calls a tool; tags: it writes tags in "
    "chat messages; completions: it continues one text. auto: the first that "
    "works, or completions if --hf names its tokenizer.",
  )
  flags.DEFINE_string(
    "openai_key_variable",
    None,
    "Environment variable with the key; default: OPENAI_API_KEY if it is set "
    "and the address is https.",
  )


def read_flags(
  config: config_lib.ExperimentConfig,
) -> tuple[config_lib.ExperimentConfig, endpoints.Opened]:
  """Returns the model of the flags, and a configuration with its environment.

  What the server was asked and decided is printed on standard error.

  Raises:
    app.UsageError: the flags contradict each other or the configuration.
    types.EngineError, types.RetrievalError: the server cannot be used.
  """
  # Imported late: a training needs no HTTP.
  from anysearch_jax.rollout import endpoints

  f = flags.FLAGS
  for name in ("checkpoint", "scripted", "sglang"):
    if getattr(f, name):
      raise app.UsageError(
        f"--openai and --{name}: expected one of them; --hf may name the "
        "tokenizer of --openai."
      )
  named = endpoints.Endpoint(
    f.openai,
    f.openai_model,
    f.openai_calls,
    shipped.find(f.hf) if f.hf else "",
    f.openai_key_variable,
  )
  try:
    opened = endpoints.opened(named, config)
  except ValueError as error:
    raise app.UsageError(f"--openai: {error}") from error
  if opened.asked:
    how = endpoints.CALLS[opened.identity.get("calls", endpoints.COMPLETIONS)]
    print(f"{opened.name}: {how} ({opened.why}).", file=sys.stderr)
  config = config_lib.changed(config, episode={"prompts": opened.prompts})
  return config, opened
