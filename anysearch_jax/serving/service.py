"""An agent over HTTP, for OpenAI's clients.

    POST /v1/responses          see `responses_api`
    POST /v1/chat/completions   see `chat_api`
    GET  /                      a page to ask from
    GET  /v1/models             the policy's name
    GET  /v1/models/{model}     the same, by its name
    GET  /examples              questions that can be asked
    GET  /documents/{name}      a file of the index, as answers cite it
    GET  /health                200, or 503 while the service drains
    GET  /metrics               for Prometheus

Errors have OpenAI's form:

    400   a field cannot be honoured
    401   the key is missing or unknown
    404   unknown model or path; a document that is gone or changed
    408   the body came too slowly
    413   the body is too large
    429   the key has too many requests, or used up its day
    500   a bug
    503   the engine or the retriever is unavailable, all slots are taken, or
          the service stops
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib.resources
import json
import logging
import pathlib
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import prometheus_client
from starlette import applications, exceptions, requests, routing
from starlette import responses as responses_lib

from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.agent import events
from anysearch_jax.host import (
  http_server,
  loop,
  openai_replies,
  openai_requests,
)
from anysearch_jax.retrieval.documents import originals as originals_lib
from anysearch_jax.serving import (
  chat_api,
  fields,
  keys,
  originals,
  responses_api,
)

_log = logging.getLogger(__name__)
_STOPPING = "The service stops; ask another one, or later."
_MAX_BODY_BYTES = 2**20
_BODY_SECONDS = 30.0  # Until the whole body must have arrived.
# The header with a request's id, which errors and the log name.
_ID = "x-request-id"
_MAX_EXAMPLES = 100
# The API's name in metrics, and the module with its `Request` and `Writer`.
_APIS = {"responses": responses_api, "chat": chat_api}
# The page's files, by their suffix.
_MEDIA_TYPES = {
  ".html": "text/html; charset=utf-8",
  ".css": "text/css; charset=utf-8",
  ".js": "text/javascript; charset=utf-8",
}
# Upper bounds of the buckets of histograms: 0.01, 0.02, 0.05, ... 50, 100.
_SECONDS_BUCKETS = tuple(
  digit * 10.0**exponent for exponent in (-2, -1, 0, 1) for digit in (1, 2, 5)
) + (100,)
_SEARCHES_BUCKETS = (0, 1, 2, 3, 4, 5, 8, 12, 16, 32)
# The page loads nothing from other hosts, runs no inline script, cannot be put
# into a frame, and frames this service's documents only:
# https://developer.mozilla.org/en-US/docs/Web/HTTP/Guides/CSP
_HEADERS = {
  "content-security-policy": (
    "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; frame-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
  ),
  "x-content-type-options": "nosniff",
  "referrer-policy": "no-referrer",
  "cache-control": "no-cache",
}


class _Metrics:
  """Counts and times of an agent for Prometheus, in their own registry."""

  def __init__(self, agent: agent_lib.Agent):
    self.registry = prometheus_client.CollectorRegistry()
    options: Any = {"namespace": "anysearch", "registry": self.registry}
    counter: Any = functools.partial(prometheus_client.Counter, **options)
    gauge: Any = functools.partial(prometheus_client.Gauge, **options)
    histogram: Any = functools.partial(prometheus_client.Histogram, **options)
    self._requests = counter(
      "requests",
      "Requests that were answered; 499: the client left.",
      ("route", "status"),
    )
    self._seconds = histogram(
      "request_seconds",
      "From the headers of a request to the end of its answer.",
      ("route",),
      buckets=_SECONDS_BUCKETS,
    )
    self.first_event = histogram(
      "first_event_seconds",
      "From a question to the first piece of reasoning, search or answer.",
      buckets=_SECONDS_BUCKETS,
    )
    self._outcomes = counter(
      "episodes", "Episodes that ended, by their outcome.", ("outcome",)
    )
    self.searches = counter(
      "searches", "Searches that were charged, also of clients that left."
    )
    self._searches = histogram(
      "episode_searches",
      "Searches of an ended episode.",
      buckets=_SEARCHES_BUCKETS,
    )
    self._tokens = counter("tokens", "Tokens that the policy wrote.")
    self._turns = counter("turns", "Turns of the policy.")
    self.running = gauge(
      "running_questions",
      "Questions under way, those that wait for a place included.",
    )
    engine: Any = agent.engine
    if hasattr(engine, "pages"):  # A pair: the pages in use, and all pages.
      sentence = "Pages of the KV cache."
      gauge("kv_pages_used", sentence).set_function(lambda: engine.pages[0])
      gauge("kv_pages_all", sentence).set_function(lambda: engine.pages[1])

  def count_response(self, route: str, status: int, seconds: float) -> None:
    """Counts a response.

    Args:
      route: the API's name, or "connection" if no request was read.
      status: HTTP status; 499 if the client left.
      seconds: time from the request's headers to the end of the response.
    """
    self._requests.labels(route, str(status)).inc()
    self._seconds.labels(route).observe(seconds)

  def count_episode(self, reply: events.Reply) -> None:
    """Counts an ended episode."""
    self._outcomes.labels(str(reply.outcome)).inc()
    self._searches.observe(reply.searches)
    self._tokens.inc(reply.tokens)
    spans = reply.trajectory.spans
    self._turns.inc(sum(span.author is types.Author.MODEL for span in spans))


class EndedError(Exception):
  """The client has left, so its episode must end."""


@dataclasses.dataclass
class Account:
  """The usage of a request, for logs, metrics and its key.

  `tell` runs in the agent's thread, the other methods in the service's.

  Attributes:
    route: name of the API in metrics.
    id: the request's id.
    key: name of the key; "" without one.
    request: the parsed request, once it is admitted.
    reply: the agent's reply, once the question has ended.
    has_slot: whether the question began to run.
    searches: number of searches so far.
    has_event: whether an event besides `Budget` was told.
    status: HTTP status of the response.
    started: time of the request's arrival, of `time.monotonic`.
    on_close: closed when the request has ended.
  """

  route: str
  id: str = dataclasses.field(default_factory=fields.new_id)
  key: str = ""
  request: fields.ParsedRequest | None = None
  reply: events.Reply | None = None
  has_slot: bool = False
  searches: int = 0
  has_event: bool = False
  status: int = 200
  started: float = dataclasses.field(default_factory=time.monotonic)
  on_close: contextlib.ExitStack = dataclasses.field(
    default_factory=contextlib.ExitStack
  )
  _ended: bool = False
  _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

  def tell(self, event: events.Event) -> None:
    """Counts a search before it is made, and keeps the reply.

    Raises:
      EndedError: the request has ended and its usage was charged, so its
        episode must use nothing more.
    """
    with self._lock:
      if self._ended:
        raise EndedError
      self.has_slot = True
      match event:
        case events.Searching():
          self.searches += 1
        case events.Answer(reply):
          self.reply = reply

  def close(self) -> None:
    """Ends the request; its usage is final."""
    with self._lock:
      self._ended = True
    self.on_close.close()

  def used(self) -> tuple[int, int]:
    """Returns the searches, and an upper bound of the tokens.

    If the question ended early, it may have used all of its tokens.
    """
    tokens = 0
    if self.reply is not None:
      tokens = self.reply.tokens
    elif self.has_slot and self.request is not None:
      tokens = self.request.max_tokens
    return self.searches, tokens

  def failure(self) -> str:
    """Returns why the engine or the retriever failed, for the log only.

    It is "" if neither failed.
    """
    if self.reply and self.reply.outcome is types.Outcome.FAILED:
      return self.reply.reason
    return ""

  def line(self, status: int, seconds: float) -> dict[str, Any]:
    """Returns the values of the request's line in the log."""
    reply = self.reply
    return {
      "request": self.id,
      "route": self.route,
      "status": status,
      "key": self.key,
      "seconds": round(seconds, 3),
      "budget": self.request.budget.searches if self.request else None,
      "searches": self.searches,
      "tokens": reply.tokens if reply else 0,
      "outcome": str(reply.outcome) if reply else None,
      "failure": self.failure(),
    }


