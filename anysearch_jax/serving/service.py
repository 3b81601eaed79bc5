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
import json
import logging
import threading
import time
import uuid
from collections.abc import (
  AsyncGenerator,
  Iterator,
)
from typing import Any

import fastapi
import prometheus_client
from starlette import exceptions, requests

from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.agent import background, events
from anysearch_jax.agent import limits as limits_lib
from anysearch_jax.serving import (
  chat_api,
  errors,
  fields,
  keys,
  responses_api,
  service_metrics,
  static_page,
  streaming,
)

_log = logging.getLogger(__name__)
_BODY = 2**20  # Bytes of a request.
_BODY_SECONDS = 30.0
_EXAMPLES = 100
_FAILED = errors.RequestError(500, "The server failed; its log says more.")
_GONE = errors.RequestError(499, "The client left.")
_STOPPING = errors.RequestError(
  503, "The service stops; ask another one, or later.", retry_after=1
)


@dataclasses.dataclass
class _Account:
  """What a request used, for logs, metrics and its key.

  replies: of the questions that have ended.
  begun: questions that had a place, ended or not.
  searches: made so far, by questions that have not ended as well.
  status: of the response.
  ends: is closed when the request has ended.
  """

  route: str
  id: str = dataclasses.field(default_factory=lambda: f"req_{uuid.uuid4().hex}")
  key: str = ""
  asked: fields.Asked | None = None
  replies: list[events.Reply] = dataclasses.field(default_factory=list)
  begun: int = 0
  searches: int = 0
  status: int = 200
  started: float = dataclasses.field(default_factory=time.monotonic)
  ends: contextlib.ExitStack = dataclasses.field(
    default_factory=contextlib.ExitStack
  )

  @property
  def tokens(self) -> int:
    return sum(reply.tokens for reply in self.replies)

  @property
  def most_tokens(self) -> int:
    """What the request can have used: all of a question that was cut short."""
    if self.asked is None:
      return 0
    cut = self.begun - len(self.replies)
    return self.tokens + cut * self.asked.max_tokens


