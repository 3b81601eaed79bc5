"""An agent over HTTP, for OpenAI's clients.

    POST /v1/responses          see `responses_api`
    POST /v1/chat/completions   see `chat_api`
    GET  /                      a page to ask from
    GET  /v1/models             the policy's name
    GET  /examples              questions that can be asked
    GET  /health                200, or 503 while the service drains
    GET  /metrics               for Prometheus

Errors have OpenAI's form: 400 a field that cannot be honoured, 401 no key, 404
no such model or path, 408 body too slow, 413 body too large, 429 too many
requests or a day's limit, 500 a bug, 503 the engine, the retriever or a place
is missing, or the service stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import json
import logging
import threading
import time
from collections.abc import (
  AsyncGenerator,
  Awaitable,
  Callable,
  Iterator,
  Mapping,
)
from typing import Any

import prometheus_client
from starlette import applications, exceptions, requests, routing
from starlette import responses as responses_lib

from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.agent import events
from anysearch_jax.serving import (
  answers,
  chat_api,
  fields,
  keys,
  responses_api,
  service_metrics,
)

_log = logging.getLogger(__name__)
_EXAMPLES = 100
_FILES = {
  "/": ("index.html", "text/html; charset=utf-8"),
  "/page.css": ("page.css", "text/css; charset=utf-8"),
  "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
# Nothing from elsewhere, no inline script, no frame around it:
# https://developer.mozilla.org/en-US/docs/Web/HTTP/Guides/CSP
_HEADERS = {
  "content-security-policy": (
    "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'"
  ),
  "x-content-type-options": "nosniff",
  "referrer-policy": "no-referrer",
  "cache-control": "no-cache",
}


class Service:
  """The shared state of an app's routes.

  Args:
    agent: answers the questions.
    served: what may be asked.
    guard: admits keys; None admits everybody.
    most: questions under way at a time, those that wait for a place included.
    log_questions: whether the log holds the texts of questions.

  Attributes:
    draining: whether the service is about to stop and refuses new questions.
  """

  def __init__(
    self,
    agent: agent_lib.Agent,
    served: fields.Served,
    *,
    guard: keys.Guard | None = None,
    most: int = 0,
    log_questions: bool = False,
  ):
    self._agent, self._served, self._guard = agent, served, guard
    self._most = most or 8 * agent.slots
    engine = agent.engine
    self._metrics = service_metrics.Metrics(
      agent.slots,
      (lambda: engine.pages) if isinstance(engine, types.Paged) else None,
    )
    self._answers = answers.Answers(agent, self._metrics)
    self._log_questions = log_questions
    self._running = 0
    self.draining = False

  def drain(self, seconds: float) -> None:
    """Refuses new questions; those under way get 503 after `seconds`."""
    self.draining = True
    timer = threading.Timer(seconds, self._agent.end_questions)
    timer.daemon = True
    timer.start()

  def on_closed(self, reason: str) -> None:
    """Counts a connection that was closed early."""
    self._metrics.responded("connection", 499, 0.0)
    del reason

  def health(self, _: requests.Request) -> responses_lib.Response:
    """Returns the status of the service; needs no key."""
    status = "draining" if self.draining else "ok"
    values = {
      "status": status,
      "model": self._served.model,
      "slots": self._agent.slots,
      "running": self._running,
      "max_budget": self._served.max_budget,
      "keys": self._guard is not None,
    }
    return fields.respond(values, 503 if self.draining else 200)

  def metrics(self, request: requests.Request) -> responses_lib.Response:
    """Returns the metrics for Prometheus."""
    self._key(request)
    return responses_lib.Response(
      prometheus_client.generate_latest(self._metrics.registry),
      media_type=prometheus_client.CONTENT_TYPE_LATEST,
    )

  def models(self, request: requests.Request) -> responses_lib.Response:
    """Returns the models that a request may name."""
    self._key(request)
    model = {
      "id": self._served.model,
      "object": "model",
      "created": 0,
      "owned_by": "anysearch",
    }
    return fields.respond({"object": "list", "data": [model]})

  def examples(self, _: requests.Request) -> responses_lib.Response:
    """Returns questions that one can ask; it is empty for real corpora."""
    return fields.respond([q.text for q in self._agent.examples[:_EXAMPLES]])

  async def responses(
    self, request: requests.Request
  ) -> responses_lib.Response:
    """Answers `POST /v1/responses`."""
    with self._account("responses") as account:
      body = await self._admitted(request, account)
      asked = self._begin(account, responses_api.read(body, self._served))
      writer = responses_api.Writer(asked, self._served)
      if asked.stream:
        return self._stream(account, self._chunks(writer, account, asked))
      (told,) = await self._answered(request, account, asked)
      return fields.respond(writer.response(told))

  async def chat(self, request: requests.Request) -> responses_lib.Response:
    """Answers `POST /v1/chat/completions`."""
    with self._account("chat") as account:
      body = await self._admitted(request, account)
      read, usage = chat_api.read(body, self._served)
      asked = self._begin(account, read)
      writer = chat_api.Writer(asked, usage=usage)
      if asked.stream:
        return self._stream(account, self._chunks(writer, account, asked))
      told = await self._answered(request, account, asked)
      return fields.respond(writer.completion(told))

  async def _chunks(
    self,
    writer: answers.Writer,
    account: keys.Account,
    asked: fields.Asked,
  ) -> AsyncGenerator[bytes]:
    """Yields the stream of a request, in the words of its API."""
    for value in writer.begin():
      yield writer.framed(value)
    try:
      async with contextlib.aclosing(
        self._answers.stream(account, asked)
      ) as told:
        async for each in told:
          if each is None:
            yield answers.HEARTBEAT
          else:
            for value in writer.write(*each):
              yield writer.framed(value)
    except fields.RequestError as error:
      account.status = error.status
      yield writer.framed(writer.refused(error))
      return
    for value in writer.end():
      yield writer.framed(value)
    if writer.last:
      yield writer.last

  async def _answered(
    self,
    request: requests.Request,
    account: keys.Account,
    asked: fields.Asked,
  ) -> list[list[events.Event]]:
    """Returns the events of each answer to a request that does not stream.

    Raises:
      fields.RequestError: as `Answers.collect`, or an outage failed an episode,
        or the client left.
    """
    told = await answers.unless_gone(
      request.receive, self._answers.collect(account, asked)
    )
    for reply in account.replies:
      if reply.outcome is types.Outcome.FAILED:  # Clients then try again.
        raise fields.RequestError(
          503, reply.reason, code="unavailable", retry_after=1
        )
    return told

  @contextlib.contextmanager
  def _account(self, route: str) -> Iterator[keys.Account]:
    """Opens the account of a request and closes it if the request fails.

    A response that streams closes its account itself, at its end.
    """
    account = keys.Account(route)
    try:
      yield account
    except fields.RequestError as error:
      self._close(account, error.status)
      raise
    except asyncio.CancelledError:
      self._close(account, 499)
      raise
    except Exception:
      self._close(account, 500)
      raise
    if account.asked is None or not account.asked.stream:
      self._close(account, 200)

  def _close(self, account: keys.Account, status: int) -> None:
    account.close()
    seconds = time.monotonic() - account.started
    self._metrics.responded(account.route, status, seconds)
    if _log.isEnabledFor(logging.INFO):
      _log.info(json.dumps(account.line(status, seconds, self._log_questions)))

  async def _admitted(
    self, request: requests.Request, account: keys.Account
  ) -> Any:
    """Checks the key and returns the JSON of the body."""
    if self.draining:
      raise answers.STOPPING
    key = self._key(request)
    account.key = key.name if key else ""
    return await fields.read(request)

  def _key(self, request: requests.Request) -> keys.Key | None:
    if self._guard is None:
      return None
    return self._guard.key(request.headers.get("authorization"))

  def _begin(self, account: keys.Account, asked: fields.Asked) -> fields.Asked:
    """Charges the key and counts the request until it ends."""
    if self._running + asked.choices > self._most:
      raise fields.RequestError(
        503,
        f"Found {self._running} questions under way, expected at most "
        f"{self._most}; ask later.",
        retry_after=5,
      )
    if self._guard is not None:
      key = next(k for k in self._guard.keys if k.name == account.key)
      grant = account.ends.enter_context(
        self._guard.admitted(
          key,
          searches=asked.budget * asked.choices,
          tokens=asked.max_tokens * asked.choices,
        )
      )
      account.ends.callback(
        lambda: grant.used(account.searches, account.most_tokens)
      )
    self._count(asked.choices)
    account.ends.callback(self._count, -asked.choices)
    account.asked = asked
    return asked

  def _count(self, more: int) -> None:
    self._running += more
    self._metrics.running.set(self._running)

  def _stream(
    self, account: keys.Account, chunks: AsyncGenerator[bytes]
  ) -> responses_lib.Response:
    return answers.EventStream(
      chunks,
      on_end=lambda complete: self._close(
        account, account.status if complete else 499
      ),
    )


def create_app(service: Service) -> applications.Starlette:
  """Returns the ASGI app of a service."""
  routes = [
    routing.Route("/v1/responses", service.responses, methods=["POST"]),
    routing.Route("/v1/chat/completions", service.chat, methods=["POST"]),
    routing.Route("/v1/models", _at_once(service.models)),
    routing.Route("/examples", _at_once(service.examples)),
    routing.Route("/health", _at_once(service.health)),
    routing.Route("/metrics", _at_once(service.metrics)),
    *_pages(),
  ]
  paths = ", ".join(route.path for route in routes)

  async def unknown(
    _: requests.Request, error: Exception
  ) -> responses_lib.Response:
    assert isinstance(error, exceptions.HTTPException)
    sentence = f"{error.detail}; expected one of {paths}."
    return _refusal(
      fields.RequestError(error.status_code, sentence), error.headers
    )

  app = applications.Starlette(
    routes=routes,
    exception_handlers={
      fields.RequestError: _refused,
      exceptions.HTTPException: unknown,
      Exception: _failed,
    },
  )
  app.state.service = service
  return app


def _at_once(
  answer: Callable[[requests.Request], responses_lib.Response],
) -> Callable[[requests.Request], Awaitable[responses_lib.Response]]:
  """Returns a handler that runs on the event loop, and not on a thread."""

  async def handle(request: requests.Request) -> responses_lib.Response:
    return answer(request)

  return handle


async def _refused(
  _: requests.Request, error: Exception
) -> responses_lib.Response:
  assert isinstance(error, fields.RequestError)
  return _refusal(error, error.headers)


async def _failed(
  _: requests.Request, error: Exception
) -> responses_lib.Response:
  _log.error("A request was not answered.", exc_info=error)
  return _refusal(answers.FAILED)


def _refusal(
  error: fields.RequestError, headers: Mapping[str, str] | None = None
) -> responses_lib.Response:
  return fields.respond(error.body(), error.status, headers)


def _pages() -> list[routing.Route]:
  """Returns the page's routes."""
  return [
    routing.Route(path, _file(name, kind))
    for path, (name, kind) in _FILES.items()
  ]


def _file(
  name: str, kind: str
) -> Callable[[requests.Request], Awaitable[responses_lib.Response]]:
  """Returns the handler that answers with a file."""
  file = importlib.resources.files(__package__).joinpath("page", name)
  content = file.read_bytes()

  async def page(_: requests.Request) -> responses_lib.Response:
    return responses_lib.Response(content, headers=_HEADERS, media_type=kind)

  return page