@dataclasses.dataclass(eq=False)
class Service:
  """The shared state of an app's routes.

  Attributes:
    agent: answers the questions.
    served: the model, with defaults and limits of requests.
    guard: admits keys; None admits everybody.
    documents: the files of the agent's index; None if it has none.
    max_questions: limit of the questions that run or wait at a time; 0: eight
      times the agent's slots.
    locked: whether every client needs a key.
    draining: whether the service is about to stop and refuses new questions.
  """

  agent: agent_lib.Agent
  served: fields.Served
  _: dataclasses.KW_ONLY
  guard: keys.Guard | None = None
  documents: originals_lib.Originals | None = None
  max_questions: int = 0
  draining: bool = False

  def __post_init__(self):
    self.served = dataclasses.replace(self.served, cites=self.agent.cites)
    self.max_questions = self.max_questions or 8 * self.agent.slots
    self._metrics = _Metrics(self.agent)
    self._running = 0
    self.locked = self.guard is not None
    self.links: originals.Links | None = None
    if self.documents is not None:
      self.links = originals.Links(self.documents, self.guard)

  def drain(self, seconds: float) -> None:
    """Refuses new questions; those under way get 503 after `seconds`."""
    self.draining = True
    timer = threading.Timer(seconds, self.agent.end_questions)
    timer.daemon = True
    timer.start()

  def on_closed(self, reason: str) -> None:
    """Counts a connection that was closed early."""
    self._metrics.count_response("connection", 499, 0.0)

  async def health(self, _: requests.Request) -> responses_lib.Response:
    """Returns the status of the service; needs no key."""
    values = {
      "status": "draining" if self.draining else "ok",
      "model": self.served.model,
      "slots": self.agent.slots,
      "running": self._running,
      "max_budget": self.served.max_budget,
      "passages": self.agent.passages,
      "max_characters": fields.MAX_CHARACTERS,
      "history_characters": min(
        self.agent.history_characters, fields.MAX_CHARACTERS // 2
      ),
      "keys": self.locked,
    }
    return http_server.json_response(values, 503 if self.draining else 200)

  async def metrics(self, request: requests.Request) -> responses_lib.Response:
    """Returns the metrics for Prometheus."""
    self._key(request)
    return responses_lib.Response(
      prometheus_client.generate_latest(self._metrics.registry),
      media_type=prometheus_client.CONTENT_TYPE_LATEST,
    )

  async def models(self, request: requests.Request) -> responses_lib.Response:
    """Returns the models that a request may name."""
    self._key(request)
    model = openai_replies.model_values(self.served.model)
    return http_server.json_response({"object": "list", "data": [model]})

  async def model(self, request: requests.Request) -> responses_lib.Response:
    """Returns a model by a name that a request may have."""
    self._key(request)
    name = request.path_params["model"]
    fields.budget_of_model(name, self.served)
    return http_server.json_response(openai_replies.model_values(name))

  async def examples(self, _: requests.Request) -> responses_lib.Response:
    """Returns example questions; there are none for real corpora."""
    return http_server.json_response(
      [q.text for q in self.agent.examples[:_MAX_EXAMPLES]]
    )

  async def ask(
    self, route: str, request: requests.Request
  ) -> responses_lib.Response:
    """Answers a request to one of the two APIs.

    A streamed response closes its account itself, at its end.

    Args:
      route: the API's name in metrics.
      request: the HTTP request.
    """
    account = Account(route)
    request.scope[_ID] = account.id
    try:
      response = await self._answer(account, request)
    except BaseException as error:
      status = 499 if isinstance(error, asyncio.CancelledError) else 500
      if isinstance(error, exceptions.HTTPException):
        status = error.status_code
      self._close(account, status)
      raise
    if not isinstance(response, openai_replies.EventStream):
      self._close(account, 200)
    response.headers[_ID] = account.id
    return response

  async def _answer(
    self, account: Account, http_request: requests.Request
  ) -> responses_lib.Response:
    """Reads a request, admits it and asks the agent."""
    if self.draining:
      raise openai_requests.RequestError(503, _STOPPING, retry_after=1)
    key = self._key(http_request)
    account.key = key.name if key else ""
    body = await http_server.body(
      http_request, limit=_MAX_BODY_BYTES, seconds=_BODY_SECONDS
    )
    api = _APIS[account.route]
    request = fields.parse_request(api.Request, body, self.served)
    refusal = await asyncio.to_thread(self.agent.refusal, request.question)
    if refusal is not None:
      raise openai_requests.RequestError(400, refusal, code="unknown_words")
    self._begin(account, key, request)
    served = self.served
    if self.links is not None:
      served = dataclasses.replace(
        served,
        url_of=functools.partial(
          self.links.url, request=http_request, key=account.key
        ),
      )
    writer = api.Writer(request, served)
    if request.stream:
      return openai_replies.EventStream(
        self._chunks(writer, account, request),
        on_end=lambda: self._close(account, account.status),
      )

    async def collect() -> list[events.Event]:
      async with contextlib.aclosing(
        self._events(account, request)
      ) as answer_events:
        return [event async for event in answer_events if event is not None]

    answer_events = await http_server.unless_gone(
      http_request.receive, collect()
    )
    if account.failure():  # Of a 503, clients try again.
      sentence = fields.unavailable(account.id)
      raise openai_requests.RequestError(
        503, sentence, code="unavailable", retry_after=1
      )
    return http_server.json_response(writer.collected(answer_events))

  async def _chunks(
    self,
    writer: responses_api.Writer | chat_api.Writer,
    account: Account,
    request: fields.ParsedRequest,
  ) -> AsyncGenerator[bytes]:
    """Yields the bytes of a streamed response."""
    account.status = 499  # The client left; replaced at the end of the stream.
    yield b"".join(map(openai_replies.frame, writer.begin()))
    try:
      async with contextlib.aclosing(
        self._events(account, request)
      ) as agent_events:
        async for event in agent_events:
          if event is None:
            yield openai_replies.HEARTBEAT
          else:
            yield b"".join(map(openai_replies.frame, writer.write(event)))
      yield b"".join(map(openai_replies.frame, writer.end())) + writer.last
      account.status = 200
    except openai_requests.RequestError as error:
      yield openai_replies.frame(writer.refused(error))
      account.status = error.status_code

  async def _events(
    self, account: Account, request: fields.ParsedRequest
  ) -> AsyncGenerator[events.Event | None]:
    """Yields the events of a question as they happen; None is a heartbeat.

    Closing the generator ends the question.
    """
    pending: asyncio.Queue[events.Event | None] = asyncio.Queue()
    put = loop.thread_safe_put(pending)
    answering = asyncio.ensure_future(
      self.agent.ask_async(
        request.question,
        budget=request.budget,
        seed=request.seed,
        deadline=request.deadline,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        tell=lambda event: put(self._counted(account, event, request.stop)),
        pieces=request.stream,
        drafts=request.drafts,
      )
    )
    answering.add_done_callback(lambda _: put(None))
    try:
      while True:
        try:
          async with asyncio.timeout(openai_replies.HEARTBEAT_SECONDS):
            event = await pending.get()
        except TimeoutError:
          yield None
          continue
        if event is None:
          break
        yield event
      await answering
    except agent_lib.BusyError as error:
      raise openai_requests.RequestError(
        503, str(error), retry_after=5
      ) from error
    except agent_lib.ClosedError as error:
      raise openai_requests.RequestError(
        503, _STOPPING, retry_after=1
      ) from error
    except Exception as error:
      raise _failed(account.id, error) from error
    finally:
      answering.cancel()
      await asyncio.gather(answering, return_exceptions=True)

  def _counted(
    self, account: Account, event: events.Event, stop: tuple[str, ...]
  ) -> events.Event:
    """Counts an event in the agent's thread, and returns it for the client.

    So an event is counted even if the client never reads it. The returned reply
    is cut at a stop text, and hides why the engine or the retriever failed.
    """
    if not (account.has_event or isinstance(event, events.Budget)):
      account.has_event = True
      self._metrics.first_event.observe(time.monotonic() - account.started)
    if isinstance(event, events.Answer):
      self._metrics.count_episode(event.reply)
    account.tell(event)
    if isinstance(event, events.Searching):
      self._metrics.searches.inc()
    if not isinstance(event, events.Answer):
      return event
    reply = event.reply
    if reply.answer is not None:
      reply = dataclasses.replace(reply, answer=_cut(reply.answer, stop))
    if reply.outcome is types.Outcome.FAILED:
      sentence = fields.unavailable(account.id)
      reply = dataclasses.replace(reply, reason=sentence)
    return events.Answer(reply)

  def _close(self, account: Account, status: int) -> None:
    account.close()
    seconds = time.monotonic() - account.started
    self._metrics.count_response(account.route, status, seconds)
    if _log.isEnabledFor(logging.INFO):
      _log.info(json.dumps(account.line(status, seconds)))

  def _key(self, request: requests.Request) -> keys.Key | None:
    if self.guard is None:
      return None
    return self.guard.authenticate(request.headers.get("authorization"))

  def _begin(
    self, account: Account, key: keys.Key | None, request: fields.ParsedRequest
  ) -> None:
    """Charges the key and counts the request until it ends."""
    if self._running >= self.max_questions:
      raise openai_requests.RequestError(
        503,
        f"Found {self._running} questions under way, expected at most "
        f"{self.max_questions}; ask later.",
        retry_after=5,
      )
    if self.guard is not None and key is not None:
      account.on_close.enter_context(
        self.guard.admitted(
          key,
          searches=request.budget.searches,
          tokens=request.max_tokens,
          used=account.used,
        )
      )
    self._count(1)
    account.on_close.callback(self._count, -1)
    account.request = request

  def _count(self, change: int) -> None:
    """Adds `change`, 1 or -1, to the number of running questions."""
    self._running += change
    self._metrics.running.set(self._running)


