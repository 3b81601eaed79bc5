"""Live web search, over exchanges as the services document them, invented."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import pathlib

import fake_retriever as fake
import httpx2
import pytest
import web_site

from anysearch_jax import types
from anysearch_jax.host import http_calls
from anysearch_jax.retrieval import requests, web_search

_DATA = pathlib.Path(__file__).parents[1] / "golden" / "web"
_KEYS = {
  "serper": ("SERPER_API_KEY", "x-api-key"),
  "brave": ("BRAVE_API_KEY", "x-subscription-token"),
  "tavily": ("TAVILY_API_KEY", "authorization"),
  "serpapi": ("SERPAPI_API_KEY", "api_key"),  # A parameter of its url.
}
SEARXNG = "http://searx.test:8888/"  # Has no key.
EXCHANGES = [
  pytest.param(kind, exchange, id=f"{kind}: {exchange['name']}")
  for kind in (*_KEYS, "searxng")
  for exchange in json.loads((_DATA / f"{kind}.json").read_text())
]
QUICK = http_calls.Patience(deadline=10.0, retries=1, pause=0.001, wait=0.5)
KEY = "k3y-of-nobody"


ask = fake.ask


@pytest.fixture
def connect(monkeypatch):
  """Makes retrievers of a handler; each records `.sent`."""
  made = []

  def start(kind, handler, *, patience=QUICK, **settings):
    if kind == "searxng":
      settings["address"] = SEARXNG
    else:
      monkeypatch.setenv(_KEYS[kind][0], KEY)
    sent = []

    def answer(request):
      sent.append(request)
      return handler(request)

    settings["transport"] = httpx2.MockTransport(answer)
    how = {"price": 0.005, "patience": patience} | settings
    made.append(web_search.WebRetriever(kind, **how))
    made[-1].sent = sent
    return made[-1]

  yield start
  for each in made:
    each.close()


def response(reply):
  return httpx2.Response(
    reply["status"],
    headers=reply["headers"],
    content=json.dumps(reply["body"]).encode(),
  )


def said(request):
  """Returns a request in the format of the exchanges."""
  return {
    "method": request.method,
    "url": str(request.url.copy_with(query=None)),
    "params": {k: v for k, v in request.url.params.items() if v != KEY},
    "body": json.loads(request.content) if request.content else None,
  }


@pytest.mark.parametrize(("kind", "exchange"), EXCHANGES)
def test_an_exchange_is_asked_and_understood(connect, kind, exchange):
  retriever = connect(kind, lambda request: response(exchange["reply"]))
  request = ask(exchange["query"], exchange["k"])
  if "passages" in exchange:
    found = asyncio.run(retriever.search(request))
    assert found == tuple(
      types.Passage(*texts) for texts in exchange["passages"]
    )
    assert retriever.counters["cost"] == 0.005
  else:
    message = exchange.get("error") or exchange["account_error"]
    with pytest.raises(types.RetrievalError, match=message) as caught:
      asyncio.run(retriever.search(request))
    advice, *_ = web_search.SERVICES[kind].advice.split("{")
    is_refused = advice in str(caught.value)
    assert is_refused == ("account_error" in exchange)
    assert not is_refused or retriever.counters["cost"] == 0
  assert said(retriever.sent[0]) == exchange["request"]
  for sent in retriever.sent:
    if kind in ("serpapi", "searxng"):
      continue  # The last test is of the key in a url.
    before = "Bearer " if kind == "tavily" else ""
    assert sent.headers[_KEYS[kind][1]] == before + KEY
    assert KEY not in str(sent.url)


@pytest.mark.parametrize("kind", _KEYS)
def test_many_searches_are_a_call_each_and_fail_alone(connect, kind):
  exchange = json.loads((_DATA / f"{kind}.json").read_text())[0]

  def handler(request):
    if b"broken" in request.content + request.url.query:
      return httpx2.Response(500, text="Oops.")
    return response(exchange["reply"])

  retriever = connect(kind, handler)
  found = asyncio.run(
    requests.answers(retriever, [ask("a"), ask("broken"), ask("b", 1)])
  )
  lengths = [len(found[i]) for i in (0, 2)]
  assert lengths == [len(exchange["passages"]), 1]
  assert isinstance(found[1], types.RetrievalError)
  assert "HTTP 500: Oops." in str(found[1])
  counted = {"queries": 3, "requests": 4, "retries": 1, "failures": 1}
  assert counted.items() <= retriever.counters.items()
  assert retriever.counters["cost"] == pytest.approx(0.01)


FAILED = {"search_metadata": {"status": "Error"}, "error": "No luck."}
PROCESSING = {"search_metadata": {"status": "Processing"}}
SHAPES = [
  ([], r"found \[\], expected a list at (organic|(web.)?results)"),
  ({"result": []}, "expected a list at"),
  (
    {"organic": {}, "items": 3, "web": {"results": "x"}, "results": {}},
    "expected a list",
  ),
  (
    {
      **{"organic": [{"t": 1}], "items": [None], "web": {"results": [{}]}},
      **{"results": [[]], "organic_results": [{"title": "t"}]},
    },
    "expected the texts .* in at least one of 1 results",
  ),
]


@pytest.mark.parametrize(
  ("kind", "reply", "sentence"),
  [
    *((kind, *row) for kind in _KEYS for row in SHAPES),
    # A search that failed is no empty answer.
    ("serpapi", FAILED, "No luck."),
    ("serpapi", PROCESSING, "expected a list at organic_results"),
    ("serpapi", {"search_metadata": "Success"}, "expected a list at"),
  ],
  ids=str,
)
def test_reply_of_another_shape_is_an_error(connect, kind, reply, sentence):
  retriever = connect(kind, fake.status(200, json.dumps(reply)))
  with pytest.raises(types.RetrievalError, match=sentence):
    asyncio.run(retriever.search(ask("a")))
  # It was answered, so it is paid for.
  assert retriever.counters["cost"] == 0.005


def test_a_redirect_is_not_followed(connect):
  """An answer must not send requests, or the key, elsewhere."""
  inside = "http://169.254.169.254/latest/meta-data"
  retriever = connect(
    "brave", lambda request: httpx2.Response(302, headers={"location": inside})
  )
  with pytest.raises(types.RetrievalError, match="HTTP 302"):
    asyncio.run(retriever.search(ask("a")))
  hosts = [request.url.host for request in retriever.sent]
  assert hosts == ["api.search.brave.com"]


@pytest.mark.parametrize(
  ("kind", "settings", "sentence"),
  [
    ("bing", {"price": 0}, "found 'bing', expected one of serper, brave"),
    ("serper", {"price": 0}, "SERPER_API_KEY is not set"),
    ("searxng", {"price": 0}, "address of a server for searxng"),
  ],
)
def test_invalid_settings_are_refused(kind, settings, sentence, monkeypatch):
  monkeypatch.delenv("SERPER_API_KEY", raising=False)
  with pytest.raises(ValueError, match=sentence):
    web_search.WebRetriever(kind, **settings)


def test_a_key_in_a_url_reaches_a_server_and_no_log(monkeypatch, caplog):
  """Over a real connection: the logs of the client and of its pool are read."""
  caplog.set_level(logging.DEBUG)
  exchange = json.loads((_DATA / "serpapi.json").read_text())[0]
  told = json.dumps(exchange["reply"]["body"]).encode()
  with web_site.Site("127.0.0.1") as site:
    site.pages["/search.json"] = web_site.reply(200, told)
    url = f"{site.origin}/search.json"
    here = dataclasses.replace(web_search.SERVICES["serpapi"], url=url)
    monkeypatch.setitem(web_search.SERVICES, "serpapi", here)
    monkeypatch.setenv("SERPAPI_API_KEY", KEY)
    retriever = web_search.WebRetriever("serpapi", price=0.01, patience=QUICK)
    found = asyncio.run(retriever.search(types.SearchRequest("tall & wide", 1)))
    retriever.close()
  assert len(found) == 1
  query = httpx2.URL(f"http://h{site.asked[0]}").params
  assert dict(query) == {"engine": "google", "q": "tall & wide", "api_key": KEY}
  assert KEY not in caplog.text
