"""Search over HTTP, for many clients at once.

    POST /retrieve  see `dialects`
    GET  /health    200 and the identity of the index; 503 while the service
                    drains or is stuck, that is, while one search takes longer
                    than the deadline
    GET  /metrics   for Prometheus

Errors are `{"detail": sentence}`: 401 wrong token, 408 body too slow, 413 body
too large, 422 invalid request or beyond a limit, 429 queue full (try again
after `Retry-After` seconds), 500 search failed, 503 service stops, 504 deadline
passed (it grows with the queries of a request).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import prometheus_client
from starlette import applications, exceptions, requests, responses, routing

from anysearch_jax import types
from anysearch_jax.host import http_server
from anysearch_jax.retrieval.service import batching, dialects

_log = logging.getLogger(__name__)
# Bounds of buckets of times and of numbers of queries.
_SECONDS = tuple(m * 10.0**e for e in (-3, -2, -1, 0, 1) for m in (1, 2, 5))
_QUERIES = tuple(2**e for e in range(11))
# Metrics for Prometheus, and the labels that some of them have.
_COUNTERS = {
  "requests": "Requests that were answered; 499: the client left.",
  "queries": "Queries of requests that were read.",
  "blank_queries": "Queries without a letter, which got no passages.",
  "cut_queries": "Queries of which only the beginning was searched.",
  "closed_connections": "Connections that were closed early: their headers or "
  "their request took too long, another took their place, or none was left.",
}
_HISTOGRAMS = {
  "request_seconds": "From the headers of a request to its answer.",
  "search_queries": "Different queries in a search.",
  "search_seconds": "Of a search that did not fail.",
}
_LABELS = {
  "requests": ("status",),
  "closed_connections": ("reason",),
}


class Search(Protocol):
  """The index that answers, such as a `search.SearchIndex`."""

  identity: dict[str, Any]

  @property
  def health_fields(self) -> dict[str, Any]:
    """More fields of `/health`."""
    ...

  def __len__(self) -> int: ...

  def search(
    self, queries: Sequence[str], k: int
  ) -> Sequence[Sequence[types.Passage]]: ...


class Service:
  """The shared state of an app's routes.

  Attributes:
    locked: whether every client needs a token.
    draining: whether the service is about to stop.
    batcher: runs the searches.
  """

  def __init__(self, search: Search, limits: dialects.Limits, token: str):
    self._search = search
    self._limits = limits
    self._token = token.encode()
    self.locked = bool(token)
    self._registry = prometheus_client.CollectorRegistry()
    options: Any = {"namespace": "retrieval", "registry": self._registry}
    self._metrics: dict[str, Any] = {
      name: prometheus_client.Counter(
        name, text, _LABELS.get(name, ()), **options
      )
      for name, text in _COUNTERS.items()
    }
    for name, text in _HISTOGRAMS.items():
      self._metrics[name] = prometheus_client.Histogram(
        name,
        text,
        _LABELS.get(name, ()),
        buckets=_QUERIES if name.endswith("queries") else _SECONDS,
        **options,
      )
    prometheus_client.Gauge(
      "waiting_queries", "Queries that wait for a search.", **options
    ).set_function(lambda: self.batcher.waiting)
    self.batcher = batching.Batcher(
      search.search,
      batch=limits.batch,
      queue=limits.queue,
      on_search=self._on_search,
    )
    self.draining = False

  def _on_search(self, queries: int, seconds: float) -> None:
    self._metrics["search_queries"].observe(queries)
    self._metrics["search_seconds"].observe(seconds)

  def on_closed(self, reason: str) -> None:
    """Counts a connection that was closed early, by its reason."""
    self._metrics["closed_connections"].labels(reason).inc()

  def drain(self, seconds: float) -> None:
    """Reports "draining" in `/health` and closes after `seconds`.

    Until then requests are answered; those that are open at the end get 503.
    """
    self.draining = True
    asyncio.get_running_loop().call_later(seconds, self.close)

  def close(self) -> None:
    self.draining = True
    self.batcher.close()

  async def health(self, request: requests.Request) -> responses.Response:
    """Returns status and identity of the service; needs no token."""
    status = "ok"
    if self.draining:
      status = "draining"
    elif self.batcher.seconds > self._limits.deadline:
      status = "stuck"
    values = {
      "status": status,
      "passages": len(self._search),
      "identity": self._search.identity,
      "topk": self._limits.topk,
      "max_topk": self._limits.max_topk,
      **self._search.health_fields,
    }
    return _json(values, 200 if status == "ok" else 503)

  async def metrics(self, request: requests.Request) -> responses.Response:
    """Returns the metrics for Prometheus."""
    try:
      self._authorize(request)
    except dialects.RequestError as refused:
      return _refusal(refused)
    return responses.Response(
      prometheus_client.generate_latest(self._registry),
      media_type=prometheus_client.CONTENT_TYPE_LATEST,
    )

  async def respond(self, request: requests.Request) -> responses.Response:
    """Answers a request; errors become responses too."""
    start = time.monotonic()
    name = f"req_{uuid.uuid4().hex}"
    try:
      response = _json(await self._answer(request))
    except Exception as error:
      refusal = error
      if isinstance(refusal, exceptions.HTTPException):
        refusal = dialects.RequestError(refusal.detail, refusal.status_code)
      elif not isinstance(refusal, dialects.RequestError):
        refusal = dialects.RequestError("The server failed.", 500)
      if refusal.status == 500:  # Its cause may name internal addresses.
        cause = refusal.__cause__ or error
        _log.error("%s failed: %r", name, cause, exc_info=cause is error)
        message = f"{refusal} The server's log says more of {name}."
        refusal = dialects.RequestError(message, 500)
      response = _refusal(refusal)
    response.headers["x-request-id"] = name
    seconds = time.monotonic() - start
    status = str(response.status_code)
    self._metrics["requests"].labels(status).inc()
    self._metrics["request_seconds"].observe(seconds)
    return response

  def _authorize(self, request: requests.Request) -> None:
    header = request.headers.get("authorization", "")
    scheme, _, token = header.partition(" ")
    is_valid = hmac.compare_digest(token.encode("latin-1"), self._token)
    if self._token and not (is_valid and scheme.lower() == "bearer"):
      raise dialects.RequestError(
        "Found no valid token; send this service's token in the header "
        "'Authorization: Bearer TOKEN'.",
        401,
        WWW_Authenticate="Bearer",
      )

  async def _answer(self, request: requests.Request) -> dict[str, Any]:
    begun = asyncio.get_running_loop().time()
    self._authorize(request)
    limits = self._limits
    body = await http_server.body(
      request, limit=limits.body, seconds=limits.deadline
    )
    parsed = dialects.read(dialects.load(body))
    k = limits.check(parsed)
    characters = limits.characters
    # One blank or long query must not cost a batch its answers.
    cut = [query[:characters] for query in parsed.queries]
    queries = [query for query in cut if query.strip()]
    end = begun + limits.seconds(len(queries))
    for name, count in (
      ("queries", len(cut)),
      ("blank_queries", len(cut) - len(queries)),
      ("cut_queries", sum(len(query) > characters for query in parsed.queries)),
    ):
      self._metrics[name].inc(count)
    answers = iter(await self._search_until(request, queries, k, end))
    passages = [next(answers) if q.strip() else () for q in cut]
    return dialects.response(passages, is_scored=parsed.is_scored)

  async def _search_until(
    self, request: requests.Request, queries: list[str], k: int, end: float
  ) -> list[batching.Answer]:
    answers = self.batcher.submit(queries, k)
    try:
      async with asyncio.timeout_at(end):
        return await http_server.unless_gone(request.receive, answers)
    except TimeoutError:
      raise dialects.RequestError(
        f"No answer within {self._limits.seconds(len(queries)):g} seconds; try "
        "again later, or give each query more (--per_query).",
        504,
      ) from None


def create_app(
  search: Search, *, limits: dialects.Limits = dialects.DEFAULT, token: str = ""
) -> applications.Starlette:
  """Returns the service as an ASGI app; its `Service` is `app.state.service`.

  Args:
    search: answers the queries, on one thread, one call at a time.
    limits: limits of requests and of the queue.
    token: bearer token that clients must send to search and to read metrics;
      "" admits all clients.
  """
  service = Service(search, limits, token)

  @contextlib.asynccontextmanager
  async def lifespan(app: applications.Starlette):
    yield
    service.close()

  app = applications.Starlette(
    routes=[
      routing.Route("/retrieve", service.respond, methods=["POST"]),
      routing.Route("/health", service.health),
      routing.Route("/metrics", service.metrics),
    ],
    lifespan=lifespan,
    exception_handlers={exceptions.HTTPException: _refuse_route},
  )
  app.state.service = service
  return app


def _refusal(refused: dialects.RequestError) -> responses.Response:
  return _json({"detail": str(refused)}, refused.status, refused.headers)


async def _refuse_route(
  request: requests.Request, error: Exception
) -> responses.Response:
  """Answers a request of an unknown path or method."""
  assert isinstance(error, exceptions.HTTPException)
  return _json({"detail": error.detail}, error.status_code, error.headers)


def _json(
  value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> responses.Response:
  body = dialects.dump(value)
  return responses.Response(body, status, headers, "application/json")
