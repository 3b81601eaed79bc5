"""A server of a fleet: whether it is up, and its turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from anysearch_jax import types
from anysearch_jax.rollout.servers import server as server_lib


class Member:
  """A server and its state; see docs/rollouts.md.

  Args:
    server: the server; it is down until a check finds it ready.

  Attributes:
    name: host and port, in the names of counters.
    is_up: whether it answers and serves the current weights.
    reason: why it does not; "" while it is up.
    turns: the deadlines of its running turns.
    loading: lock for loading weights, and for lending memory.
    needs_check: event that starts a check immediately.
    is_set_aside: whether it is left out until it is restarted.
    missed_lists: number of lists in a row in which the gateway did not name it.
  """

  def __init__(self, server: server_lib.Server):
    self.server = server
    self.name = server.url.partition("://")[2]
    self.is_up = False
    self.reason = "it has not answered yet"
    self.turns: set[asyncio.Timeout] = set()
    self.loading = asyncio.Lock()
    self.needs_check = asyncio.Event()
    self.is_set_aside = False
    self.missed_lists = 0

  def __str__(self) -> str:
    state = "up" if self.is_up else "down"
    return f"{self.server.url} is {state}: {self.reason}"

  @property
  def samples(self) -> bool:
    """Whether new turns may go to it."""
    return self.is_up and not self.missed_lists

  @contextlib.asynccontextmanager
  async def turn(self, deadline: float) -> AsyncIterator[None]:
    """Limits a turn to `deadline` seconds; `cut_turns` may end it earlier.

    Raises:
      server.UnansweredError: the turn was cut.
      types.EngineError: the turn took too long.
    """
    limit = asyncio.timeout(deadline)
    self.turns.add(limit)
    try:
      async with limit:
        yield
    except TimeoutError:
      is_late = limit in self.turns
      kind = types.EngineError if is_late else server_lib.UnansweredError
      raise kind(
        f"{self.server.url}: no turn within {deadline:g} seconds."
      ) from None
    finally:
      self.turns.discard(limit)

  def cut_turns(self) -> None:
    """Ends the running turns; they may move to another server."""
    turns = self.turns
    self.turns = set()
    for limit in turns:
      if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())
