"""The JSON of requests and responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import orjson
from starlette import requests, responses

from anysearch_jax.serving import errors

_BODY = 2**20  # Bytes of a request.
_BODY_SECONDS = 30.0


async def read(request: requests.Request) -> Any:
  """Returns the JSON of a request's body."""
  body, more = bytearray(), True
  try:
    async with asyncio.timeout(_BODY_SECONDS):
      while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
          raise errors.RequestError(499, "The client left.")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > _BODY:
          raise errors.RequestError(
            413, f"The request has more than {_BODY} bytes; send less."
          )
  except TimeoutError as error:
    raise errors.RequestError(
      408, f"The body took more than {_BODY_SECONDS:g} seconds."
    ) from error
  try:
    return json.loads(body)
  except (ValueError, RecursionError) as error:
    raise errors.RequestError(
      400, f"The body is no JSON ({error}); expected an object."
    ) from error


def respond(
  value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> responses.Response:
  """Returns a response of JSON."""
  return responses.Response(encode(value), status, headers, "application/json")


def encode(value: Any) -> bytes:
  """Returns a value as JSON."""
  try:
    return orjson.dumps(value)
  except TypeError:
    # A policy may write half a surrogate pair, which orjson refuses to encode.
    return json.dumps(value).encode()