class Service:
  """The shared state of an app's routes.

  Args:
    agent: answers the questions.
    served: what may be asked.
    guard: admits keys; None admits everybody.
    most: questions under way at a time, those that wait for a place included.
    log_questions: whether the log holds the texts of questions.

  Attributes:
    draining: whether the service is about to stop and refuses new questions.
  """

  def __init__(
    self,
    agent: agent_lib.Agent,
    served: fields.Served,
    *,
    guard: keys.Guard | None = None,
    most: int = 0,
    log_questions: bool = False,
  ):
    self._agent, self._served, self._guard = agent, served, guard
    self._most = most or 8 * agent.slots
    engine = agent.engine
    self._metrics = service_metrics.Metrics(
      agent.slots,
      (lambda: engine.pages) if isinstance(engine, types.Paged) else None,
    )
    self._log_questions = log_questions
    self._running = 0
    self.draining = False

  def drain(self, seconds: float) -> None:
    """Refuses new questions; those under way get 503 after `seconds`."""
    self.draining = True
    timer = threading.Timer(seconds, self._agent.end_questions)
    timer.daemon = True
    timer.start()

  def on_closed(self, reason: str) -> None:
    """Counts a connection that was closed early."""
    self._metrics.responded("connection", 499, 0.0)
    del reason

  def health(self) -> fastapi.Response:
    """Returns the status of the service; needs no key."""
    status = "draining" if self.draining else "ok"
    values = {
      "status": status,
      "model": self._served.model,
      "slots": self._agent.slots,
      "running": self._running,
      "max_budget": self._served.max_budget,
      "keys": self._guard is not None,
    }
    return _json(values, 503 if self.draining else 200)

  def metrics(self, request: requests.Request) -> fastapi.Response:
    """Returns the metrics for Prometheus."""
    self._key(request)
    return fastapi.Response(
      prometheus_client.generate_latest(self._metrics.registry),
      media_type=prometheus_client.CONTENT_TYPE_LATEST,
    )

  def models(self, request: requests.Request) -> fastapi.Response:
    """Returns the models that a request may name."""
    self._key(request)
    model = {
      "id": self._served.model,
      "object": "model",
      "created": 0,
      "owned_by": "anysearch",
    }
    return _json({"object": "list", "data": [model]})

  def examples(self) -> fastapi.Response:
    """Returns questions that one can ask; it is empty for real corpora."""
    return _json([q.text for q in self._agent.examples[:_EXAMPLES]])

  async def responses(self, request: requests.Request) -> fastapi.Response:
    """Answers `POST /v1/responses`."""
    with self._account("responses") as account:
      body = await self._admitted(request, account)
      asked = self._begin(account, responses_api.read(body, self._served))
      writer = responses_api.Writer(asked, self._served)
      if asked.stream:
        return self._stream(account, self._responses_events(writer, account))
      await streaming.unless_gone(
        request, _drained(self._responses_events(writer, account))
      )
      _raise_failed(account.replies)
      return _json(writer.response)

  async def _responses_events(
    self, writer: responses_api.Writer, account: _Account
  ) -> AsyncGenerator[bytes]:
    for value in writer.begin():
      yield streaming.named(value)
    try:
      async with contextlib.aclosing(self._told(account)) as told:
        async for _, event in told:
          for value in writer.write(event):
            yield streaming.named(value)
    except errors.RequestError as error:
      account.status = error.status
      if not account.asked or not account.asked.stream:
        raise
      yield streaming.named(writer.refused(error))

  async def chat(self, request: requests.Request) -> fastapi.Response:
    """Answers `POST /v1/chat/completions`."""
    with self._account("chat") as account:
      body = await self._admitted(request, account)
      read, usage = chat_api.read(body, self._served)
      asked = self._begin(account, read)
      writer = chat_api.Writer(asked, usage=usage)
      if asked.stream:
        return self._stream(account, self._chat_events(writer, account))
      told: list[list[events.Event]] = [[] for _ in range(asked.choices)]
      await streaming.unless_gone(request, self._collect(account, told))
      _raise_failed(account.replies)
      return _json(writer.completion(told))

  async def _chat_events(
    self, writer: chat_api.Writer, account: _Account
  ) -> AsyncGenerator[bytes]:
    for value in writer.begin():
      yield streaming.data(value)
    try:
      async with contextlib.aclosing(self._told(account)) as told:
        async for index, event in told:
          for value in writer.write(index, event):
            yield streaming.data(value)
    except errors.RequestError as error:
      account.status = error.status
      yield streaming.data(error.body())
      return
    for value in writer.end():
      yield streaming.data(value)
    yield streaming.DONE

  async def _collect(
    self, account: _Account, told: list[list[events.Event]]
  ) -> None:
    async with contextlib.aclosing(self._told(account)) as all_told:
      async for index, event in all_told:
        told[index].append(event)

  async def _told(
    self, account: _Account
  ) -> AsyncGenerator[tuple[int, events.Event]]:
    """Yields the events of all answers to a request, with their index.

    Raises:
      errors.RequestError: there is no place, the service stops, or a bug.
    """
    asked = account.asked
    assert asked is not None
    sources = [
      self._accounted(account, asked, index) for index in range(asked.choices)
    ]
    first = True
    try:
      async with contextlib.aclosing(streaming.merged(sources)) as merged:
        async for index, event in merged:
          if first and not isinstance(event, events.Budget):
            first = False
            self._metrics.first_event.observe(
              time.monotonic() - account.started
            )
          yield index, event
    except limits_lib.BusyError as error:
      raise errors.RequestError(503, str(error), retry_after=5) from error
    except background.ClosedError as error:
      raise _STOPPING from error
    except Exception as error:
      _log.error("A question was not answered.", exc_info=error)
      raise _FAILED from error

  async def _accounted(
    self, account: _Account, asked: fields.Asked, index: int
  ) -> AsyncGenerator[events.Event]:
    """Yields the events of one answer, and counts what they cost.

    They are counted even if the client reads none of them.
    """
    told = self._agent.stream_async(
      asked.question,
      budget=asked.budget,
      seed=asked.seed + index,
      deadline=asked.deadline,
      max_tokens=asked.max_tokens,
    )
    async with contextlib.aclosing(told):
      async for event in told:
        match event:
          case events.Budget(used=0):
            account.begun += 1
          case events.Searching():
            account.searches += 1
          case events.Answer(reply):
            self._ended(account, reply)
        yield event

  def _ended(self, account: _Account, reply: events.Reply) -> None:
    account.replies.append(reply)
    trajectory = reply.trajectory
    self._metrics.ended(
      str(reply.outcome),
      searches=reply.searches,
      tokens=reply.tokens,
      turns=sum(s.author is types.Author.MODEL for s in trajectory.spans),
    )

  @contextlib.contextmanager
  def _account(self, route: str) -> Iterator[_Account]:
    """Opens the account of a request and closes it if the request fails.

    A response that streams closes its account itself, at its end.
    """
    account = _Account(route)
    try:
      yield account
    except errors.RequestError as error:
      self._close(account, error.status)
      raise
    except asyncio.CancelledError:
      self._close(account, 499)
      raise
    except Exception:
      self._close(account, 500)
      raise
    if account.asked is None or not account.asked.stream:
      self._close(account, 200)

  def _close(self, account: _Account, status: int) -> None:
    account.ends.close()
    seconds = time.monotonic() - account.started
    self._metrics.responded(account.route, status, seconds)
    asked = account.asked
    line: dict[str, Any] = {
      "request": account.id,
      "route": account.route,
      "status": status,
      "key": account.key,
      "seconds": round(seconds, 3),
      "budget": asked.budget if asked else None,
      "searches": account.searches,
      "tokens": account.tokens,
      "outcomes": [str(reply.outcome) for reply in account.replies],
    }
    if self._log_questions and asked:
      line["question"] = asked.question
    _log.info(json.dumps(line))

  async def _admitted(
    self, request: requests.Request, account: _Account
  ) -> Any:
    """Checks the key and returns the JSON of the body."""
    if self.draining:
      raise _STOPPING
    key = self._key(request)
    account.key = key.name if key else ""
    return await _read(request)

  def _key(self, request: requests.Request) -> keys.Key | None:
    if self._guard is None:
      return None
    return self._guard.key(request.headers.get("authorization"))

  def _begin(self, account: _Account, asked: fields.Asked) -> fields.Asked:
    """Charges the key and counts the request until it ends."""
    if self._running + asked.choices > self._most:
      raise errors.RequestError(
        503,
        f"Found {self._running} questions under way, expected at most "
        f"{self._most}; ask later.",
        retry_after=5,
      )
    if self._guard is not None:
      key = next(k for k in self._guard.keys if k.name == account.key)
      grant = account.ends.enter_context(
        self._guard.admitted(
          key,
          searches=asked.budget * asked.choices,
          tokens=asked.max_tokens * asked.choices,
        )
      )
      account.ends.callback(
        lambda: grant.used(account.searches, account.most_tokens)
      )
    self._count(asked.choices)
    account.ends.callback(self._count, -asked.choices)
    account.asked = asked
    return asked

  def _count(self, more: int) -> None:
    self._running += more
    self._metrics.running.set(self._running)

  def _stream(
    self, account: _Account, chunks: AsyncGenerator[bytes]
  ) -> fastapi.Response:
    return streaming.EventStream(
      chunks,
      on_end=lambda complete: self._close(
        account, account.status if complete else 499
      ),
    )


