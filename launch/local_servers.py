"""Finds the models that servers of this machine offer, and takes one of them.

All usual ports are asked at once for `/v1/models`. What does not answer in time
with a list of models is passed over.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import app

from anysearch_jax import types
from anysearch_jax.host import http_calls, loop
from anysearch_jax.launch import stopping

# The port of each server, where its default was not changed.
PORTS = {
  11434: "Ollama",
  8080: "llama.cpp",
  1234: "LM Studio",
  8000: "vLLM",
  30000: "SGLang",
}
_SECONDS = 1.0
_MAX_BYTES = 1 << 20
_LISTED = 10  # Of the models, in a sentence.
# Statuses of a server that has models, but wants a key or still loads them.
_REFUSALS = (401, 403, 503)
# Names of models that make vectors or scores instead of texts.
_NO_CHAT = re.compile(
  r"embed|rerank|(^|[-_/:.])(bge|colbert|e5|gte|minilm|paraphrase)([-_/:.]|$)",
  re.IGNORECASE,
)


class ServedModel(NamedTuple):
  """A model of a server on this machine.

  Attributes:
    name: its name there.
    url: address of the server's interface.
    server: the program that usually listens there.
  """

  name: str
  url: str
  server: str

  def __str__(self) -> str:
    return f"{self.name} at {self.url} ({self.server})"

  @property
  def flags(self) -> str:
    """The flags that name the model."""
    return f"--openai={self.url} --openai_model={shlex.quote(self.name)}"


class Findings(NamedTuple):
  """What the servers of this machine answered.

  Attributes:
    models: the models, in the order of the ports.
    refusals: why servers that may have models listed none, a sentence each.
  """

  models: list[ServedModel]
  refusals: list[str]


def find() -> Findings:
  """Asks all usual ports of this machine for models."""
  return loop.run(_find())


def choose(name: str = "") -> ServedModel:
  """Returns the model that a user means, and says which it is.

  Of several, the user chooses on the terminal.

  Args:
    name: its name; "": any model that writes texts.

  Raises:
    app.UsageError: there is no such model, or there are several and no
      terminal to ask on.
  """
  models, refusals = find()
  if name:
    names = (name, f"{name}:latest")  # As Ollama reads a name.
    candidates = [model for model in models if model.name in names]
  else:
    candidates = [m for m in models if not _NO_CHAT.search(m.name)]
    for model in models:
      if model not in candidates:
        stopping.say(
          f"left out {model}: its name is of a model for embeddings or "
          "reranking"
        )
  if not candidates:
    raise app.UsageError(_nothing(name, models, refusals))
  model = candidates[0] if len(candidates) == 1 else _ask_user(candidates)
  stopping.say(f"model: {model}")
  return model


async def _find() -> Findings:
  replies = await asyncio.gather(
    *(_ask_server(port, server) for port, server in PORTS.items())
  )
  models = [model for reply in replies for model in reply.models]
  refusals = [refusal for reply in replies for refusal in reply.refusals]
  return Findings(models=models, refusals=refusals)


async def _ask_server(port: int, server: str) -> Findings:
  """Returns the models of a server, none if it is anything else."""
  base = f"http://127.0.0.1:{port}/v1"
  url, caller = http_calls.at_address(
    base,
    "/models",
    "model",
    key_variable="",
    advice="",
    patience=http_calls.Patience(deadline=_SECONDS, wait=_SECONDS, retries=0),
    largest_bytes=_MAX_BYTES,
    retried_statuses=(),
  )

  def read(value: Any) -> list[ServedModel]:
    try:
      names = [model["id"] for model in value["data"]]
    except (KeyError, TypeError):
      names = []
    return [
      ServedModel(name, base, server)
      for name in names
      if isinstance(name, str) and name
    ]

  try:
    async with asyncio.timeout(_SECONDS):
      return Findings(await caller.ask("GET", url, read=read), [])
  except http_calls.StatusError as error:
    refusals = [str(error)] if error.status in _REFUSALS else []
    return Findings([], refusals)
  except (types.RetrievalError, TimeoutError):
    return Findings([], [])


def _nothing(
  name: str, models: Sequence[ServedModel], refusals: Sequence[str]
) -> str:
  """Returns what was found where no model can be taken."""
  if name and models:
    return (
      f"--openai_model={name}: found no such model at the servers of this "
      f"machine; expected one of {_listed([m.name for m in models], ', ')}."
    )
  ports = ", ".join(f"{port} ({server})" for port, server in PORTS.items())
  refused = "".join(f" {refusal}" for refusal in refusals)
  return (
    f"Found no policy, and no chat model at 127.0.0.1, ports {ports}.{refused} "
    "Expected a server there (`ollama serve`, `llama-server -m FILE.gguf`), or "
    "--local=FILE.gguf or --local=smollm2 to start one, --openai=URL, or "
    "--hf=FOLDER."
  )


def _ask_user(models: Sequence[ServedModel]) -> ServedModel:
  """Returns the model whose number the user types."""
  if not (sys.stdin.isatty() and sys.stderr.isatty()):
    raise app.UsageError(_several(models))
  for number, model in enumerate(models, 1):
    stopping.say(f"{number:3}  {model}")
  while True:
    prompt = f"Number of the model, 1 to {len(models)}: "
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
      raise app.UsageError(_several(models))
    if line.strip().isdecimal() and 0 < int(line) <= len(models):
      return models[int(line) - 1]


def _several(models: Sequence[ServedModel]) -> str:
  choices = _listed([f"  {model.flags}" for model in models], "\n")
  return (
    f"Found {len(models)} models at the servers of this machine, expected the "
    f"flags of one:\n{choices}"
  )


def _listed(texts: Sequence[str], separator: str) -> str:
  ellipsis = [f"{len(texts) - _LISTED} more"] if len(texts) > _LISTED else []
  return separator.join([*texts[:_LISTED], *ellipsis])
