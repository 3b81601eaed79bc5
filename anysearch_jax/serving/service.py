"""An agent over HTTP, for OpenAI's clients.

    POST /v1/responses          see `responses_api`
    POST /v1/chat/completions   see `chat_api`
    GET  /                      a page to ask from
    GET  /v1/models             the policy's name
    GET  /examples              questions that can be asked
    GET  /health                200, or 503 while the service drains
    GET  /metrics               for Prometheus

Errors have OpenAI's form: 400 a field that cannot be honoured, 401 no key, 404
no such model or path, 408 body too slow, 413 body too large, 429 too many
requests or a day's limit, 500 a bug, 503 the engine, the retriever or a place
is missing, or the service stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib.resources
import json
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import prometheus_client
from starlette import applications, exceptions, requests, routing
from starlette import responses as responses_lib

from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.agent import events
from anysearch_jax.host import http_server, loop
from anysearch_jax.serving import chat_api, fields, keys, responses_api

_log = logging.getLogger(__name__)
STOPPING = fields.RequestError(
  503, "The service stops; ask another one, or later.", retry_after=1
)
_BODY = 2**20  # Bytes of a request.
_BODY_SECONDS = 30.0
# Clients ignore comments; proxies cut a connection that is silent for long.
HEARTBEAT = b": still working\n\n"
HEARTBEAT_SECONDS = 15.0
# The header with a request's id, which errors and the log name.
_ID = "x-request-id"
_EXAMPLES = 100
# The names of an API in metrics; how it reads a request, and writes answers.
_APIS = {"responses": responses_api, "chat": chat_api}
_FILES = {
  "/": ("index.html", "text/html; charset=utf-8"),
  "/page.css": ("page.css", "text/css; charset=utf-8"),
  "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
# Bounds of buckets of times and of numbers of searches.
_SECONDS = (*(m * 10.0**e for e in (-2, -1, 0, 1) for m in (1, 2, 5)), 100)
_SEARCHES = (0, 1, 2, 3, 4, 5, 8, 12, 16, 32)
# Nothing from elsewhere, no inline script, no frame around it:
# https://developer.mozilla.org/en-US/docs/Web/HTTP/Guides/CSP
_HEADERS = {
  "content-security-policy": (
    "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'"
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
      buckets=_SECONDS,
    )
    self.first_event = histogram(
      "first_event_seconds",
      "From a question to the first piece of reasoning, search or answer.",
      buckets=_SECONDS,
    )
    self._outcomes = counter(
      "episodes", "Episodes that ended, by their outcome.", ("outcome",)
    )
    self.searches = counter(
      "searches", "Searches that were charged, also of clients that left."
    )
    self._searches = histogram(
      "episode_searches", "Searches of an ended episode.", buckets=_SEARCHES
    )
    self._tokens = counter("tokens", "Tokens that the policy wrote.")
    self._turns = counter("turns", "Turns of the policy.")
    self.running = gauge(
      "running_questions",
      "Questions under way, those that wait for a place included.",
    )
    engine: Any = agent.engine
    if hasattr(engine, "pages"):  # Those that are held, and all.
      sentence = "Pages of the KV cache."
      gauge("kv_pages_used", sentence).set_function(lambda: engine.pages[0])
      gauge("kv_pages_all", sentence).set_function(lambda: engine.pages[1])

  def responded(self, route: str, status: int, seconds: float) -> None:
    """Counts a response."""
    self._requests.labels(route, str(status)).inc()
    self._seconds.labels(route).observe(seconds)

  def ended(self, reply: events.Reply) -> None:
    """Counts an episode."""
    self._outcomes.labels(str(reply.outcome)).inc()
    self._searches.observe(reply.searches)
    self._tokens.inc(reply.tokens)
    spans = reply.trajectory.spans
    self._turns.inc(sum(span.author is types.Author.MODEL for span in spans))


class EndedError(Exception):
  """The request has ended, because its client left."""


@dataclasses.dataclass
class Account:
  """What a request used, for logs, metrics and its key.

  `tell` runs in the agent's thread, the rest in the service's.

  reply: of the question, if that has ended.
  begun: whether the question had a place.
  searches: made so far.
  heard: whether anything beyond the budget was told.
  status: of the response.
  ends: is closed when the request has ended.
  """

  route: str
  id: str = dataclasses.field(default_factory=fields.new_id)
  key: str = ""
  asked: fields.Asked | None = None
  reply: events.Reply | None = None
  begun: bool = False
  searches: int = 0
  heard: bool = False
  status: int = 200
  started: float = dataclasses.field(default_factory=time.monotonic)
  ends: contextlib.ExitStack = dataclasses.field(
    default_factory=contextlib.ExitStack
  )
  _ended: bool = False
  _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

  def tell(self, event: events.Event) -> None:
    """Counts what an event costs, before it is made.

    Raises:
      EndedError: the request has ended, and what it used was read. Nothing may
        be used after that, so the episode ends here.
    """
    with self._lock:
      if self._ended:
        raise EndedError
      self.begun = True
      match event:
        case events.Searching():
          self.searches += 1
        case events.Answer(reply):
          self.reply = reply

  def close(self) -> None:
    """Ends the request; what it used is final."""
    with self._lock:
      self._ended = True
    self.ends.close()

  def used(self) -> tuple[int, int]:
    """Returns the searches, and the most tokens that can have been used.

    A question that was cut short can have used all of its tokens.
    """
    tokens = 0
    if self.reply is not None:
      tokens = self.reply.tokens
    elif self.begun and self.asked is not None:
      tokens = self.asked.max_tokens
    return self.searches, tokens

  def failure(self) -> str:
    """Returns why the engine or the retriever failed, for the log only."""
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
      "budget": self.asked.budget.searches if self.asked else None,
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
    served: what may be asked.
    guard: admits keys; None admits everybody.
    max_questions: limit of the questions that run or wait at a time; 0: eight
      times the agent's slots.
    locked: whether every client needs a key.
    draining: whether the service is about to stop and refuses new questions.
  """

  agent: agent_lib.Agent
  served: fields.Served
  _: dataclasses.KW_ONLY
  guard: keys.Guard | None = None
  max_questions: int = 0
  draining: bool = False

  def __post_init__(self):
    self.served = dataclasses.replace(self.served, cites=self.agent.cites)
    self.max_questions = self.max_questions or 8 * self.agent.slots
    self._metrics = _Metrics(self.agent)
    self._running = 0
    self.locked = self.guard is not None

  def drain(self, seconds: float) -> None:
    """Refuses new questions; those under way get 503 after `seconds`."""
    self.draining = True
    timer = threading.Timer(seconds, self.agent.end_questions)
    timer.daemon = True
    timer.start()

  def on_closed(self, reason: str) -> None:
    """Counts a connection that was closed early."""
    self._metrics.responded("connection", 499, 0.0)

  async def health(self, _: requests.Request) -> responses_lib.Response:
    """Returns the status of the service; needs no key."""
    values = {
      "status": "draining" if self.draining else "ok",
      "model": self.served.model,
      "slots": self.agent.slots,
      "running": self._running,
      "max_budget": self.served.max_budget,
      "passages": self.agent.passages,
      "keys": self.locked,
    }
    return _json(values, 503 if self.draining else 200)

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
    model = {
      "id": self.served.model,
      "object": "model",
      "created": 0,
      "owned_by": "anysearch",
    }
    return _json({"object": "list", "data": [model]})

  async def examples(self, _: requests.Request) -> responses_lib.Response:
    """Returns questions that one can ask; it is empty for real corpora."""
    return _json([q.text for q in self.agent.examples[:_EXAMPLES]])

  async def ask(
    self, route: str, request: requests.Request
  ) -> responses_lib.Response:
    """Answers a request to one of the two APIs.

    A response that streams closes its account itself, at its end.
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
    if not isinstance(response, _EventStream):
      self._close(account, 200)
    response.headers[_ID] = account.id
    return response

  async def _answer(
    self, account: Account, request: requests.Request
  ) -> responses_lib.Response:
    """Reads a request, admits it and asks the agent."""
    if self.draining:
      raise STOPPING
    key = self._key(request)
    account.key = key.name if key else ""
    body = await http_server.body(request, limit=_BODY, seconds=_BODY_SECONDS)
    api = _APIS[account.route]
    asked = fields.read(api.Request, body, self.served)
    refusal = await asyncio.to_thread(self.agent.refusal, asked.question)
    if refusal is not None:
      raise fields.RequestError(400, refusal, code="unknown_words")
    self._begin(account, key, asked)
    writer = api.Writer(asked, self.served)
    if asked.stream:
      return _EventStream(
        self._chunks(writer, account, asked),
        on_end=lambda: self._close(account, account.status),
      )

    async def collected() -> list[events.Event]:
      async with contextlib.aclosing(self._events(account, asked)) as told:
        return [event async for event in told if event is not None]

    told = await http_server.unless_gone(request.receive, collected())
    if account.failure():  # Clients then try again.
      sentence = fields.unavailable(account.id)
      raise fields.RequestError(
        503, sentence, code="unavailable", retry_after=1
      )
    return _json(writer.collected(told))

  async def _chunks(
    self,
    writer: responses_api.Writer | chat_api.Writer,
    account: Account,
    asked: fields.Asked,
  ) -> AsyncGenerator[bytes]:
    """Yields the stream of a request, in the words of its API."""
    account.status = 499  # Until the end of the stream.
    yield b"".join(map(_frame, writer.begin()))
    try:
      async with contextlib.aclosing(self._events(account, asked)) as told:
        async for event in told:
          if event is None:
            yield HEARTBEAT
          else:
            yield b"".join(map(_frame, writer.write(event)))
      yield b"".join(map(_frame, writer.end())) + writer.last
      account.status = 200
    except fields.RequestError as error:
      yield _frame(writer.refused(error))
      account.status = error.status_code

  async def _events(
    self, account: Account, asked: fields.Asked
  ) -> AsyncGenerator[events.Event | None]:
    """Yields the events of a question as they come; None after a silence.

    Closing it ends the question.
    """
    told: asyncio.Queue[events.Event | None] = asyncio.Queue()
    put = loop.putting(told)
    answering = asyncio.ensure_future(
      self.agent.ask_async(
        asked.question,
        budget=asked.budget,
        seed=asked.seed,
        deadline=asked.deadline,
        max_tokens=asked.max_tokens,
        sampling=asked.sampling,
        tell=lambda event: put(self._counted(account, event, asked.stop)),
        pieces=asked.stream,
      )
    )
    answering.add_done_callback(lambda _: put(None))
    try:
      while True:
        try:
          async with asyncio.timeout(HEARTBEAT_SECONDS):
            event = await told.get()
        except TimeoutError:
          yield None
          continue
        if event is None:
          break
        yield event
      await answering
    except agent_lib.BusyError as error:
      raise fields.RequestError(503, str(error), retry_after=5) from error
    except agent_lib.ClosedError as error:
      raise STOPPING from error
    except Exception as error:
      raise _failed(account.id, error) from error
    finally:
      answering.cancel()
      await asyncio.gather(answering, return_exceptions=True)

  def _counted(
    self, account: Account, event: events.Event, stop: tuple[str, ...]
  ) -> events.Event:
    """Counts an event in the agent's thread and returns what is told of it.

    So it is counted even if the client reads none of it.
    """
    if not (account.heard or isinstance(event, events.Budget)):
      account.heard = True
      self._metrics.first_event.observe(time.monotonic() - account.started)
    if isinstance(event, events.Answer):
      self._metrics.ended(event.reply)
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
    self._metrics.responded(account.route, status, seconds)
    if _log.isEnabledFor(logging.INFO):
      _log.info(json.dumps(account.line(status, seconds)))

  def _key(self, request: requests.Request) -> keys.Key | None:
    if self.guard is None:
      return None
    return self.guard.key(request.headers.get("authorization"))

  def _begin(
    self, account: Account, key: keys.Key | None, asked: fields.Asked
  ) -> None:
    """Charges the key and counts the request until it ends."""
    if self._running >= self.max_questions:
      raise fields.RequestError(
        503,
        f"Found {self._running} questions under way, expected at most "
        f"{self.max_questions}; ask later.",
        retry_after=5,
      )
    if self.guard is not None and key is not None:
      account.ends.enter_context(
        self.guard.admitted(
          key,
          searches=asked.budget.searches,
          tokens=asked.max_tokens,
          used=account.used,
        )
      )
    self._count(1)
    account.ends.callback(self._count, -1)
    account.asked = asked

  def _count(self, more: int) -> None:
    self._running += more
    self._metrics.running.set(self._running)


def _cut(answer: str, stop: tuple[str, ...]) -> str:
  """Returns what of an answer is before the first stop text in it."""
  ends = [answer.index(text) for text in stop if text in answer]
  return answer[: min(ends, default=len(answer))]


def create_app(service: Service) -> applications.Starlette:
  """Returns the ASGI app of a service."""
  responses, chat = (functools.partial(service.ask, name) for name in _APIS)
  routes = [
    routing.Route("/v1/responses", responses, methods=["POST"]),
    routing.Route("/v1/chat/completions", chat, methods=["POST"]),
    routing.Route("/v1/models", service.models),
    routing.Route("/examples", service.examples),
    routing.Route("/health", service.health),
    routing.Route("/metrics", service.metrics),
    *(
      routing.Route(path, _file(name, kind), methods=["GET"])
      for path, (name, kind) in _FILES.items()
    ),
  ]
  paths = ", ".join(route.path for route in routes)

  async def refused(
    request: requests.Request, error: Exception
  ) -> responses_lib.Response:
    name = request.scope.get(_ID, "")
    if not isinstance(error, exceptions.HTTPException):
      error = _failed(name, error)
    values = fields.error_of(error)
    if not name and error.status_code in (404, 405):  # No route has it.
      values["message"] += f"; expected one of {paths}."
    response = _json({"error": values}, error.status_code, error.headers)
    if name:
      response.headers[_ID] = name
    return response

  return applications.Starlette(
    routes=routes,
    exception_handlers=dict.fromkeys(
      (exceptions.HTTPException, Exception), refused
    ),
  )


def _failed(request: str, error: Exception) -> fields.RequestError:
  """Logs a bug and returns what the client is told of it."""
  _log.error("%s was not answered.", request, exc_info=error)
  return fields.RequestError(
    500, f"The server failed; its log says more of {request}."
  )


def _file(name: str, kind: str) -> responses_lib.Response:
  """Returns a file of the page, an app by itself."""
  file = importlib.resources.files(__package__).joinpath("page", name)
  return responses_lib.Response(file.read_bytes(), 200, _HEADERS, kind)


def _json(
  value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> responses_lib.Response:
  """Returns a response of JSON; in ASCII, so half a surrogate is no error."""
  body = json.dumps(value)
  return responses_lib.Response(body, status, headers, "application/json")


def _frame(value: Mapping[str, Any]) -> bytes:
  """Returns an event of a stream, which has the name of its `type`, if any.

  https://html.spec.whatwg.org/multipage/server-sent-events.html
  Its JSON is ASCII, because some clients also end lines at other characters
  than newlines, such as U+2028.
  """
  name = f"event: {value['type']}\n" if "type" in value else ""
  return f"{name}data: {json.dumps(value)}\n\n".encode()


class _EventStream(responses_lib.StreamingResponse):
  """Sends chunks until they end or the client leaves, and calls `on_end`."""

  def __init__(
    self, chunks: AsyncGenerator[bytes], *, on_end: Callable[[], None]
  ):
    super().__init__(
      chunks,
      headers={"cache-control": "no-store", "x-accel-buffering": "no"},
      media_type="text/event-stream",
    )
    self._chunks = chunks
    self._on_end = on_end

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    try:
      async with contextlib.aclosing(self._chunks):
        await super().__call__(scope, receive, send)
    finally:
      self._on_end()
