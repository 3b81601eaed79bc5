"""Asks the agent for all answers to a request, and counts what they cost.

An answer is collected, or told as server-sent events until the client leaves:
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import time
from collections.abc import (
  AsyncGenerator,
  Awaitable,
  Callable,
  Coroutine,
  Iterable,
  Mapping,
  Sequence,
)
from typing import Any, Protocol, TypeVar

from starlette import responses

from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.agent import events
from anysearch_jax.host import loop
from anysearch_jax.serving import fields, keys, service_metrics

_log = logging.getLogger(__name__)
FAILED = fields.RequestError(500, "The server failed; its log says more.")
STOPPING = fields.RequestError(
  503, "The service stops; ask another one, or later.", retry_after=1
)
_T = TypeVar("_T")
DONE = b"data: [DONE]\n\n"
# Clients ignore comments; proxies cut a connection that is silent for long.
HEARTBEAT = b": still working\n\n"
HEARTBEAT_SECONDS = 15.0


class Answers:
  """The answers of an agent.

  Its methods raise `fields.RequestError` if there is no place, the service
  stops, or for a bug. Cancelling them cancels the episodes.

  Args:
    agent: answers the questions.
    metrics: counts episodes.
  """

  def __init__(self, agent: agent_lib.Agent, metrics: service_metrics.Metrics):
    self._agent, self._metrics = agent, metrics

  async def collect(
    self, account: keys.Account, asked: fields.Asked
  ) -> list[list[events.Event]]:
    """Returns the events of each answer.

    They are collected in the agent's event loop and handed over at the end.
    """
    told: list[list[events.Event]] = [[] for _ in range(asked.choices)]
    await self._ask(account, asked, lambda i, event: told[i].append(event))
    return told

  async def stream(
    self, account: keys.Account, asked: fields.Asked
  ) -> AsyncGenerator[tuple[int, events.Event] | None]:
    """Yields an answer's index and event as it comes; None after a silence."""
    told: asyncio.Queue[tuple[int, events.Event] | None] = asyncio.Queue()
    put = loop.putting(told)
    asking = asyncio.ensure_future(
      self._ask(account, asked, lambda i, event: put((i, event)), pieces=True)
    )
    asking.add_done_callback(lambda _: put(None))
    try:
      while True:
        try:
          async with asyncio.timeout(HEARTBEAT_SECONDS):
            each = await told.get()
        except TimeoutError:
          yield None
          continue
        if each is None:
          await asking
          return
        yield each
    finally:
      asking.cancel()
      await asyncio.gather(asking, return_exceptions=True)

  async def _ask(
    self,
    account: keys.Account,
    asked: fields.Asked,
    tell: Callable[[int, events.Event], None],
    *,
    pieces: bool = False,
  ) -> None:
    """Asks for all answers at once.

    Args:
      account: counts them.
      asked: the request.
      tell: called with an answer's index and each of its events, in the agent's
        thread.
      pieces: whether reasoning is told while it is sampled.
    """
    asking = [
      asyncio.ensure_future(
        self._agent.ask_async(
          asked.question,
          budget=asked.assigned,
          seed=asked.seed + index,
          deadline=asked.deadline,
          max_tokens=asked.max_tokens,
          sampling=asked.sampling,
          tell=functools.partial(self._tell, account, tell, index),
          pieces=pieces,
        )
      )
      for index in range(asked.choices)
    ]
    try:
      await asyncio.gather(*asking)
    except agent_lib.BusyError as error:
      raise fields.RequestError(503, str(error), retry_after=5) from error
    except agent_lib.ClosedError as error:
      raise STOPPING from error
    except Exception as error:
      _log.error("A question was not answered.", exc_info=error)
      raise FAILED from error
    finally:
      for each in asking:
        each.cancel()

  def _tell(
    self,
    account: keys.Account,
    tell: Callable[[int, events.Event], None],
    index: int,
    event: events.Event,
  ) -> None:
    """Counts an event and tells it, in the agent's thread.

    So it is counted even if the client reads none of it.
    """
    if not (account.heard or isinstance(event, events.Budget)):
      account.heard = True
      self._metrics.first_event.observe(time.monotonic() - account.started)
    if isinstance(event, events.Answer):
      reply = event.reply
      self._metrics.ended(
        str(reply.outcome),
        searches=reply.searches,
        tokens=reply.tokens,
        turns=sum(
          span.author is types.Author.MODEL for span in reply.trajectory.spans
        ),
      )
    account.tell(event)
    if (
      account.asked and account.asked.stop and isinstance(event, events.Answer)
    ):
      event = events.Answer(_cut(event.reply, account.asked.stop))
    tell(index, event)


