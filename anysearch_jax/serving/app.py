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
from typing import Any

import fastapi
from starlette import exceptions

from anysearch_jax.serving import bodies, errors, static_page
from anysearch_jax.serving import service as service_lib

_log = logging.getLogger(__name__)


def create_app(service: service_lib.Service) -> fastapi.FastAPI:
  """Returns the ASGI app of a service."""
  app = fastapi.FastAPI(title="AnySearch", docs_url=None, redoc_url=None)
  app.state.service = service

  @app.exception_handler(errors.RequestError)
  async def refused(_: Any, error: errors.RequestError) -> fastapi.Response:
    return bodies.respond(error.body(), error.status, error.headers)

  @app.exception_handler(exceptions.HTTPException)
  async def unknown(
    _: Any, error: exceptions.HTTPException
  ) -> fastapi.Response:
    sentence = f"{error.detail}; the paths are in GET /openapi.json."
    told = errors.RequestError(error.status_code, sentence)
    return bodies.respond(told.body(), told.status)

  @app.exception_handler(Exception)
  async def failed(_: Any, error: Exception) -> fastapi.Response:
    _log.error("A request was not answered.", exc_info=error)
    return bodies.respond(service_lib.FAILED.body(), service_lib.FAILED.status)

  static_page.add(app)

  @app.post("/v1/responses")
  async def responses(request: fastapi.Request) -> fastapi.Response:
    return await service.responses(request)

  @app.post("/v1/chat/completions")
  async def chat(request: fastapi.Request) -> fastapi.Response:
    return await service.chat(request)

  @app.get("/v1/models")
  async def models(request: fastapi.Request) -> fastapi.Response:
    return service.models(request)

  @app.get("/examples")
  async def examples() -> fastapi.Response:
    return service.examples()

  @app.get("/health")
  async def health() -> fastapi.Response:
    return service.health()

  @app.get("/metrics")
  async def metrics(request: fastapi.Request) -> fastapi.Response:
    return service.metrics(request)

  return app
