"""Servers with OpenAI's interface: a JSON object in, one choice and usage out.

https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import httpx2

from anysearch_jax.host.http import calls, errors, redaction, wire

T = TypeVar("T")

# Maximum bytes of an answer.
_LARGEST = 1 << 24


class Usage(NamedTuple):
  """The tokens of a call as its server counts them; 0 if it says nothing."""

  prompt: int
  completion: int


class Endpoint:
  """One route of a server; it can be used from any event loop.

  Args:
    url: of the server's interface (`http://host:8000/v1`), with or without
      `route`.
    route: such as `/completions`.
    key_variable: environment variable with the key; "": no key.
    patience: limits on the waiting.
    advice: last sentence of the error for an unreachable server.
    transport: replaces the network, for tests.

  Attributes:
    url: the address of the route.

  Raises:
    ValueError: the url is invalid, or the key is missing.
  """

  def __init__(
    self,
    url: str,
    route: str,
    *,
    key_variable: str,
    patience: calls.Patience,
    advice: str,
    transport: httpx2.AsyncBaseTransport | None = None,
  ):
    if not redaction.is_address(url):
      # The message does not quote the url, which may contain a password.
      raise ValueError(
        "The model's url is invalid; expected an address such as "
        "http://127.0.0.1:8000/v1, with no user, query or fragment."
      )
    self.url = url.rstrip("/").removesuffix(route).rstrip("/") + route
    key = key_variable and calls.secret_in(
      key_variable, "the key for the model"
    )
    self._caller = calls.Caller(
      patience,
      headers=calls.json_headers(key),
      secret=key,
      advice=advice,
      largest=_LARGEST,
      proxies=True,
      transport=transport,
    )

  async def ask(
    self,
    body: Mapping[str, Any],
    read: Callable[[Any], T | None],
    *,
    expected: str,
  ) -> tuple[T, Usage]:
    """Makes a call, with retries.

    Args:
      body: of the request.
      read: returns what the caller wants of the first choice; None, KeyError
        or TypeError if it is not there.
      expected: what `read` looks for, for the error message.

    Raises:
      types.RetrievalError: the server gave no such answer in time.
    """

    def parse(data: bytes) -> tuple[T, Usage]:
      value = wire.parse(data, self.url, self._caller.redact)
      try:
        found = read(value["choices"][0])
      except (KeyError, IndexError, TypeError, AttributeError):
        found = None
      if found is None:
        raise errors.AnswerError(
          f"{self.url}: found {self._caller.redact.quote(repr(value), 80)}, "
          f"expected {expected}."
        )
      return found, _usage(value.get("usage"))

    return await self._caller.wait(self._ask(wire.body(body), parse))

  def close(self) -> None:
    """Closes connections; running calls fail."""
    self._caller.close()

  async def _ask(self, content: bytes, read: Callable[[bytes], T]) -> T:
    return await self._caller.ask(
      "POST",
      self.url,
      content=content,
      read=read,
      until=self._caller.until(),
    )


def text(value: object) -> str | None:
  """Returns a text without halves of surrogate pairs; None for other values.

  No tokenizer can encode such a half.
  """
  if not isinstance(value, str):
    return None
  return value.encode(errors="replace").decode()


def _usage(value: object) -> Usage:
  usage = value if isinstance(value, Mapping) else {}
  counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
  return Usage(*(n if type(n) is int and n > 0 else 0 for n in counts))
