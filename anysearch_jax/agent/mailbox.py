"""Hands what one thread tells to the event loop of another."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Mailbox(Generic[_T]):
  """Items from any thread for one reader in the running event loop.

  Waking an event loop from another thread costs a system call, so a reader that
  was woken takes all that has arrived.
  """

  def __init__(self) -> None:
    self._loop = asyncio.get_running_loop()
    self._items: collections.deque[_T] = collections.deque()
    self._arrived = asyncio.Event()
    self._woken = False

  def put(self, item: _T) -> None:
    """Adds an item; may be called from any thread."""
    self._items.append(item)
    if not self._woken:
      self._woken = True
      with contextlib.suppress(RuntimeError):  # The reader's loop is closed.
        self._loop.call_soon_threadsafe(self._arrived.set)

  async def take(self, seconds: float | None = None) -> list[_T]:
    """Waits for items and returns all of them, in order.

    Args:
      seconds: returns an empty list if nothing arrives in this time.
    """
    try:
      async with asyncio.timeout(seconds):
        while not self._items:
          await self._arrived.wait()
          # Before the items are taken: one that arrives now wakes again.
          self._arrived.clear()
          self._woken = False
    except TimeoutError:
      return []
    return [self._items.popleft() for _ in range(len(self._items))]
