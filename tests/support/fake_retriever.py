"""Retrieval servers in this process, and clients of them."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx2
import pytest

from anysearch_jax import types
from anysearch_jax.host import http_calls, loop
from anysearch_jax.retrieval import http_retriever
from anysearch_jax.retrieval import requests as requests_lib

URL = "http://retriever.test:8000"
QUICK = http_calls.Patience(deadline=10.0, retries=2, pause=0.001)


def ask(query, k=3, corpus=""):
  return types.SearchRequest(query, k, corpus)


def hit(query, rank):
  """Returns a hit in the format of Search-R1's server."""
  contents = f'"{query}"\nText {rank}\nof {query}.'
  document = {"id": f"{query}/{rank}", "contents": contents}
  return {"document": document, "score": 1 / (rank + 1)}


def truth(request):
  """Returns the passages that the client must read from `search_r1`'s hits."""
  return tuple(
    types.Passage(
      f"{request.query}/{rank}",
      f'"{request.query}"',
      f"Text {rank}\nof {request.query}.",
      1 / (rank + 1),
    )
    for rank in range(request.k)
  )


def search_r1(request):
  """Acts as Search-R1's server, which fails if scores are not requested."""
  body = json.loads(request.content)
  if not body["return_scores"]:
    return httpx2.Response(500, text="Internal Server Error")
  k = body["topk"] or 3
  result = [[hit(query, i) for i in range(k)] for query in body["queries"]]
  return httpx2.Response(200, json={"result": result})


def search(retriever, *requests):
  if hasattr(retriever, "search_many"):
    return asyncio.run(retriever.search_many(requests))
  return asyncio.run(requests_lib.answers(retriever, requests))


def failure(retriever, request=None):
  """Returns the error message of a search that fails."""
  with pytest.raises(types.RetrievalError) as caught:
    asyncio.run(retriever.search(request or ask("q")))
  return str(caught.value)


def bodies(retriever):
  return [json.loads(request.content) for request in retriever.sent]


def fails_first(times, how):
  """Returns a handler that fails by `how` for `times` calls, then answers."""
  left = [times]

  def handler(request):
    left[0] -= 1
    if left[0] >= 0:
      return how(request)
    return search_r1(request)

  return handler


def broken(request):
  raise httpx2.ConnectError("refused", request=request)


def status(number, body="", **headers):
  return lambda request: httpx2.Response(
    number,
    text=body,
    headers={k.replace("_", "-"): v for k, v in headers.items()},
  )


class Clock:
  """A clock that the test sets."""

  def __init__(self):
    self.now = 100.0

  def __call__(self):
    return self.now


async def die_at_once(writer):
  """Closes the connection without an answer; for `listening`."""


@contextlib.contextmanager
def clients():
  """Makes clients of a handler, closed at the end; each records `.sent`."""
  made = []

  def start(handler, *, patience=QUICK, **settings):
    sent = []

    def answer(request):
      sent.append(request)
      return handler(request)

    async def answer_later(request):
      sent.append(request)
      return await handler(request)

    is_async = asyncio.iscoroutinefunction(handler)
    made.append(
      http_retriever.HttpRetriever(
        URL,
        patience=patience,
        transport=httpx2.MockTransport(answer_later if is_async else answer),
        **settings,
      )
    )
    made[-1].sent = sent
    return made[-1]

  try:
    yield start
  finally:
    for each in made:
      each.close()


@contextlib.contextmanager
def listening(talk):
  """Yields the address of a server that runs `talk(writer)` per request."""
  serving = set()

  async def serve(reader, writer):
    serving.add(asyncio.current_task())
    head = await reader.readuntil(b"\r\n\r\n")
    size = [
      int(line.split(b":")[1])
      for line in head.lower().split(b"\r\n")
      if line.startswith(b"content-length:")
    ]
    await reader.readexactly(sum(size))
    try:
      await talk(writer)
    finally:
      writer.close()

  async def stop():
    server.close()
    for task in serving:
      task.cancel()

  server = loop.run(asyncio.start_server(serve, "127.0.0.1", 0))
  try:
    yield "http://{}:{}".format(*server.sockets[0].getsockname())
  finally:
    loop.run(stop())