def _cut(answer: str, stop: tuple[str, ...]) -> str:
  """Returns an answer up to the first stop text in it."""
  ends = [answer.index(text) for text in stop if text in answer]
  return answer[: min(ends, default=len(answer))]


def create_app(service: Service) -> applications.Starlette:
  """Returns the ASGI app of a service."""
  responses, chat = (functools.partial(service.ask, name) for name in _APIS)
  routes = [
    routing.Route("/v1/responses", responses, methods=["POST"]),
    routing.Route("/v1/chat/completions", chat, methods=["POST"]),
    routing.Route("/v1/models", service.models),
    routing.Route("/v1/models/{model:path}", service.model),
    routing.Route("/examples", service.examples),
    routing.Route("/health", service.health),
    routing.Route("/metrics", service.metrics),
    *_page_routes(),
    *(
      [routing.Route(f"{originals.PATH}{{name:path}}", service.links.respond)]
      if service.links
      else []
    ),
  ]
  paths = ", ".join(route.path_format for route in routes)

  async def error_response(
    request: requests.Request, error: Exception
  ) -> responses_lib.Response:
    request_id = request.scope.get(_ID, "")
    if not isinstance(error, exceptions.HTTPException):
      error = _failed(request_id, error)
    values = openai_replies.error_of(error)
    if not request_id and error.status_code in (404, 405):  # No route matched.
      values["message"] += f"; expected one of {paths}."
    response = http_server.json_response(
      {"error": values}, error.status_code, error.headers
    )
    if request_id:
      response.headers[_ID] = request_id
    return response

  return applications.Starlette(
    routes=routes,
    exception_handlers=dict.fromkeys(
      (exceptions.HTTPException, Exception), error_response
    ),
  )


def _failed(request_id: str, error: Exception) -> openai_requests.RequestError:
  """Logs a bug and returns an error that does not show it."""
  _log.error("%s was not answered.", request_id, exc_info=error)
  return openai_requests.RequestError(
    500, f"The server failed; its log says more of {request_id}."
  )


def _page_routes() -> Iterator[routing.Route]:
  """Yields a route for each file of the page; that of index.html is /."""
  for file in importlib.resources.files(__package__).joinpath("page").iterdir():
    kind = _MEDIA_TYPES[pathlib.PurePath(file.name).suffix]
    content = responses_lib.Response(file.read_bytes(), 200, _HEADERS, kind)
    path = "/" if file.name == "index.html" else f"/{file.name}"
    yield routing.Route(path, content, methods=["GET"])
