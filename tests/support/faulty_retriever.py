"""A retrieval server over HTTP with faults, and the production client."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable

import waits
import web_site

from anysearch_jax import config as config_lib
from anysearch_jax.host import http_calls
from anysearch_jax.launch import retrievers
from anysearch_jax.retrieval import http_retriever
from anysearch_jax.rollout import searching

# The error that a run reports for each fault; "hangs" ends by a deadline.
FAULTS = {
  "broken": "/retrieve: HTTP 500: The index is broken.",
  "dies": "the last met RemoteProtocolError",
  "html": "found '<html>",
  "hangs": "no answer within",
}


class Server:
  """Answers like Search-R1's server; a context manager.

  Args:
    lexical: the retriever that finds the passages.
    corpus: the corpus that is searched.

  Attributes:
    url: address of the server.
    fault: the fault of calls with a query for which `hits` is true: one of
      `FAULTS`.
  """

  def __init__(self, lexical, corpus: str):
    self._lexical, self._corpus = lexical, corpus
    self.fault = ""
    self.hits: Callable[[str], bool] = lambda query: True
    self._freed = threading.Event()
    self._port = waits.free_port()
    self.url = f"http://127.0.0.1:{self._port}"

  def __enter__(self) -> Server:
    self.start()
    return self

  def __exit__(self, *error: object) -> None:
    self._freed.set()
    self.stop()

  def start(self) -> None:
    self._site = web_site.Site("127.0.0.1", self._port)
    self._site.post = self._post

  def stop(self) -> None:
    """Stops listening at `url`."""
    self._site.__exit__()

  def _post(self, handler) -> None:
    if answered := self.answer(json.loads(handler.body)):
      status, text = answered
      web_site.reply(status, text.encode())(handler)

  def answer(self, body: dict) -> tuple[int, str] | None:
    """Returns a status and a text; None closes the connection."""
    queries = body["queries"]
    result = [self._found(query, body["topk"]) for query in queries]
    fault = self.fault if any(map(self.hits, queries)) else ""
    match fault:
      case "broken":
        return 500, json.dumps({"detail": "The index is broken."})
      case "dies":
        return None
      case "html":
        return 200, "<html>Bad gateway</html>"
      case "hangs":
        self._freed.wait(60)
        return None
    return 200, json.dumps({"result": result})

  def _found(self, query: str, k: int) -> list[dict]:
    return [
      {
        "document": {"id": p.id, "contents": f"{p.title}\n{p.text}"},
        "score": p.score,
      }
      for p in self._lexical.lookup(query, k, self._corpus)
    ]


class _OfOneCorpus(http_retriever.HttpRetriever):
  """Asks about every corpus of the world what its one server knows."""

  async def search_many(self, requests):
    return await super().search_many(
      [dataclasses.replace(request, corpus="") for request in requests]
    )


@contextlib.contextmanager
def connect(url: str, *, batch: int, **patience):
  """Returns the retriever of a run that names an address.

  Args:
    url: address of the server.
    batch: queries per call; with 1 a fault affects only its own query.
    **patience: fields of `http_calls.Patience`.
  """
  asking = _OfOneCorpus(
    url,
    batch=batch,
    patience=http_calls.Patience(**{"retries": 1, "pause": 0.001} | patience),
  )
  try:
    yield searching.BatchingRetriever(
      retrievers.IdentifiedRetriever(asking, url),
      config_lib.SearchConfig(batch=batch, concurrency=64),
    )
  finally:
    asking.close()
