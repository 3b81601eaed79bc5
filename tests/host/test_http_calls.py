"""Calls to services that are slow, busy, dying or dead, by a retriever."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import json
import math
import threading

import fake_retriever as fake
import pytest

from anysearch_jax import types
from anysearch_jax.host import http_calls
from anysearch_jax.retrieval import http_retriever


@pytest.fixture
def connect():
  with fake.clients() as start:
    yield start


@pytest.mark.parametrize(
  "how", [fake.broken, *map(fake.status, (408, 502, 503, 504))]
)
def test_transient_failure_is_retried_a_bounded_number_of_times(connect, how):
  retriever = connect(fake.fails_first(2, how))
  asked = fake.ask("a")
  assert asyncio.run(retriever.search(asked)) == fake.truth(asked)
  assert retriever.counters["retries"] == 2
  assert retriever.counters["failures"] == 0
  retriever = connect(fake.fails_first(3, how))
  assert "tried 3 times" in fake.failure(retriever)
  assert len(retriever.sent) == 3
  assert retriever.counters["failures"] == 1


@pytest.mark.parametrize("number", [301, 400, 401, 403, 404, 405, 422])
def test_permanent_failure_is_not_retried(connect, number):
  retriever = connect(
    fake.status(number, '{"detail": "No."}', location="http://elsewhere.test")
  )
  assert fake.failure(retriever) == f"{fake.URL}/retrieve: HTTP {number}: No."
  assert len(retriever.sent) == 1


def test_retry_after_is_a_number_or_a_date():
  assert http_calls.retry_after({"retry-after": "7"}) == 7
  now = datetime.datetime.now(datetime.UTC)
  later = email.utils.format_datetime(now + datetime.timedelta(minutes=1))
  assert 50 < http_calls.retry_after({"retry-after": later}) <= 60
  earlier = email.utils.format_datetime(now - datetime.timedelta(minutes=1))
  for text in (earlier, "", "soon", "nan", "inf", "-3", "1e999"):
    assert http_calls.retry_after({"retry-after": text}) == 0


@pytest.mark.parametrize(
  "settings",
  [{"deadline": 0}, {"retries": -1}, {"concurrency": 0}, {"pause": math.nan}],
  ids=str,
)
def test_invalid_patience_is_refused_by_name(settings):
  (name,) = settings
  with pytest.raises(ValueError, match=f"{name}: found"):
    http_calls.Patience(**settings)


def test_slow_server_fails_at_the_deadline(connect):
  async def handler(request):
    await asyncio.sleep(30)

  retriever = connect(
    handler, patience=http_calls.Patience(deadline=0.1, concurrency=1), batch=1
  )
  # The second is sent when the first has ended, and then has its own time.
  for each in fake.search(retriever, fake.ask("a"), fake.ask("b")):
    assert "no whole answer within 0.1 seconds" in str(each)
  assert retriever.counters["requests"] == 2


async def test_cancelled_search_closes_its_call(connect):
  cancelled = threading.Event()

  async def handler(request):
    if json.loads(request.content)["queries"] == ["slow"]:
      try:
        await asyncio.sleep(60)
      except asyncio.CancelledError:
        cancelled.set()
        raise
    return fake.search_r1(request)

  retriever = connect(handler, patience=http_calls.Patience(concurrency=1))
  with pytest.raises(TimeoutError):
    async with asyncio.timeout(0.05):
      await retriever.search(fake.ask("slow"))
  fast = fake.ask("fast")
  assert await retriever.search(fast) == fake.truth(fast)
  assert cancelled.wait(60)
  assert retriever.counters["failures"] == 0


def test_closing_fails_running_searches(connect):
  async def handler(request):
    await asyncio.sleep(60)

  retriever = connect(handler)

  async def close():
    waiting = asyncio.create_task(retriever.search(fake.ask("a")))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(retriever.close)
    return await waiting

  with pytest.raises(types.RetrievalError, match="was closed"):
    asyncio.run(close())
  assert "was closed" in fake.failure(retriever)


async def _die_in_the_body(writer):
  writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
  await writer.drain()


async def _hang_in_the_body(writer):
  await _die_in_the_body(writer)
  await asyncio.sleep(60)


async def _talk_nonsense(writer):
  writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
  await writer.drain()


async def _never_stop(writer):
  writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
  with contextlib.suppress(ConnectionError):
    while True:
      writer.write(b"1000\r\n" + b"[" * 4096 + b"\r\n")
      await writer.drain()


@pytest.mark.parametrize(
  ("talk", "tries", "sentence"),
  [
    (_hang_in_the_body, 1, "no whole answer within 0.5 seconds"),
    (_die_in_the_body, 2, "tried 2 times, the last met RemoteProtocolError"),
    (fake.die_at_once, 2, "tried 2 times, the last met RemoteProtocolError"),
    (_talk_nonsense, 2, "tried 2 times, the last met RemoteProtocolError"),
    (_never_stop, 1, "more than 100000 bytes"),
  ],
  ids=lambda value: getattr(value, "__name__", None),
)
def test_broken_connection_is_an_error(talk, tries, sentence):
  with fake.listening(talk) as url:
    patience = http_calls.Patience(deadline=0.5, retries=1, pause=0.001)
    how = {"largest": 100_000, "patience": patience}
    retriever = http_retriever.HttpRetriever(url, **how)
    assert sentence in fake.failure(retriever)
    assert retriever.counters["requests"] == tries
    retriever.close()