def create_app(service: Service) -> fastapi.FastAPI:
  """Returns the ASGI app of a service."""
  app = fastapi.FastAPI(title="AnySearch", docs_url=None, redoc_url=None)
  app.state.service = service

  @app.exception_handler(errors.RequestError)
  async def refused(_: Any, error: errors.RequestError) -> fastapi.Response:
    return _json(error.body(), error.status, error.headers)

  @app.exception_handler(exceptions.HTTPException)
  async def unknown(
    _: Any, error: exceptions.HTTPException
  ) -> fastapi.Response:
    sentence = f"{error.detail}; the paths are in GET /openapi.json."
    told = errors.RequestError(error.status_code, sentence)
    return _json(told.body(), told.status)

  @app.exception_handler(Exception)
  async def failed(_: Any, error: Exception) -> fastapi.Response:
    _log.error("A request was not answered.", exc_info=error)
    return _json(_FAILED.body(), _FAILED.status)

  static_page.add(app)

  @app.post("/v1/responses")
  async def responses(request: fastapi.Request) -> fastapi.Response:
    return await service.responses(request)

  @app.post("/v1/chat/completions")
  async def chat(request: fastapi.Request) -> fastapi.Response:
    return await service.chat(request)

  @app.get("/v1/models")
  async def models(request: fastapi.Request) -> fastapi.Response:
    return service.models(request)

  @app.get("/examples")
  async def examples() -> fastapi.Response:
    return service.examples()

  @app.get("/health")
  async def health() -> fastapi.Response:
    return service.health()

  @app.get("/metrics")
  async def metrics(request: fastapi.Request) -> fastapi.Response:
    return service.metrics(request)

  return app


def _raise_failed(replies: list[events.Reply]) -> None:
  """Raises 503 if an outage failed an episode; clients then try again."""
  for reply in replies:
    if reply.outcome is types.Outcome.FAILED:
      raise errors.RequestError(
        503, reply.reason, code="unavailable", retry_after=1
      )


async def _drained(chunks: AsyncGenerator[bytes]) -> None:
  async for _ in chunks:
    pass


async def _read(request: requests.Request) -> Any:
  """Returns the JSON of a request's body."""
  body = bytearray()
  try:
    async with asyncio.timeout(_BODY_SECONDS):
      async for chunk in request.stream():
        body += chunk
        if len(body) > _BODY:
          raise errors.RequestError(
            413, f"The request has more than {_BODY} bytes; send less."
          )
  except TimeoutError as error:
    raise errors.RequestError(
      408, f"The body took more than {_BODY_SECONDS:g} seconds."
    ) from error
  except requests.ClientDisconnect as error:
    raise _GONE from error
  try:
    return json.loads(body)
  except (ValueError, RecursionError) as error:
    raise errors.RequestError(
      400, f"The body is no JSON ({error}); expected an object."
    ) from error


def _json(
  value: Any, status: int = 200, headers: dict[str, str] | None = None
) -> fastapi.Response:
  # The strings of a policy may hold half a surrogate pair; ASCII escapes it.
  return fastapi.Response(
    json.dumps(value), status, headers, "application/json"
  )
