"""Sessions whose turns are given, behind the endpoint of a training."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import inspect

from anysearch_jax.host import loop
from anysearch_jax.sessions import endpoint, turns

KEY = "sk-session-one"
ANSWER = turns.Message("assistant", "Jane")
CALLS = turns.Message(
  "assistant",
  "Let me look.",
  calls=(
    turns.Call("call_1", "search", '{"query": "emma"}'),
    turns.Call("call_2", "search", '{"query": "austen"}'),
  ),
  reasoning="Who wrote it?",
)


def answered(request):
  """Calls tools first, if there are some, and answers when they did."""
  last = request.messages[-1]
  return CALLS if request.tools and last.role != "tool" else ANSWER


class Session:
  """A session that plays `script`, a function from a request to a message.

  It may return an awaitable, or a whole `TurnReply`.
  """

  def __init__(self, script=answered, key=KEY):
    self.key = key
    self.requests = []
    self.reports = []
    self.cancelled = 0
    self._script = script

  def budget_headers(self):
    return {"x-budget-turns-left": str(10 - len(self.requests))}

  async def turn(self, request):
    self.requests.append(request)
    try:
      reply = self._script(request)
      if inspect.isawaitable(reply):
        reply = await reply
    except asyncio.CancelledError:
      self.cancelled += 1
      raise
    if isinstance(reply, turns.TurnReply):
      return reply
    return turns.TurnReply(
      reply, is_cut=False, prompt_tokens=30, written_tokens=7, cached_tokens=20
    )

  def report(self, report):
    if self.reports:
      raise turns.RefusedError(
        "The session has ended.", status=409, code="ended"
      )
    self.reports.append(report)


class Sessions(dict):
  """Sessions by their ids; `events` counts what the endpoint notes.

  `causes` has the ids of the sessions whose programs caused the events.
  """

  def __init__(self, **sessions):
    super().__init__(sessions)
    self.events = collections.Counter()
    self.causes = set()

  def find(self, session_id):
    return self.get(session_id)

  def note(self, event, session_id=""):
    self.events[event] += 1
    self.causes.add(session_id)

  def intruded(self, key):
    self.events["intruded"] += 1


@contextlib.contextmanager
def listening(sessions, **settings):
  """Yields the address of an endpoint in the event loop, and the endpoint."""
  served = endpoint.Endpoint(sessions, model="tiny", **settings)
  url = loop.run(served.open("127.0.0.1"))
  try:
    yield url, served
  finally:
    loop.run(served.close())
