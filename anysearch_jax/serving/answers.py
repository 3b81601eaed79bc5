"""Asks the agent for all answers to a request, and counts what they cost."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.agent import background, events, limits, mailbox
from anysearch_jax.serving import (
  accounts,
  errors,
  fields,
  service_metrics,
  streaming,
)

_log = logging.getLogger(__name__)
FAILED = errors.RequestError(500, "The server failed; its log says more.")
STOPPING = errors.RequestError(
  503, "The service stops; ask another one, or later.", retry_after=1
)


class Answers:
  """The answers of an agent.

  Its methods raise `errors.RequestError` if there is no place, the service
  stops, or for a bug. Cancelling them cancels the episodes.

  Args:
    agent: answers the questions.
    metrics: counts episodes.
  """

  def __init__(self, agent: agent_lib.Agent, metrics: service_metrics.Metrics):
    self._agent, self._metrics = agent, metrics

  async def collect(
    self, account: accounts.Account, asked: fields.Asked
  ) -> list[list[events.Event]]:
    """Returns the events of each answer.

    They are collected in the agent's thread and handed over at the end.
    """
    told: list[list[events.Event]] = [[] for _ in range(asked.choices)]
    await self._ask(account, asked, lambda i, event: told[i].append(event))
    return told

  async def stream(
    self, account: accounts.Account, asked: fields.Asked
  ) -> AsyncGenerator[tuple[int, events.Event] | None]:
    """Yields an answer's index and event as it comes; None after a silence."""
    told: mailbox.Mailbox[tuple[int, events.Event] | None] = mailbox.Mailbox()
    asking = asyncio.ensure_future(
      self._ask(
        account, asked, lambda i, event: told.put((i, event)), pieces=True
      )
    )
    asking.add_done_callback(lambda _: told.put(None))
    try:
      while True:
        taken = await told.take(streaming.HEARTBEAT_SECONDS)
        if not taken:
          yield None
        for each in taken:
          if each is None:
            await asking
            return
          yield each
    finally:
      asking.cancel()
      await asyncio.gather(asking, return_exceptions=True)

  async def _ask(
    self,
    account: accounts.Account,
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
    except limits.BusyError as error:
      raise errors.RequestError(503, str(error), retry_after=5) from error
    except background.ClosedError as error:
      raise STOPPING from error
    except Exception as error:
      _log.error("A question was not answered.", exc_info=error)
      raise FAILED from error
    finally:
      for each in asking:
        each.cancel()

  def _tell(
    self,
    account: accounts.Account,
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