def _cut(reply: events.Reply, stop: Sequence[str]) -> events.Reply:
  """Returns a reply whose answer ends before the first stop text in it."""
  answer = reply.answer or ""
  ends = [at for text in stop if (at := answer.find(text)) >= 0]
  if not ends:
    return reply
  return dataclasses.replace(reply, answer=answer[: min(ends)])


def data(value: Mapping[str, Any]) -> bytes:
  """Returns an event with data only.

  Its JSON is ASCII, because some clients also end lines at other characters
  than newlines, such as U+2028.
  """
  return b"data: %b\n\n" % json.dumps(value).encode()


def named(value: Mapping[str, Any]) -> bytes:
  """Returns an event that has the name of its `type`."""
  return b"event: %b\n%b" % (value["type"].encode(), data(value))


class Writer(Protocol):
  """Turns an agent's events into the values of an API's stream.

  last: sent after the last value; empty for none.
  """

  last: bytes

  def framed(self, value: Mapping[str, Any]) -> bytes:
    """Returns a value as an event."""
    ...

  def begin(self) -> Iterable[Mapping[str, Any]]:
    """Yields the values before the first event."""
    ...

  def write(
    self, index: int, event: events.Event
  ) -> Iterable[Mapping[str, Any]]:
    """Yields the values of an event of the answer with this index."""
    ...

  def end(self) -> Iterable[Mapping[str, Any]]:
    """Yields the values after the last event."""
    ...

  def refused(self, error: fields.RequestError) -> Mapping[str, Any]:
    """Returns the value of an error that ends the stream."""
    ...


class EventStream(responses.Response):
  """Sends chunks as they come, until they end or the client leaves.

  Args:
    chunks: are closed in both cases.
    on_end: called once, with whether all chunks were sent.
  """

  def __init__(
    self, chunks: AsyncGenerator[bytes], *, on_end: Callable[[bool], None]
  ):
    super().__init__(
      headers={"cache-control": "no-store", "x-accel-buffering": "no"},
      media_type="text/event-stream",
    )
    del self.headers["content-length"]
    self._chunks, self._on_end = chunks, on_end

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    complete = False
    try:
      await unless_gone(receive, self._send(send))
      complete = True
    except fields.RequestError:
      pass  # The client left; nobody reads an error.
    finally:
      self._on_end(complete)

  async def _send(self, send: Any) -> None:
    await send(
      {
        "type": "http.response.start",
        "status": self.status_code,
        "headers": self.raw_headers,
      }
    )
    async with contextlib.aclosing(self._chunks) as chunks:
      async for chunk in chunks:
        await send(
          {"type": "http.response.body", "body": chunk, "more_body": True}
        )
    await send({"type": "http.response.body", "body": b""})


async def unless_gone(
  receive: Callable[[], Awaitable[Mapping[str, Any]]],
  work: Coroutine[Any, Any, _T],
) -> _T:
  """Runs `work`, and cancels it if the client leaves.

  Raises:
    fields.RequestError: 499, the client left.
  """
  working = asyncio.ensure_future(work)
  gone = asyncio.ensure_future(_departed(receive))
  gone.add_done_callback(lambda _: working.cancel())
  try:
    return await working
  except asyncio.CancelledError:
    if gone.done() and not gone.cancelled():
      raise fields.RequestError(499, "The client left.") from None
    raise
  finally:
    gone.cancel()


async def _departed(
  receive: Callable[[], Awaitable[Mapping[str, Any]]],
) -> None:
  """Waits until the client has disconnected."""
  while (await receive())["type"] != "http.disconnect":
    pass
