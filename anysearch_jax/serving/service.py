"""Answers the requests of the HTTP service; `app` has its routes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import (
  AsyncGenerator,
  Iterator,
)
from typing import Any

import fastapi
import prometheus_client
from starlette import requests

from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.agent import background, events
from anysearch_jax.agent import limits as limits_lib
from anysearch_jax.serving import (
  accounts,
  bodies,
  chat_api,
  errors,
  fields,
  keys,
  responses_api,
  service_metrics,
  streaming,
)

_log = logging.getLogger(__name__)
_EXAMPLES = 100
FAILED = errors.RequestError(500, "The server failed; its log says more.")
_STOPPING = errors.RequestError(
  503, "The service stops; ask another one, or later.", retry_after=1
)


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
    return bodies.respond(values, 503 if self.draining else 200)

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
    return bodies.respond({"object": "list", "data": [model]})

  def examples(self) -> fastapi.Response:
    """Returns questions that one can ask; it is empty for real corpora."""
    return bodies.respond([q.text for q in self._agent.examples[:_EXAMPLES]])

  async def responses(self, request: requests.Request) -> fastapi.Response:
    """Answers `POST /v1/responses`."""
    with self._account("responses") as account:
      body = await self._admitted(request, account)
      asked = self._begin(account, responses_api.read(body, self._served))
      writer = responses_api.Writer(asked, self._served)
      if asked.stream:
        return self._stream(account, self._responses_events(writer, account))
      await streaming.unless_gone(
        request.receive, _drained(self._responses_events(writer, account))
      )
      _raise_failed(account.replies)
      return bodies.respond(writer.response)

  async def _responses_events(
    self, writer: responses_api.Writer, account: accounts.Account
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
      await streaming.unless_gone(request.receive, self._collect(account, told))
      _raise_failed(account.replies)
      return bodies.respond(writer.completion(told))

  async def _chat_events(
    self, writer: chat_api.Writer, account: accounts.Account
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
    self, account: accounts.Account, told: list[list[events.Event]]
  ) -> None:
    async with contextlib.aclosing(self._told(account)) as all_told:
      async for index, event in all_told:
        told[index].append(event)

  async def _told(
    self, account: accounts.Account
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
      raise FAILED from error

  async def _accounted(
    self, account: accounts.Account, asked: fields.Asked, index: int
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

  def _ended(self, account: accounts.Account, reply: events.Reply) -> None:
    account.replies.append(reply)
    trajectory = reply.trajectory
    self._metrics.ended(
      str(reply.outcome),
      searches=reply.searches,
      tokens=reply.tokens,
      turns=sum(s.author is types.Author.MODEL for s in trajectory.spans),
    )

  @contextlib.contextmanager
  def _account(self, route: str) -> Iterator[accounts.Account]:
    """Opens the account of a request and closes it if the request fails.

    A response that streams closes its account itself, at its end.
    """
    account = accounts.Account(route)
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

  def _close(self, account: accounts.Account, status: int) -> None:
    account.ends.close()
    seconds = time.monotonic() - account.started
    self._metrics.responded(account.route, status, seconds)
    _log.info(json.dumps(account.line(status, seconds, self._log_questions)))

  async def _admitted(
    self, request: requests.Request, account: accounts.Account
  ) -> Any:
    """Checks the key and returns the JSON of the body."""
    if self.draining:
      raise _STOPPING
    key = self._key(request)
    account.key = key.name if key else ""
    return await bodies.read(request)

  def _key(self, request: requests.Request) -> keys.Key | None:
    if self._guard is None:
      return None
    return self._guard.key(request.headers.get("authorization"))

  def _begin(
    self, account: accounts.Account, asked: fields.Asked
  ) -> fields.Asked:
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
    self, account: accounts.Account, chunks: AsyncGenerator[bytes]
  ) -> fastapi.Response:
    return streaming.EventStream(
      chunks,
      on_end=lambda complete: self._close(
        account, account.status if complete else 499
      ),
    )


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
