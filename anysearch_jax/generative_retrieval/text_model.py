"""Language models behind retrievers: a prompt in, a text out.

`EngineModel` samples with the run's own engine. `EndpointModel` asks a server
with OpenAI's chat-completions interface.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from typing import Any

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.host import openai_endpoint, redaction

# Offsets that keep the address of a second call distinct from all episodes'.
_VARIANT = 1 << 40
_TURN = 1 << 20


class EngineModel:
  """A model that is an engine of the run, with its sampling settings.

  The episode that asks is first released from the engine, and is prefilled
  again at its next turn. An episode therefore never holds two slots. Otherwise
  the engine could deadlock: if all slots belonged to searching episodes, each
  would wait for a slot that only its own end would free.

  Args:
    config: tokens and deadline of a call.
    stop: texts that end a turn of the engine; they are removed from replies.
  """

  def __init__(
    self, config: config_lib.TextModelConfig, *, stop: tuple[str, ...]
  ):
    self._config = config
    self._stop = stop
    self._attached: tuple[types.Engine, types.TextCodec] | None = None
    self.counters: Counter[str] = Counter()

  def attach(self, engine: types.Engine, codec: types.TextCodec) -> None:
    """Sets the engine and the codec of later calls."""
    self._attached = engine, codec

  async def complete(
    self, prompt: str, *, address: types.Address, turn: int
  ) -> str:
    """Returns the model's reply to one user message.

    Args:
      prompt: any text.
      address: the address of the episode that waits for the reply. With `turn`
        it determines the random numbers, which differ from the episode's own.
      turn: the turn of this episode.

    Raises:
      types.EngineError: the model gave no reply in time, or the prompt is too
        long for the engine.
    """
    if self._attached is None:
      raise RuntimeError(
        "The retriever asks the policy's engine and was given none; expected "
        "searching.attach(retriever, engine, codec) before the first search."
      )
    engine, codec = self._attached
    engine.release(address)
    call_address = address._replace(variant=address.variant + _VARIANT)
    _, ids = codec.render(protocol.neutralise(prompt, codec.control_tokens))
    request = types.GenerateRequest(
      call_address,
      _TURN + turn,
      tuple(ids),
      self._config.max_tokens,
      self._stop,
      repetition_penalty=self._config.repetition_penalty,
    )
    self.counters["calls"] += 1
    self.counters["input_tokens"] += len(ids)
    try:
      async with asyncio.timeout(self._config.deadline):
        generation = await engine.generate(request)
    except TimeoutError:
      raise types.EngineError(
        f"The second call of turn {turn} had no reply within "
        f"{self._config.deadline:g} seconds (retrieval.model.deadline)."
      ) from None
    finally:
      engine.release(call_address)
    self.counters["output_tokens"] += len(generation.token_ids)
    text = generation.text
    for stop in self._stop:
      text = text.removesuffix(stop)
    return text

  def identity(self) -> dict[str, Any]:
    """Identifies the model as the policy; the run's provenance names it."""
    return {"kind": "policy", "max_tokens": self._config.max_tokens}


class EndpointModel:
  """A model of a server; it can be used from any event loop.

  `url` is as of `OpenAIEndpoint`; `config` has model, key and limits. Raises
  ValueError if the url is invalid, or the model or the key is missing.
  """

  def __init__(self, url: str, config: config_lib.TextModelConfig):
    if not config.name:
      raise ValueError(
        "retrieval.model.name: found nothing, expected the model's name at "
        f"{redaction.shown(url)}."
      )
    self._config = config
    self._endpoint = openai_endpoint.OpenAIEndpoint(
      url,
      "/chat/completions",
      key_variable=config.key_variable,
      deadline=config.deadline,
      concurrency=config.concurrency,
    )
    self.close = self._endpoint.close
    self.counters: Counter[str] = Counter()

  async def complete(
    self, prompt: str, *, address: types.Address, turn: int
  ) -> str:
    """Returns the model's reply to one user message.

    Args:
      prompt: any text.
      address: the address of the episode that waits for the reply. With `turn`
        it determines the seed of the request.
      turn: the turn of this episode.

    Raises:
      types.RetrievalError: the model gave no reply.
    """
    c = self._config
    self.counters["calls"] += 1
    options = {}
    if c.repetition_penalty != 1:  # OpenAI's own servers refuse it.
      options["repetition_penalty"] = c.repetition_penalty
    text, usage = await self._endpoint.chat(
      c.name,
      protocol.neutralise(prompt),
      max_tokens=c.max_tokens,
      temperature=c.temperature,
      top_p=c.top_p,
      # Replies are reproducible if the server honours the seed.
      seed=int(uniform(address, turn, "reply") * 2**31),
      **options,
    )
    self.counters["input_tokens"] += usage.prompt
    self.counters["output_tokens"] += usage.completion
    return text

  def identity(self) -> dict[str, Any]:
    """Returns the address, the model and its sampling settings."""
    c = self._config
    names = ("temperature", "top_p", "repetition_penalty", "max_tokens")
    values = {"kind": "endpoint", "url": self._endpoint.url, "model": c.name}
    return values | {name: getattr(c, name) for name in names}


# Both count `calls`, `input_tokens` and `output_tokens`, as far as known.
TextModel = EngineModel | EndpointModel


def uniform(address: types.Address, turn: int, *more: int | str) -> float:
  """Returns a draw from [0, 1) that depends only on the arguments.

  `address.variant` is ignored, so episodes that share their random numbers get
  the same draw.
  """
  key = [*map(int, address._replace(variant=0)), turn, *more]
  digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
  return (int.from_bytes(digest) >> 11) / 2**53
