"""Search over HTTP, for many clients of several kinds at once.

    POST /retrieve, /search, /batch_search   see `dialects`
    GET  /health    200 and the identity of the index; 503 while the service
                    drains or is stuck, that is, while one search takes longer
                    than the deadline
    GET  /metrics   for Prometheus

Errors are `{"detail": sentence}`: 401 wrong token, 408 body too slow, 413 body
too large, 422 invalid request or beyond a limit, 429 queue full (try again
after `Retry-After` seconds), 500 search failed, 503 service stops, 504 deadline
passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import fastapi
import prometheus_client
from starlette import requests
from starlette import types as types_lib

from anysearch_jax import types
from retrieval.service import batching, dialects, service_metrics
from retrieval.service import limits as limits_lib

_log = logging.getLogger(__name__)
_GONE = "The client left."  # Sent with 499, but no client reads it.


class Search(Protocol):
  """The index that answers, such as a `search.SearchIndex`."""

  identity: dict[str, Any]

  def __len__(self) -> int: ...

  def search(
    self, queries: Sequence[str], k: int
  ) -> Sequence[Sequence[types.Passage]]: ...


class _RefusedError(Exception):
  """A request is refused with a status and a message."""

  def __init__(self, status: int, sentence: str, **headers: str):
    super().__init__(sentence)
    self.status = status
    self.headers = {k.replace("_", "-"): v for k, v in headers.items()}

  def response(self) -> fastapi.Response:
    return _json({"detail": str(self)}, self.status, self.headers)


class Service:
  """The shared state of an app's routes.

  Attributes:
    draining: whether the service is about to stop.
    busy: whether a search runs.
    waiting: number of queries that wait for a search.
    on_closed: counts a connection that was closed early, by its reason.
  """

  def __init__(
    self,
    search: Search,
    limits: limits_lib.Limits,
    token: str,
    described: Mapping[str, Any],
  ):
    self._search, self._limits = search, limits
    self._described = described
    self._token = token.encode()
    self._metrics = service_metrics.Metrics(lambda: self._batcher.waiting)
    self._batcher = batching.Batcher(
      search.search,
      batch=limits.batch,
      queue=limits.queue,
      on_search=self._metrics.searched,
    )
    self.draining = False
    self.on_closed = self._metrics.closed

  @property
  def busy(self) -> bool:
    return self._batcher.busy

  @property
  def waiting(self) -> int:
    return self._batcher.waiting

  def drain(self, seconds: float) -> None:
    """Reports "draining" in `/health` and closes after `seconds`.

    Until then requests are answered; those that are open at the end get 503.
    """
    self.draining = True
    asyncio.get_running_loop().call_later(seconds, self.close)

  def close(self) -> None:
    self.draining = True
    self._batcher.close()

  def health(self) -> fastapi.Response:
    """Returns status and identity of the service; needs no token."""
    status = "ok"
    if self.draining:
      status = "draining"
    elif self._batcher.seconds > self._limits.deadline:
      status = "stuck"
    values = {
      "status": status,
      "passages": len(self._search),
      "identity": self._search.identity,
      "topk": self._limits.topk,
      "max_topk": self._limits.max_topk,
      **self._described,
    }
    return _json(values, 200 if status == "ok" else 503)

  def metrics(self, request: requests.Request) -> fastapi.Response:
    """Returns the metrics for Prometheus."""
    try:
      self._authorize(request)
    except _RefusedError as refused:
      return refused.response()
    return fastapi.Response(
      prometheus_client.generate_latest(self._metrics.registry),
      media_type=prometheus_client.CONTENT_TYPE_LATEST,
    )

  async def respond(
    self, route: str, read: dialects.Read, request: requests.Request
  ) -> fastapi.Response:
    """Answers a request; errors become responses too."""
    start = time.monotonic()
    try:
      response = _json(await self._answer(read, request))
    except _RefusedError as refused:
      response = refused.response()
    except Exception:
      _log.exception("A request failed.")
      response = _json({"detail": "The server failed; its log says more."}, 500)
    took = time.monotonic() - start
    self._metrics.responded(route, response.status_code, took)
    return response

  def _authorize(self, request: requests.Request) -> None:
    header = request.headers.get("authorization", "")
    scheme, _, found = header.partition(" ")
    right = hmac.compare_digest(found.encode("latin-1"), self._token)
    if self._token and not (right and scheme.lower() == "bearer"):
      raise _RefusedError(
        401,
        "Found no valid token; send this service's token in the header "
        "'Authorization: Bearer TOKEN'.",
        WWW_Authenticate="Bearer",
      )

  async def _answer(
    self, read: dialects.Read, request: requests.Request
  ) -> Any:
    end = asyncio.get_running_loop().time() + self._limits.deadline
    self._authorize(request)
    body = await self._body(request, end)
    try:
      asked = read(dialects.load(body))
      k = self._limits.check(asked)
    except dialects.RequestError as error:
      raise _RefusedError(422, str(error)) from error
    most = self._limits.characters
    # Longer queries get here only if the limits say to cut them.
    cut = [query[:most] for query in asked.queries]
    queries = [query for query in cut if query.strip()]
    self._metrics.queries.inc(len(cut))
    self._metrics.blank_queries.inc(len(cut) - len(queries))
    self._metrics.cut_queries.inc(sum(len(q) > most for q in asked.queries))
    answers = iter(await self._found(request, queries, k, end))
    found = [next(answers) if q.strip() else () for q in cut]
    return asked.respond(found)

  async def _body(self, request: requests.Request, end: float) -> bytes:
    limit = self._limits.body
    too_large = _RefusedError(
      413, f"The request has more than {limit} bytes; split it."
    )
    length = request.headers.get("content-length", "")
    # As a float, because Python limits the digits of an int that it parses.
    if length.isdecimal() and float(length) > limit:
      raise too_large
    body = bytearray()
    try:
      async with asyncio.timeout_at(end):
        async for chunk in request.stream():
          body += chunk
          if len(body) > limit:
            raise too_large
    except TimeoutError as error:
      raise _RefusedError(
        408, f"The body took more than {self._limits.deadline:g} seconds."
      ) from error
    except requests.ClientDisconnect as error:
      raise _RefusedError(499, _GONE) from error
    return bytes(body)

  async def _found(
    self, request: requests.Request, queries: list[str], k: int, end: float
  ) -> list[batching.Answer]:
    try:
      found = self._batcher.submit(queries, k)
    except batching.FullError as error:
      seconds = max(1, math.ceil(error.seconds))
      raise _RefusedError(429, str(error), Retry_After=str(seconds)) from error
    except batching.ClosedError as error:
      raise _RefusedError(503, str(error), Retry_After="1") from error
    # After the body, the only message to receive is that the client left.
    gone = asyncio.ensure_future(_departed(request.receive))
    try:
      await asyncio.wait(
        (found, gone),
        timeout=end - asyncio.get_running_loop().time(),
        return_when=asyncio.FIRST_COMPLETED,
      )
      if found.done():
        return found.result()
    except batching.ClosedError as error:
      raise _RefusedError(503, str(error), Retry_After="1") from error
    except batching.SearchError as error:
      raise _RefusedError(500, str(error)) from error
    finally:
      found.cancel()
      left = not gone.cancel()
    if left:
      raise _RefusedError(499, _GONE)
    raise _RefusedError(
      504,
      f"No answer within {self._limits.deadline:g} seconds; send fewer "
      "queries, or try again later.",
    )


def create_app(
  search: Search,
  *,
  limits: limits_lib.Limits | None = None,
  token: str = "",
  described: Mapping[str, Any] | None = None,
) -> fastapi.FastAPI:
  """Returns the service as an ASGI app; its `Service` is `app.state.service`.

  Args:
    search: answers the queries, on one thread, one call at a time.
    limits: limits of requests and of the queue; None: the defaults.
    token: bearer token that clients must send to search and to read metrics;
      "" admits all clients.
    described: more fields of `/health`, as `search.SearchIndex.described`.
  """
  service = Service(
    search, limits or limits_lib.Limits(), token, described or {}
  )

  @contextlib.asynccontextmanager
  async def lifespan(app: fastapi.FastAPI):
    yield
    service.close()

  app = fastapi.FastAPI(title="AnySearch retrieval", lifespan=lifespan)
  app.state.service = service
  app.add_middleware(_Searches, service=service)
  for route, (read, example) in dialects.ROUTES.items():
    _add(app, service, route, read, example)

  @app.get("/health")
  async def health() -> fastapi.Response:
    return service.health()

  @app.get("/metrics")
  async def metrics(request: fastapi.Request) -> fastapi.Response:
    return service.metrics(request)

  return app


def _add(
  app: fastapi.FastAPI,
  service: Service,
  route: str,
  read: dialects.Read,
  example: Mapping[str, Any],
) -> None:
  """Adds a route to the app's documentation; `_Searches` answers it."""
  shown = {"content": {"application/json": {"example": example}}}

  @app.post(route, openapi_extra={"requestBody": shown})
  async def respond(request: fastapi.Request) -> fastapi.Response:
    return await service.respond(route, read, request)


class _Searches:
  """ASGI middleware that answers searches without FastAPI's routing.

  Routing, dependencies and validation of FastAPI take longer than all else that
  the event loop does for a search. `Service.respond` needs none of them.
  """

  def __init__(self, app: types_lib.ASGIApp, service: Service):
    self._app, self._service = app, service

  async def __call__(
    self,
    scope: types_lib.Scope,
    receive: types_lib.Receive,
    send: types_lib.Send,
  ) -> None:
    known = scope["type"] == "http" and scope["method"] == "POST"
    if not known or scope["path"] not in dialects.ROUTES:
      await self._app(scope, receive, send)
      return
    read, _ = dialects.ROUTES[scope["path"]]
    request = requests.Request(scope, receive)
    response = await self._service.respond(scope["path"], read, request)
    await response(scope, receive, send)


async def _departed(
  receive: Callable[[], Awaitable[Mapping[str, Any]]],
) -> None:
  """Waits until the client has disconnected."""
  while (await receive())["type"] != "http.disconnect":
    pass


def _json(
  value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> fastapi.Response:
  body = dialects.dump(value)
  return fastapi.Response(body, status, headers, "application/json")
