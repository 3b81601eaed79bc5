"""An event loop of a client's own: what is asked beside its end, ends."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from anysearch_jax import types
from anysearch_jax.host import own_loop


async def nothing():
  pass


def test_what_is_asked_while_the_loop_closes_does_not_wait_for_ever(
  monkeypatch,
):
  loop = own_loop.OwnLoop(nothing)
  closing = threading.Thread(target=loop.close)
  submit = asyncio.run_coroutine_threadsafe

  def after_a_close(coroutine, target):
    if coroutine.__name__ == "sleep":
      closing.start()
      time.sleep(0.2)
    return submit(coroutine, target)

  monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", after_a_close)

  async def asked():
    await asyncio.wait_for(loop.wait(asyncio.sleep(60)), 5)

  with pytest.raises(types.RetrievalError, match="was closed"):
    asyncio.run(asked())
  closing.join(5)
  assert not closing.is_alive()
  with pytest.raises(types.RetrievalError, match="was closed"):
    asyncio.run(asked())
  loop.close()  # Once more does nothing.
