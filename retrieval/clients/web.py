"""Live web search as a retriever: Serper, Google Custom Search, Brave.

Titles and snippets are read as the service gives them; no page is fetched and
no redirect followed, so nothing that is found decides where a request goes.
Google's interface takes no new customers and ends on January 1, 2027.
"""

from __future__ import annotations

import asyncio
import dataclasses
import html
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import httpx2

from anysearch_jax.host.http import calls, errors, redaction, wire
from retrieval import passages

if TYPE_CHECKING:
  from retrieval import lexical  # It loads JAX.

Answer = tuple[passages.Passage, ...]
Json = dict[str, Any]

# What services mark words of the query with; other angle brackets are text.
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_MARK = re.compile(r"</?(?:strong|b|em|i|mark|span|wbr)(?:\s[^<>]*)?/?>", re.I)
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")
_LINK = re.compile(r"https?://\S+")
_LARGEST = 1 << 24


class AccountError(errors.RetrievalError):
  """The service takes no more searches with this key: key, quota or rate."""


@dataclasses.dataclass(frozen=True)
class _Service:
  """One interface.

  url: where it is. variable: where its key is by default. header: where the key
  goes; it is in no url, because those are logged.
  most: passages of one call. words, characters: of a query.
  request: arguments of httpx2's `request` by query, k and search engine.
  results: the path to the list of results. link, snippet: keys of a result.
  is_reply: whether an object without that list says that nothing was found.
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
  words: int = 1024
  characters: int = 2048


_SERVICES = {
  "serper": _Service(
    url="https://google.serper.dev/search",
    variable="SERPER_API_KEY",
    header="X-API-KEY",
    most=10,  # More cost twice.
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
  "google": _Service(
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
  "brave": _Service(
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
}


class WebRetriever:
  """Searches the web; from any event loop and thread.

  Longer queries are cut to what the service takes (Brave: 50 words, 400
  characters), and at most 10 passages are found (Brave: 20). A blank query
  finds nothing and costs nothing.

  Args:
    kind: "serper", "google" or "brave".
    price: what one call costs; `counters["cost"]` is their sum.
    key_variable: the environment variable with the key; "" is the usual one:
      SERPER_API_KEY, GOOGLE_API_KEY, BRAVE_API_KEY.
    engine: Google's search engine id (`cx`).
    corpus: the name of the web; requests name it or none.
    patience: how long the service is waited for.
    url, transport, clock: for tests.

  Raises:
    ValueError: another kind, no key, no engine, a negative price.

  `counters` are `calls.Caller`'s, the `queries`, and the `cost`: of calls that
  were answered, whatever with.
  """

  def __init__(
    self,
    kind: str,
    *,
    price: float,
    key_variable: str = "",
    engine: str = "",
    corpus: str = "",
    patience: calls.Patience = calls.DEFAULT,
    url: str = "",
    transport: httpx2.AsyncBaseTransport | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    if kind not in _SERVICES:
      raise ValueError(
        f"kind: found {kind!r}, expected one of {', '.join(_SERVICES)}."
      )
    if bool(engine) != (kind == "google"):
      raise ValueError(
        f"engine: found {engine!r}; expected the id of a search engine (cx) "
        "for google and none for others."
      )
    if not 0 <= price < float("inf"):
      raise ValueError(f"price: found {price}, expected 0 or more for a call.")
    self._kind, self._service = kind, _SERVICES[kind]
    self._price, self._engine, self._corpus = price, engine, corpus
    self._url = url or self._service.url
    self._variable = key_variable or self._service.variable
    key = calls.secret_in(self._variable, f"the key for {kind}")
    self._caller = calls.Caller(
      patience,
      headers={self._service.header: key, "Accept": "application/json"},
      secret=key,
      advice="Can this machine reach it?",
      largest=_LARGEST,
      again=(*calls.BUSY, 500),
      proxies=True,
      transport=transport,
      clock=clock,
    )
    self.counters: Counter[str] = self._caller.counters
    self._suspects: set[str] = set()

  async def search(self, request: lexical.Request) -> Answer:
    """At most `k` passages, best first; their ids are addresses.

    Raises:
      RetrievalError: no answer; `AccountError` where the key is the matter.
      ValueError: as `calls.check`.
    """
    (answer,) = await self.search_many([request])
    if isinstance(answer, Exception):
      raise answer
    return answer

  async def search_many(
    self, requests: Sequence[lexical.Request]
  ) -> list[Answer | Exception]:
    """Answers in the order of the requests, a call each; see `search`."""
    for request in requests:
      calls.check(request, self._corpus)
    return await self._caller.wait(self._search(list(requests)))

  def identity(self) -> Json:
    """JSON values that say what answers come from."""
    named = {"kind": "web", "service": self._kind}
    return named | ({"engine": self._engine} if self._engine else {})

  def close(self) -> None:
    """Closes connections; searches under way fail."""
    self._caller.close()

  async def _search(
    self, requests: list[lexical.Request]
  ) -> list[Answer | Exception]:
    until = self._caller.until()
    self.counters["queries"] += len(requests)

    async def one(request: lexical.Request) -> Answer | Exception:
      try:
        return await self._ask(request.query, request.k, until)
      except errors.RetrievalError as error:
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
      self.counters["cost"] += self._price
      redact = self._caller.redact
      reply = wire.parse(data, self._url, redact)
      found = _results(reply, service, self._url, redact)
      return _passages(found, service, self._url, redact)[:k]

    try:
      answer = await self._caller.ask(
        service.method,
        self._url,
        read=read,
        until=until,
        # One query that is asked over and over tells no more than once.
        counted=query not in self._suspects,
        **service.request(query, k, self._engine),
      )
      self._suspects.clear()
      return answer
    except errors.RetrievalError as error:
      self._suspects.add(query)
      if not isinstance(error, calls.StatusError) or not _is_of_account(error):
        raise
      raise AccountError(
        f"{error} Look after the key in {self._variable}, its quota and how "
        "many searches a second it may make."
      ) from None


def _is_of_account(error: calls.StatusError) -> bool:
  """Statuses of keys; Brave and Serper also say it in words."""
  return error.status in (401, 402, 403, 429) or (
    error.status in (400, 422)
    and re.search(r"\b(token|api key|credits?)\b", str(error), re.I) is not None
  )


def _results(
  reply: Any, service: _Service, url: str, redact: redaction.Redactor
) -> list[Any]:
  """The list of results.

  Raises:
    AnswerError: a reply of another shape. To find nothing in it would be to
      find nothing from then on.
  """
  found = reply
  for key in service.results:
    found = found.get(key) if isinstance(found, dict) else None
  if found is None and isinstance(reply, dict) and service.is_reply(reply):
    return []
  if not isinstance(found, list):
    raise errors.AnswerError(
      f"{url}: found {redact.quote(repr(reply), 80)}, expected a list at "
      f"{'.'.join(service.results)}."
    )
  return found


def _passages(
  found: list[Any], service: _Service, url: str, redact: redaction.Redactor
) -> Answer:
  """Results with a title and a snippet, in their order.

  Raises:
    AnswerError: there are results, and none has them.
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
      kept.append(passages.Passage(_clean_text(link), f'"{title}"', text))
  if found and not kept:
    raise errors.AnswerError(
      f"{url}: none of {len(found)} results has the texts {service.link!r}, "
      f"'title' and {service.snippet!r}; the first is "
      f"{redact.quote(repr(found[0]), 80)}."
    )
  return tuple(kept)


def _clean(value: Any) -> str:
  """One line of text of what may hold marks and entities."""
  if not isinstance(value, str):
    return ""
  text = html.unescape(_MARK.sub("", _BREAK.sub(" ", value)))
  return " ".join(_clean_text(text).split())


def _clean_text(text: str) -> str:
  """Without control characters and halves of surrogate pairs."""
  return _CONTROL.sub("", text).encode(errors="ignore").decode()
