"""Live web search: Serper, SerpAPI, Google, Brave, Tavily, SearXNG.

Passages are the titles and snippets that the service returns. No page is
fetched and no redirect is followed, so search results cannot decide where a
request goes. Google's API accepts no new customers and ends on January 1, 2027.
`SERVICES` is what each service expects and answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import html
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx2

from anysearch_jax import types
from anysearch_jax.host import http_calls, redaction
from retrieval import requests as requests_lib


@dataclasses.dataclass(frozen=True)
class Service:
  """The API of one service.

  Attributes:
    url: address of the API; "": the caller names it.
    variable: default environment variable of the key; "": there is no key.
    header: header that carries the key; a url would be logged.
    before: what precedes the key in the header.
    parameter: parameter of the url that carries the key, for a service that
      reads no header; it is added beneath the client, which logs urls.
    most: the most passages of one call.
    method: HTTP method.
    request: maps query, k and search engine to arguments of httpx2's `request`.
    results: path to the list of results in a reply.
    link, snippet: keys of a result.
    is_reply: whether an object without that list means "nothing found".
    failed: returns why a reply without results is a failure; "": it is none.
    advice: what to check if the service refuses the account.
    words, characters: the most words and characters of a query.
  """

  url: str
  variable: str
  header: str
  most: int
  method: str
  request: Callable[[str, int, str], Json]
  results: tuple[str, ...]
  link: str
  snippet: str
  is_reply: Callable[[Json], bool]
  before: str = ""
  parameter: str = ""
  failed: Callable[[Json], str] = lambda reply: ""
  advice: str = "Check the key in {variable}, its quota and its rate limit."
  words: int = 1024
  characters: int = 2048


SERVICES = {
  "serper": Service(
    url="https://google.serper.dev/search",
    variable="SERPER_API_KEY",
    header="X-API-KEY",
    most=10,  # More than 10 cost twice as much.
    method="POST",
    request=lambda query, k, _: {
      "content": http_calls.body({"q": query, "num": k}),
      "headers": {"Content-Type": "application/json"},
    },
    results=("organic",),
    link="link",
    snippet="snippet",
    is_reply=lambda reply: "searchParameters" in reply,
  ),
  "google": Service(
    url="https://www.googleapis.com/customsearch/v1",
    variable="GOOGLE_API_KEY",
    header="X-Goog-Api-Key",
    most=10,
    method="GET",
    request=lambda query, k, engine: {
      "params": {"q": query, "cx": engine, "num": k}
    },
    results=("items",),
    link="link",
    snippet="snippet",
    is_reply=lambda reply: reply.get("kind") == "customsearch#search",
  ),
  "brave": Service(
    url="https://api.search.brave.com/res/v1/web/search",
    variable="BRAVE_API_KEY",
    header="X-Subscription-Token",
    most=20,
    method="GET",
    request=lambda query, k, _: {
      "params": {
        "q": query,
        "count": k,
        "text_decorations": "false",
        "result_filter": "web",
      }
    },
    results=("web", "results"),
    link="url",
    snippet="description",
    is_reply=lambda reply: reply.get("type") == "search",
    words=50,
    characters=400,
  ),
  "tavily": Service(
    url="https://api.tavily.com/search",
    variable="TAVILY_API_KEY",
    header="Authorization",
    before="Bearer ",
    most=20,
    method="POST",
    request=lambda query, k, _: {
      # An advanced search costs twice as much.
      "content": http_calls.body(
        {"query": query, "max_results": k, "search_depth": "basic"}
      ),
      "headers": {"Content-Type": "application/json"},
    },
    results=("results",),
    link="url",
    snippet="content",
    is_reply=lambda reply: False,
    characters=400,
  ),
  "serpapi": Service(
    url="https://serpapi.com/search.json",
    variable="SERPAPI_API_KEY",
    header="",
    parameter="api_key",
    most=10,  # Of a page of Google's results; `num` has no effect any more.
    method="GET",
    request=lambda query, k, _: {"params": {"engine": "google", "q": query}},
    results=("organic_results",),
    link="link",
    snippet="snippet",
    is_reply=lambda reply: _status(reply) == "Success",
    failed=lambda reply: _serpapi_error(reply),
  ),
  "searxng": Service(
    url="",
    variable="",
    header="",
    most=20,  # Of a page of results.
    method="GET",
    request=lambda query, k, _: {"params": {"q": query, "format": "json"}},
    results=("results",),
    link="url",
    snippet="content",
    is_reply=lambda reply: False,
    failed=lambda reply: _unresponsive(reply),
    advice=(
      "Its settings.yml must list json under search.formats, and its limiter "
      "must admit this machine."
    ),
  ),
}


def _unresponsive(reply: Json) -> str:
  """Returns which engines SearXNG had no answer from; "" if all answered."""
  engines = reply.get("unresponsive_engines")
  if not isinstance(engines, list) or not engines:
    return ""
  return f"found no result, and engines that did not answer: {engines!r}."


def _status(reply: Json) -> str:
  """Returns SerpAPI's status of a search: Success, Processing or Error."""
  metadata = reply.get("search_metadata")
  status = metadata.get("status") if isinstance(metadata, dict) else None
  return status if isinstance(status, str) else ""


