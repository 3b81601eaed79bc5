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

import logging
from collections.abc import Awaitable, Callable, Mapping

from starlette import applications, exceptions, requests, responses, routing

from anysearch_jax.serving import answers, bodies, errors, static_page
from anysearch_jax.serving import service as service_lib

_log = logging.getLogger(__name__)
_Response = responses.Response


def create_app(service: service_lib.Service) -> applications.Starlette:
  """Returns the ASGI app of a service."""
  routes = [
    routing.Route("/v1/responses", service.responses, methods=["POST"]),
    routing.Route("/v1/chat/completions", service.chat, methods=["POST"]),
    routing.Route("/v1/models", _at_once(service.models)),
    routing.Route("/examples", _at_once(service.examples)),
    routing.Route("/health", _at_once(service.health)),
    routing.Route("/metrics", _at_once(service.metrics)),
    *static_page.routes(),
  ]
  paths = ", ".join(route.path for route in routes)

  async def unknown(_: requests.Request, error: Exception) -> _Response:
    assert isinstance(error, exceptions.HTTPException)
    sentence = f"{error.detail}; expected one of {paths}."
    return _refusal(
      errors.RequestError(error.status_code, sentence), error.headers
    )

  app = applications.Starlette(
    routes=routes,
    exception_handlers={
      errors.RequestError: _refused,
      exceptions.HTTPException: unknown,
      Exception: _failed,
    },
  )
  app.state.service = service
  return app


def _at_once(
  answer: Callable[[requests.Request], _Response],
) -> Callable[[requests.Request], Awaitable[_Response]]:
  """Returns a handler that runs on the event loop, and not on a thread."""

  async def handle(request: requests.Request) -> _Response:
    return answer(request)

  return handle


async def _refused(_: requests.Request, error: Exception) -> _Response:
  assert isinstance(error, errors.RequestError)
  return _refusal(error, error.headers)


async def _failed(_: requests.Request, error: Exception) -> _Response:
  _log.error("A request was not answered.", exc_info=error)
  return _refusal(answers.FAILED)


def _refusal(
  error: errors.RequestError, headers: Mapping[str, str] | None = None
) -> _Response:
  return bodies.respond(error.body(), error.status, headers)
