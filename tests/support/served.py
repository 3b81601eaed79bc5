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

from retrieval.service import dialects, service


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


def play(scenario, *, token="", headers=None, search=None, **values):
  """Runs `scenario(client, search)` against a service with these limits."""
  search = search or held_search.HeldSearch()

  async def main():
    app = service.create_app(
      search, limits=dialects.Limits(**values), token=token
    )
    try:
      async with client_of(app, headers=headers) as client:
        client.app = app
        return await asyncio.wait_for(scenario(client, search), 60)
    finally:
      search.free.set()
      app.state.service.close()

  return asyncio.run(main())


def ask(body=None, *, route="/retrieve", **settings):
  """Returns the response to one request."""
  request = {"content": body} if isinstance(body, bytes) else {"json": body}

  async def scenario(client, search):
    return await client.post(route, **request)

  return play(scenario, **settings)


def refused(response, status, sentence):
  assert response.status_code == status, response.text
  assert response.headers["content-type"] == "application/json"
  assert sentence in response.json()["detail"]
