"""Live web search: Serper, SerpAPI, Brave, Tavily, SearXNG.

Passages are the titles and snippets that the service returns. No page is
fetched and no redirect is followed, so search results cannot decide where a
request goes. `SERVICES` is what each service expects and answers.
"""

from __future__ import annotations

import dataclasses
import html
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from anysearch_jax import types
from anysearch_jax.config import settings as config_settings
from anysearch_jax.host import http_calls, redaction
from anysearch_jax.retrieval import requests as requests_lib

# httpx2 logs addresses, and SerpAPI's have the key.
logging.getLogger("httpx2").setLevel(logging.WARNING)

Json = dict[str, Any]
Answer = tuple[types.Passage, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
  """The API of one service.

  Attributes:
    request: maps query and k to arguments of httpx2's `request`.
    results: keys to the list of results in a reply, separated by dots.
    most_passages: the most passages of one call.
    url: address of the API; "": the caller names it.
    method: HTTP method.
    variable: default environment variable of the key; "": there is no key.
    header: header that carries the key; a url would be logged.
    key_prefix: text before the key in the header.
    parameter: parameter of the url that carries the key, for a service that
      reads no header.
    link: key of a result's address.
    snippet: key of a result's text.
    explain_empty: returns why a reply without results is a failure; "" if the
      service found nothing, None if it sent no list of results.
    advice: what to check if the service refuses the account.
    words: the most words of a query.
    characters: the most characters of a query.
  """

  request: Callable[[str, int], Json]
  results: str
  most_passages: int
  url: str = ""
  method: str = "GET"
  variable: str = ""
  header: str = ""
  key_prefix: str = ""
  parameter: str = ""
  link: str = "link"
  snippet: str = "snippet"
  explain_empty: Callable[[Json], str | None] = lambda reply: None
  advice: str = "Check the key in {variable}, its quota and its rate limit."
  words: int = 1024
  characters: int = 2048


def _get(**parameters: Any) -> Json:
  return {"params": parameters}


def _post(**values: Any) -> Json:
  return {
    "content": http_calls.body(values),
    "headers": {"Content-Type": "application/json"},
  }


def _serpapi_nothing(reply: Json) -> str | None:
  # A search that found nothing has an error too.
  metadata = reply.get("search_metadata")
  if isinstance(metadata, dict) and metadata.get("status") == "Success":
    return ""
  return str(reply.get("error") or "") or None


def _searxng_nothing(reply: Json) -> str | None:
  engines = reply.get("unresponsive_engines")
  if not isinstance(engines, list) or not engines:
    return None
  return f"found no result, and engines that did not answer: {engines!r}."


SERVICES = {
  "serper": Service(
    url="https://google.serper.dev/search",
    variable="SERPER_API_KEY",
    header="X-API-KEY",
    most_passages=10,  # More than 10 cost twice as much.
    method="POST",
    request=lambda query, k: _post(q=query, num=k),
    results="organic",
    explain_empty=lambda reply: "" if "searchParameters" in reply else None,
  ),
  "brave": Service(
    url="https://api.search.brave.com/res/v1/web/search",
    variable="BRAVE_API_KEY",
    header="X-Subscription-Token",
    most_passages=20,
    request=lambda query, k: _get(
      q=query, count=k, text_decorations="false", result_filter="web"
    ),
    results="web.results",
    link="url",
    snippet="description",
    explain_empty=lambda reply: "" if reply.get("type") == "search" else None,
    words=50,
    characters=400,
  ),
  "tavily": Service(
    url="https://api.tavily.com/search",
    variable="TAVILY_API_KEY",
    header="Authorization",
    key_prefix="Bearer ",
    most_passages=20,
    method="POST",
    # An advanced search costs twice as much.
    request=lambda query, k: _post(
      query=query, max_results=k, search_depth="basic"
    ),
    results="results",
    link="url",
    snippet="content",
    characters=400,
  ),
  "serpapi": Service(
    url="https://serpapi.com/search.json",
    variable="SERPAPI_API_KEY",
    parameter="api_key",
    most_passages=10,  # A page of Google's results; `num` has no effect now.
    request=lambda query, k: _get(engine="google", q=query),
    results="organic_results",
    explain_empty=_serpapi_nothing,
  ),
  "searxng": Service(
    most_passages=20,  # Of a page of results.
    request=lambda query, k: _get(q=query, format="json"),
    results="results",
    link="url",
    snippet="content",
    explain_empty=_searxng_nothing,
    advice=(
      "Its settings.yml must list json under search.formats, and its limiter "
      "must admit this machine."
    ),
  ),
}

# Tags by which services highlight the query; other angle brackets are text.
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_MARK = re.compile(r"</?(?:strong|b|em|i|mark|span|wbr)(?:\s[^<>]*)?/?>", re.I)
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")
_LINK = re.compile(r"https?://\S+")
# Statuses about a key; 432 and 433 are Tavily's limits of a plan.
_OF_ACCOUNT = (401, 402, 403, 429, 432, 433)
# Brave and Serper report bad keys in these words, with statuses 400 and 422.
_ABOUT_KEYS = re.compile(r"\b(token|api key|credits?)\b", re.IGNORECASE)


class WebRetriever:
  """Searches the web; safe to use from any event loop and thread.

  Long queries are cut to the limits of the service (Brave: 50 words, 400
  characters), and at most 10 passages are returned (Brave: 20). A blank query
  returns nothing and costs nothing.

  Args:
    kind: "serper", "serpapi", "brave", "tavily" or "searxng".
    price: cost of one call; `counters["cost"]` is the sum.
    key_variable: the environment variable with the key; "" is the default:
      SERPER_API_KEY, SERPAPI_API_KEY, BRAVE_API_KEY or TAVILY_API_KEY.
      SearXNG has none.
    address: address of a SearXNG server.
    settings: further arguments of `http_calls.Caller`, such as its `patience`.

  Raises:
    ValueError: the kind is unknown, or the key or the address is missing.

  `counters` has the counters of `http_calls.Caller`, the `queries`, and the
  `cost` of all calls that were answered, even if the answer was malformed.
  """

  def __init__(
    self,
    kind: str,
    *,
    price: float,
    key_variable: str = "",
    address: str = "",
    **settings: Any,
  ):
    config_settings.require("kind", kind, SERVICES)
    if bool(address) != (kind == "searxng"):
      raise ValueError(
        f"address: found {redaction.shown(address)!r}; expected the address of "
        "a server for searxng and none for others."
      )
    self._kind = kind
    self._service = SERVICES[kind]
    self._url = self._service.url or f"{address.rstrip('/')}/search"
    self._variable = key_variable or self._service.variable
    headers = {"Accept": "application/json"}
    key = ""
    self._parameters: dict[str, str] = {}
    if self._variable:
      key = http_calls.secret_in(self._variable, f"the key for {kind}")
      if self._service.parameter:
        self._parameters[self._service.parameter] = key
      else:
        headers[self._service.header] = self._service.key_prefix + key
    self._caller = http_calls.Caller(
      secret=key,
      advice="Can this machine reach it?",
      headers=headers,
      retried_statuses=(*http_calls.BUSY, 500),
      price=price,
      proxies=True,
      **settings,
    )
    self.counters: Counter[str] = self._caller.counters
    self.close = self._caller.close

  def identity(self) -> Json:
    """Returns JSON values that identify the answers."""
    values = {"kind": "web", "service": self._kind}
    if not self._service.url:
      values["address"] = self._url
    return values

  async def search(self, request: types.SearchRequest) -> Answer:
    """Returns passages, best first, whose ids are URLs.

    Raises:
      RetrievalError: there is no answer; with the service's advice if it
        refuses the key, which is invalid, over quota or over its rate.
    """
    requests_lib.check([request])
    self.counters["queries"] += 1
    service = self._service
    query = " ".join(_clean_text(request.query).split()[: service.words])
    query = query[: service.characters]
    if not query:
      return ()
    k = min(request.k, service.most_passages)
    sent = service.request(query, k)
    if self._parameters:
      sent["params"] |= self._parameters
    try:
      return await self._caller.ask(
        service.method,
        self._url,
        read=lambda value: self._passages(value)[:k],
        **sent,
      )
    except types.RetrievalError as error:
      status = getattr(error, "status", 0)
      if status in _OF_ACCOUNT or (
        status in (400, 422) and _ABOUT_KEYS.search(str(error))
      ):
        advice = service.advice.format(variable=self._variable)
        error.args = (f"{error} {advice}",)
      raise

  def _passages(self, reply: Any) -> Answer:
    """Returns the results that have a link, a title and a snippet, in order.

    Raises AnswerError if the reply has another form, or none of its results has
    all three: as an empty answer it would hide that nothing is found any more.
    """
    service = self._service
    results = reply
    for key in service.results.split("."):
      results = results.get(key) if isinstance(results, dict) else None
    if isinstance(reply, dict) and not results:
      if failure := service.explain_empty(reply):
        quoted = self._caller.redact.quote(failure, 200)
        raise http_calls.AnswerError(f"{self._url}: {quoted}")
      if results is None and failure is not None:
        return ()
    if not isinstance(results, list):
      expected = f"a list at {service.results}"
      raise self._caller.unexpected(self._url, reply, expected)
    passages = []
    for result in results:
      if not isinstance(result, Mapping):
        continue
      link = result.get(service.link)
      title = _clean(result.get("title"))
      text = _clean(result.get(service.snippet))
      if isinstance(link, str) and _LINK.fullmatch(link) and title and text:
        passages.append(types.Passage(_clean_text(link), f'"{title}"', text))
    if results and not passages:
      expected = (
        f"the texts {service.link!r}, 'title' and {service.snippet!r} in at "
        f"least one of {len(results)} results"
      )
      raise self._caller.unexpected(self._url, results[0], expected)
    return tuple(passages)


def _clean(value: Any) -> str:
  """Returns a text in one line, without highlighting tags and HTML entities."""
  if not isinstance(value, str):
    return ""
  text = html.unescape(_MARK.sub("", _BREAK.sub(" ", value)))
  return " ".join(_clean_text(text).split())


def _clean_text(text: str) -> str:
  """Removes control characters and lone surrogates."""
  return _CONTROL.sub("", text).encode(errors="ignore").decode()
