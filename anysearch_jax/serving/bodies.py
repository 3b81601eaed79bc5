"""The JSON of requests and responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import fastapi
from starlette import requests

from anysearch_jax.serving import errors

_BODY = 2**20  # Bytes of a request.
_BODY_SECONDS = 30.0


async def read(request: requests.Request) -> Any:
  """Returns the JSON of a request's body."""
  body = bytearray()
  try:
    async with asyncio.timeout(_BODY_SECONDS):
      async for chunk in request.stream():
        body += chunk
        if len(body) > _BODY:
          raise errors.RequestError(
            413, f"The request has more than {_BODY} bytes; send less."
          )
  except TimeoutError as error:
    raise errors.RequestError(
      408, f"The body took more than {_BODY_SECONDS:g} seconds."
    ) from error
  except requests.ClientDisconnect as error:
    raise errors.RequestError(499, "The client left.") from error
  try:
    return json.loads(body)
  except (ValueError, RecursionError) as error:
    raise errors.RequestError(
      400, f"The body is no JSON ({error}); expected an object."
    ) from error


def respond(
  value: Any, status: int = 200, headers: dict[str, str] | None = None
) -> fastapi.Response:
  """Returns a response of JSON."""
  # The strings of a policy may hold half a surrogate pair; ASCII escapes it.
  return fastapi.Response(
    json.dumps(value), status, headers, "application/json"
  )
