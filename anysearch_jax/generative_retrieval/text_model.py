"""Language models behind retrievers: a text for a prompt.

`EngineModel` takes a turn of an engine of ours, `EndpointModel` asks a server
that has OpenAI's chat completions.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import httpx2

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.host.http import calls, errors, redaction, wire

# What sets the address of a second call apart from every episode's own.
_VARIANT = 1 << 40
_TURN = 1 << 20
_LARGEST = 1 << 24
_ADVICE = "Does a server with OpenAI's chat completions run there?"


class TextModel(Protocol):
  """Completes prompts.

  counters: `calls`, `input_tokens` and `output_tokens`, as far as known.
  """

  counters: Counter[str]

  async def complete(
    self, prompt: str, *, address: types.Address, turn: int
  ) -> str:
    """What the model says to one user message.

    Args:
      prompt: any text.
      address, turn: of the episode that waits for it; randomness is drawn by
        them, apart from the episode's own.

    Raises:
      types.EngineError, types.RetrievalError: it says nothing in time.
    """
    ...

  def identity(self) -> dict[str, Any]:
    """JSON values that say which model it is."""
    ...


class EngineModel:
  """`TextModel` of an engine of ours; it samples as the engine does.

  The episode that asks is released from the engine first, and prefilled again
  when it goes on. So an episode has its own cache or that of its second call,
  never both: as many episodes as the engine has slots can all search at once,
  and none waits for a slot that only its own end would free.

  Args:
    config: tokens and seconds of a call.
    stop: texts that end a turn of the engine; a reply ends before them.
  """

  def __init__(
    self, config: config_lib.TextModelConfig, *, stop: tuple[str, ...]
  ):
    self._config, self._stop = config, stop
    self._engine: types.Engine | None = None
    self._codec: types.TextCodec | None = None
    self.counters: Counter[str] = Counter()

  def attach(self, engine: types.Engine, codec: types.TextCodec) -> None:
    """Asks this engine from now on."""
    self._engine, self._codec = engine, codec

  async def complete(
    self, prompt: str, *, address: types.Address, turn: int
  ) -> str:
    """See `TextModel`; a prompt without room in the engine is a failure."""
    if self._engine is None:
      raise RuntimeError(
        "The retriever asks the policy's engine and was given none; expected "
        "text_model.attach(retriever, engine, codec) before the first search."
      )
    self._engine.release(address)
    own = address._replace(variant=address.variant + _VARIANT)
    _, ids = self._codec.render(
      protocol.neutralise(prompt, self._codec.control_tokens)
    )
    request = types.GenerateRequest(
      own, _TURN + turn, tuple(ids), self._config.max_tokens, self._stop
    )
    self.counters["calls"] += 1
    self.counters["input_tokens"] += len(ids)
    try:
      async with asyncio.timeout(self._config.deadline):
        said = await self._engine.generate(request)
    except TimeoutError:
      raise types.EngineError(
        f"The second call of turn {turn} had no reply within "
        f"{self._config.deadline:g} seconds (retrieval.model.deadline)."
      ) from None
    finally:
      self._engine.release(own)
    self.counters["output_tokens"] += len(said.token_ids)
    text = said.text
    for stop in self._stop:
      text = text.removesuffix(stop)
    return text

  def identity(self) -> dict[str, Any]:
    """That it is the policy; which one, a run's provenance says."""
    return {"kind": "policy", "max_tokens": self._config.max_tokens}