def _serpapi_error(reply: Json) -> str:
  """Returns SerpAPI's error; a search that found nothing has one too."""
  error = reply.get("error")
  if _status(reply) == "Success" or not isinstance(error, str):
    return ""
  return error


Json = dict[str, Any]
Answer = tuple[types.Passage, ...]

# Tags by which services highlight the query; other angle brackets are text.
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_MARK = re.compile(r"</?(?:strong|b|em|i|mark|span|wbr)(?:\s[^<>]*)?/?>", re.I)
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")
_LINK = re.compile(r"https?://\S+")
_LARGEST = 1 << 24


class AccountError(types.RetrievalError):
  """The service refuses the key: it is invalid, over quota or over its rate."""


class WebRetriever(requests_lib.OneByBatch):
  """Searches the web; safe to use from any event loop and thread.

  Long queries are cut to the limits of the service (Brave: 50 words, 400
  characters), and at most 10 passages are returned (Brave: 20). A blank query
  returns nothing and costs nothing.

  Args:
    kind: "serper", "serpapi", "google", "brave", "tavily" or "searxng".
    price: cost of one call; `counters["cost"]` is the sum.
    key_variable: the environment variable with the key; "" is the default:
      SERPER_API_KEY, SERPAPI_API_KEY, GOOGLE_API_KEY, BRAVE_API_KEY or
      TAVILY_API_KEY. SearXNG has none.
    address: address of a SearXNG server.
    engine: Google's search engine id (`cx`).
    corpus: name of the web as a corpus; a request must name it or none.
    patience: deadlines and retries.
    transport, clock: for tests.

  Raises:
    ValueError: the kind is unknown, the key, the engine or the address is
      missing, or the price is negative.

  `counters` has the counters of `http_calls.Caller`, the `queries`, and the
  `cost` of all calls that were answered, even if the answer was malformed.
  """

  def __init__(
    self,
    kind: str,
    *,
    price: float,
    key_variable: str = "",
    engine: str = "",
    address: str = "",
    corpus: str = "",
    patience: http_calls.Patience = http_calls.DEFAULT,
    transport: httpx2.AsyncBaseTransport | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    if kind not in SERVICES:
      raise ValueError(
        f"kind: found {kind!r}, expected one of {', '.join(SERVICES)}."
      )
    if bool(engine) != (kind == "google"):
      raise ValueError(
        f"engine: found {engine!r}; expected the id of a search engine (cx) "
        "for google and none for others."
      )
    if bool(address) != (kind == "searxng"):
      raise ValueError(
        f"address: found {redaction.shown(address)!r}; expected the address of "
        "a server for searxng and none for others."
      )
    if address and not redaction.is_address(address):
      raise ValueError(
        f"address: found {redaction.shown(address)}, expected one such as "
        "http://127.0.0.1:8888."
      )
    if key_variable and kind == "searxng":
      raise ValueError(
        f"key_variable: found {key_variable!r}, expected none for searxng."
      )
    if not 0 <= price < float("inf"):
      raise ValueError(f"price: found {price}, expected 0 or more for a call.")
    self._kind, self._service = kind, SERVICES[kind]
    self._price, self._engine, self._corpus = price, engine, corpus
    self._url = self._service.url or f"{address.rstrip('/')}/search"
    self._variable = key_variable or self._service.variable
    headers, key = {"Accept": "application/json"}, ""
    if self._variable:
      key = http_calls.secret_in(self._variable, f"the key for {kind}")
      if self._service.parameter:
        transport = _KeyInUrl(self._service, key, transport)
      else:
        headers[self._service.header] = self._service.before + key
    self._caller = http_calls.Caller(
      patience,
      headers=headers,
      secret=key,
      advice="Can this machine reach it?",
      largest=_LARGEST,
      again=(*http_calls.BUSY, 500),
      proxies=True,
      transport=transport,
      clock=clock,
    )
    self.counters: Counter[str] = self._caller.counters
    self._suspects: set[str] = set()

  async def search_many(
    self, requests: Sequence[types.SearchRequest]
  ) -> list[Answer | Exception]:
    """Returns answers in request order, by one call each.

    Returns:
      For each request its passages, best first, whose ids are URLs; or a
      `RetrievalError`, an `AccountError` if the service refuses the key.

    Raises:
      ValueError: a request is invalid, see `requests.check`.
    """
    requests_lib.check(requests, self._corpus)
    return await self._search(list(requests))

  def identity(self) -> Json:
    """Returns JSON values that identify the answers."""
    named = {"kind": "web", "service": self._kind}
    if not self._service.url:
      named["address"] = self._url
    return named | ({"engine": self._engine} if self._engine else {})

  def close(self) -> None:
    """Closes all connections; running searches fail."""
    self._caller.close()

  async def _search(
    self, requests: list[types.SearchRequest]
  ) -> list[Answer | Exception]:
    until = self._caller.until()
    self.counters["queries"] += len(requests)

    async def one(request: types.SearchRequest) -> Answer | Exception:
      try:
        return await self._ask(request.query, request.k, until)
      except types.RetrievalError as error:
        return error

    return await asyncio.gather(*map(one, requests))

  async def _ask(self, query: str, k: int, until: float) -> Answer:
    service = self._service
    query = " ".join(_clean_text(query).split()[: service.words])
    query = query[: service.characters]
    if not query:
      return ()
    k = min(k, service.most)

    def read(data: bytes) -> Answer:
      # The declared counts of a Counter are whole; these are dollars.
      self.counters["cost"] += self._price  # type: ignore[assignment]
      redact = self._caller.redact
      reply = http_calls.parse(data, self._url, redact)
      found = _results(reply, service, self._url, redact)
      return _passages(found, service, self._url, redact)[:k]

    try:
      answer = await self._caller.ask(
        service.method,
        self._url,
        read=read,
        until=until,
        # For the circuit breaker, failures of one query count only once.
        counted=query not in self._suspects,
        **service.request(query, k, self._engine),
      )
      self._suspects.clear()
      return answer
    except types.RetrievalError as error:
      self._suspects.add(query)
      if not isinstance(error, http_calls.StatusError) or not _is_of_account(
        error
      ):
        raise
      advice = self._service.advice.format(variable=self._variable)
      raise AccountError(f"{error} {advice}") from None


class _KeyInUrl(httpx2.AsyncBaseTransport):
  """Adds the key to the url of each request, beneath the client's log."""

  def __init__(
    self,
    service: Service,
    key: str,
    transport: httpx2.AsyncBaseTransport | None,
  ):
    self._added = {service.parameter: key}
    if transport is None:
      # A client with its own transport ignores the environment's proxies.
      url = httpx2.URL(service.url)
      proxy = None
      if not urllib.request.proxy_bypass(url.host):
        proxy = urllib.request.getproxies().get(url.scheme)
      transport = httpx2.AsyncHTTPTransport(proxy=proxy)
    self._transport = transport

  async def handle_async_request(
    self, request: httpx2.Request
  ) -> httpx2.Response:
    keyed = httpx2.Request(
      request.method,
      request.url.copy_merge_params(self._added),
      headers=request.headers,
      stream=request.stream,
      extensions=request.extensions,
    )
    return await self._transport.handle_async_request(keyed)

  async def aclose(self) -> None:
    await self._transport.aclose()


def _is_of_account(error: http_calls.StatusError) -> bool:
  """Returns whether the key is at fault, by status or (Brave, Serper) text.

  432 and 433 are Tavily's limits of a plan.
  """
  return error.status in (401, 402, 403, 429, 432, 433) or (
    error.status in (400, 422)
    and re.search(r"\b(token|api key|credits?)\b", str(error), re.I) is not None
  )


def _results(
  reply: Any,
  service: Service,
  url: str,
  redact: redaction.Redactor,
) -> list[Any]:
  """Returns the list of results in a reply.

  Raises:
    AnswerError: the reply has another form. Treating it as an empty result
      would silently find nothing from then on.
  """
  found = reply
  for key in service.results:
    found = found.get(key) if isinstance(found, dict) else None
  if found is None and isinstance(reply, dict) and service.is_reply(reply):
    return []
  why = service.failed(reply) if isinstance(reply, dict) and not found else ""
  if why:
    raise http_calls.AnswerError(f"{url}: {redact.quote(why, 200)}")
  if not isinstance(found, list):
    raise http_calls.AnswerError(
      f"{url}: found {redact.quote(repr(reply), 80)}, expected a list at "
      f"{'.'.join(service.results)}."
    )
  return found


def _passages(
  found: list[Any],
  service: Service,
  url: str,
  redact: redaction.Redactor,
) -> Answer:
  """Returns the results that have a link, a title and a snippet, in order.

  Raises:
    AnswerError: there are results, but none has all three.
  """
  kept = []
  for result in found:
    if not isinstance(result, Mapping):
      continue
    link = result.get(service.link)
    title, text = (
      _clean(result.get("title")),
      _clean(result.get(service.snippet)),
    )
    if isinstance(link, str) and _LINK.fullmatch(link) and title and text:
      kept.append(types.Passage(_clean_text(link), f'"{title}"', text))
  if found and not kept:
    raise http_calls.AnswerError(
      f"{url}: none of {len(found)} results has the texts {service.link!r}, "
      f"'title' and {service.snippet!r}; the first is "
      f"{redact.quote(repr(found[0]), 80)}."
    )
  return tuple(kept)


def _clean(value: Any) -> str:
  """Returns a text in one line, without highlighting tags and HTML entities."""
  if not isinstance(value, str):
    return ""
  text = html.unescape(_MARK.sub("", _BREAK.sub(" ", value)))
  return " ".join(_clean_text(text).split())


def _clean_text(text: str) -> str:
  """Removes control characters and lone surrogates."""
  return _CONTROL.sub("", text).encode(errors="ignore").decode()
