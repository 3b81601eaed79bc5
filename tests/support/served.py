"""A search service in this process, requests to it, and apps on a thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import held_search
import httpx2
import uvicorn
import waits

from anysearch_jax.retrieval.service import dialects, service


@contextlib.contextmanager
def listening(app, **settings):
  """Serves an app on a thread by uvicorn; yields host and port."""
  config = uvicorn.Config(app, ws="none", log_config=None, **settings)
  server = uvicorn.Server(config)
  with socket.create_server(("127.0.0.1", 0)) as opened:
    thread = threading.Thread(target=server.run, args=([opened],), daemon=True)
    thread.start()
    try:
      waits.wait_for(lambda: server.started)
      yield opened.getsockname()
    finally:
      server.should_exit = True
      thread.join(60)


@contextlib.asynccontextmanager
async def client_of(app, **settings):
  """Yields a client of an app in this process."""
  transport = httpx2.ASGITransport(app)
  async with httpx2.AsyncClient(
    transport=transport, base_url="http://service", **settings
  ) as client:
    yield client


@contextlib.asynccontextmanager
async def opened(*, token="", search=None, **values):
  """Yields a client of a service with these limits, and its search."""
  search = search or held_search.HeldSearch()
  app = service.create_app(
    search, limits=dialects.Limits(**values), token=token
  )
  try:
    async with client_of(app) as client:
      client.app = app
      yield client, search
  finally:
    search.free.set()
    app.state.service.close()


def ask(body=None, *, route="/retrieve", **settings):
  """Returns the response to one request."""
  request = {"content": body} if isinstance(body, bytes) else {"json": body}

  async def post():
    async with opened(**settings) as (client, _):
      return await client.post(route, **request)

  return asyncio.run(asyncio.wait_for(post(), 60))


def refused(response, status, sentence):
  assert response.status_code == status, response.text
  assert response.headers["content-type"] == "application/json"
  assert sentence in response.json()["detail"]