class EndpointModel:
  """`TextModel` of a server; from any event loop.

  Args:
    url: of the server's interface (`http://host:8000/v1`), with or without
      `/chat/completions`.
    config: model, key and limits.
    transport: answers instead of the network.

  Raises:
    ValueError: a url that is none, no model, a key that is not there.
  """

  def __init__(
    self,
    url: str,
    config: config_lib.TextModelConfig,
    *,
    transport: httpx2.AsyncBaseTransport | None = None,
  ):
    if not redaction.is_address(url):
      # Which may hold a password.
      raise ValueError(
        "The model's url is not one; expected an address such as "
        "http://127.0.0.1:8000/v1, with no user, query or fragment."
      )
    if not config.name:
      raise ValueError(
        "retrieval.model.name: found nothing, expected the model's name at "
        f"{url}."
      )
    self._url = url.rstrip("/").removesuffix("/chat/completions").rstrip("/")
    self._url += "/chat/completions"
    self._config = config
    key = config.key_variable and calls.secret_in(
      config.key_variable, "the key for the model"
    )
    headers = {"Content-Type": "application/json"}
    if key:
      headers["Authorization"] = f"Bearer {key}"
    self._caller = calls.Caller(
      calls.Patience(deadline=config.deadline, concurrency=config.concurrency),
      headers=headers,
      secret=key,
      advice=_ADVICE,
      largest=_LARGEST,
      proxies=True,
      transport=transport,
    )
    self.counters: Counter[str] = Counter()

  async def complete(
    self, prompt: str, *, address: types.Address, turn: int
  ) -> str:
    """See `TextModel`."""
    c = self._config
    asked = {
      "model": c.name,
      "messages": [{"role": "user", "content": protocol.neutralise(prompt)}],
      "max_tokens": c.max_tokens,
      "temperature": c.temperature,
      "top_p": c.top_p,
      # As far as the server keeps to it, a reply can be had again.
      "seed": int(uniform(address, turn, "reply") * 2**31),
    }
    self.counters["calls"] += 1
    try:
      text, usage = await self._caller.wait(self._ask(wire.body(asked)))
    except errors.RetrievalError as error:
      raise types.RetrievalError(str(error)) from error
    self.counters["input_tokens"] += usage[0]
    self.counters["output_tokens"] += usage[1]
    return text

  def identity(self) -> dict[str, Any]:
    """Address, model and how it is sampled."""
    c = self._config
    return {
      "kind": "endpoint",
      "url": self._url,
      "model": c.name,
      "temperature": c.temperature,
      "top_p": c.top_p,
      "max_tokens": c.max_tokens,
    }

  def close(self) -> None:
    """Closes connections; calls under way fail."""
    self._caller.close()

  async def _ask(self, body: bytes) -> tuple[str, tuple[int, int]]:
    return await self._caller.ask(
      "POST",
      self._url,
      content=body,
      read=lambda data: _reply(data, self._url, self._caller.redact),
      until=self._caller.until(),
    )


def attach(
  retriever: types.Retriever, engine: types.Engine, codec: types.TextCodec
) -> None:
  """Gives the policy's engine to a retriever that asks it; others are left."""
  if hasattr(retriever, "attach"):
    retriever.attach(engine, codec)


def uniform(address: types.Address, turn: int, *more: int | str) -> float:
  """A draw from [0, 1) that only an address, a turn and `more` decide.

  Episodes that share their random numbers (`types.Address.variant`) share it.
  """
  key = [*map(int, address._replace(variant=0)), turn, *more]
  digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
  return (int.from_bytes(digest) >> 11) / 2**53


def identified(values: dict[str, Any]) -> dict[str, Any]:
  """An identity with its hash."""
  canonical = json.dumps(values, sort_keys=True).encode()
  return {**values, "sha256": hashlib.sha256(canonical).hexdigest()}


def _reply(
  data: bytes, url: str, redact: redaction.Redactor
) -> tuple[str, tuple[int, int]]:
  """Text of a completion, and tokens of prompt and reply.

  Raises:
    errors.RetrievalError: an answer of another shape.
  """
  value = wire.parse(data, url, redact)
  try:
    text = value["choices"][0]["message"]["content"]
  except (KeyError, IndexError, TypeError):
    text = None
  if not isinstance(text, str):
    raise errors.RetrievalError(
      f"{url}: found {redact.quote(repr(value), 80)}, expected a text at "
      "choices[0].message.content."
    )
  usage = value.get("usage")
  usage = usage if isinstance(usage, Mapping) else {}
  counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
  prompt, reply = (n if type(n) is int and n > 0 else 0 for n in counts)
  # No tokenizer encodes half of a surrogate pair.
  return text.encode(errors="replace").decode(), (prompt, reply)
