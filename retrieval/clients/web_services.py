"""What the search engines that `web` asks expect and answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from anysearch_jax.host.http import wire

Json = dict[str, Any]


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
      "content": wire.body({"q": query, "num": k}),
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
      "content": wire.body(
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
