"""SerpAPI, which takes its key in the URL; `test_web_search` has the rest."""

from __future__ import annotations

import asyncio
import dataclasses
import http.server
import json
import logging
import pathlib
import threading

import httpx2
import pytest

from anysearch_jax import types
from anysearch_jax.host import http_calls
from retrieval import web_search

_DATA = pathlib.Path(__file__).parents[1] / "golden" / "web" / "serpapi.json"
QUICK = http_calls.Patience(
  deadline=10.0, retries=1, pause=0.001, failures=1000
)
KEY = "k3y-of-nobody"


@pytest.mark.parametrize(
  ("reply", "sentence"),
  [
    ({"search_metadata": {"status": "Error"}, "error": "No luck."}, "No luck."),
    ({"search_metadata": {"status": "Processing"}}, "expected a list at"),
    ({"search_metadata": "Success"}, "expected a list at organic_results"),
  ],
)
def test_a_search_that_failed_is_no_empty_answer(monkeypatch, reply, sentence):
  monkeypatch.setenv("SERPAPI_API_KEY", KEY)
  content = json.dumps(reply).encode()
  answer = httpx2.MockTransport(
    lambda request: httpx2.Response(200, content=content)
  )
  retriever = web_search.WebRetriever(
    "serpapi", price=0, patience=QUICK, transport=answer
  )
  with pytest.raises(types.RetrievalError, match=sentence):
    asyncio.run(retriever.search(types.SearchRequest("a", 1)))
  retriever.close()


def test_the_key_reaches_a_server_and_no_log(monkeypatch, caplog):
  """Over a real connection: the logs of the client and of its pool are read."""
  caplog.set_level(logging.DEBUG)
  exchange = json.loads(_DATA.read_text())[0]
  asked = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      asked.append(self.path)
      self.send_response(200)
      self.end_headers()
      self.wfile.write(json.dumps(exchange["reply"]["body"]).encode())

    def log_message(self, *_):
      pass

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  url = f"http://127.0.0.1:{server.server_port}/search.json"
  here = dataclasses.replace(web_search.SERVICES["serpapi"], url=url)
  monkeypatch.setitem(web_search.SERVICES, "serpapi", here)
  monkeypatch.setenv("SERPAPI_API_KEY", KEY)
  retriever = web_search.WebRetriever("serpapi", price=0.01, patience=QUICK)
  found = asyncio.run(retriever.search(types.SearchRequest("tall & wide", 1)))
  retriever.close()
  server.shutdown()
  server.server_close()
  assert len(found) == 1
  query = httpx2.URL(f"http://h{asked[0]}").params
  assert dict(query) == {"engine": "google", "q": "tall & wide", "api_key": KEY}
  assert "HTTP Request: GET" in caplog.text and KEY not in caplog.text
