"""The mailbox: order, batches, silence, many threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

from anysearch_jax.agent import mailbox


def test_items_that_arrived_are_taken_at_once_and_in_order():
  async def main():
    told = mailbox.Mailbox()
    for i in range(3):
      told.put(i)
    first = await told.take()
    told.put(3)
    return first, await told.take()

  assert asyncio.run(main()) == ([0, 1, 2], [3])


def test_silence_is_an_empty_list_and_loses_nothing():
  async def main():
    told = mailbox.Mailbox()
    silent = await told.take(0.01)
    threading.Timer(0.05, told.put, ["late"]).start()
    return silent, await told.take(10)

  assert asyncio.run(main()) == ([], ["late"])


def test_no_item_of_many_threads_is_lost_and_a_reader_is_never_stuck():
  threads, each = 8, 500

  async def main():
    told, taken = mailbox.Mailbox(), []
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
      for t in range(threads):
        pool.submit(lambda t=t: [told.put((t, i)) for i in range(each)])
      while len(taken) < threads * each:
        items = await told.take(30)
        assert items
        taken += items
    return taken

  taken = asyncio.run(main())
  for t in range(threads):
    assert [i for who, i in taken if who == t] == list(range(each))


def test_reader_whose_loop_is_closed_is_ignored():
  async def main():
    return mailbox.Mailbox()

  asyncio.run(main()).put("late")
