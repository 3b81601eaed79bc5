"""Live searches of a run: services that are slow, or that limit their callers.

The run's own batching asks real retrievers, over connections of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time

import pytest
import web_site

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import http_calls, loop, turns
from anysearch_jax.launch import progress, retrievers
from anysearch_jax.retrieval import recording, web_search
from anysearch_jax.rollout import driver, searching, tool_retrievers


class Service:
  """Acts as SearXNG.

  Attributes:
    latency: maps a query to the seconds of its answer.
    limit: searches that it answers in a second; 0: all.
    first: searches that it refuses before.
    refusals: times of those that it answered by 429.
    answered: times of the others.
    header, status, refusing: of its refusals; their seconds.
  """

  def __init__(self, latency=lambda query: 0.0, limit=0, first=0, header=None):
    self.first, self.status, self.refusing = first, 429, 0.0
    self.latency, self.limit, self.header = latency, limit, header or {}
    self.answered, self.refusals, self.lock = [], [], threading.Lock()

  def admits(self):
    now = time.monotonic()
    with self.lock:
      # The threads of a busy machine take up to 50 ms to start.
      recent = [at for at in self.answered if at > now - 0.95]
      is_well = not self.limit or len(recent) < self.limit
      is_well = is_well and len(self.refusals) >= self.first
      (self.answered if is_well else self.refusals).append(now)
    return is_well

  @contextlib.contextmanager
  def serving(self, **patience):
    """Yields a retriever of it."""

    def search(handler):
      query = handler.path.partition("q=")[2].partition("&")[0]
      if self.admits():
        time.sleep(self.latency(query))
        result = {"url": f"http://w/{query}", "title": "T", "content": "c"}
        status, body, header = 200, {"results": [result]}, {}
      else:
        time.sleep(self.refusing)
        status, body, header = self.status, {"error": "Too many."}, self.header
      web_site.reply(status, json.dumps(body).encode(), **header)(handler)

    with web_site.Site("127.0.0.1") as site:
      site.pages["/search"] = search
      made = web_search.WebRetriever(
        "searxng",
        price=0.0,
        address=site.origin,
        patience=http_calls.Patience(**{"concurrency": 16} | patience),
      )
      try:
        yield made
      finally:
        made.close()


def played(retriever, count, *, deadline):
  """Returns the failures of searches that episodes make at the same time."""
  searcher = searching.BatchingRetriever(retriever, config_lib.SearchConfig())
  parts = driver.EpisodeParts(
    engine=None,
    retriever=searcher,
    config=config_lib.EpisodeConfig(search_deadline=deadline),
    codec=None,
    environment=None,
  )

  async def all_of_them():
    asked = (types.SearchRequest(f"q{i}", 3) for i in range(count))
    return await asyncio.gather(
      *(driver.answer_request(r, parts) for r in asked)
    )

  return [x for x in loop.run(all_of_them()) if not hasattr(x, "passages")]


# Seconds, searches a second, and the deadline of a search.
SIZES = [
  (0.2, 25, 2.0),
  pytest.param(1.0, 5, 30.0, marks=pytest.mark.slow, id="full size"),
]


@pytest.mark.parametrize(("seconds", "limit", "deadline"), SIZES)
def test_searches_wait_for_a_slow_service_without_being_late(
  seconds, limit, deadline
):
  service = Service(lambda query: seconds)
  with service.serving(deadline=deadline) as retriever:
    assert played(retriever, 192, deadline=deadline) == []
  assert len(service.answered) == 192


@pytest.mark.parametrize(("seconds", "limit", "deadline"), SIZES)
def test_a_rate_is_kept_and_reached(seconds, limit, deadline):
  service = Service(lambda query: seconds, limit)
  with service.serving(deadline=deadline, rate=limit) as retriever:
    assert played(retriever, 64, deadline=deadline) == []
  times = service.answered
  # A busy machine delays searches, which the full size hardly notices.
  least, refused = (0.98, 0) if limit == 5 else (0.8, 3)
  rate = (len(times) - 1) / (times[-1] - times[0])
  assert least * limit <= rate <= 1.02 * limit
  assert len(service.refusals) <= refused


@pytest.mark.parametrize(("seconds", "limit", "deadline"), SIZES)
@pytest.mark.parametrize("header", [{}, {"Retry-After": "1"}], ids=str)
def test_a_service_that_asks_to_wait_fails_no_search(
  seconds, limit, deadline, header
):
  service = Service(lambda query: seconds, limit, header=header)
  with service.serving(deadline=deadline) as retriever:
    assert played(retriever, 64, deadline=deadline) == []
    counted = retriever.counters
  assert len(service.answered) == 64
  assert counted["throttled"] == len(service.refusals) > 0
  assert counted["retries"] == counted["failures"] == 0
  assert counted["throttled_seconds"] > 0.5


def test_refusals_are_not_failures_of_the_service():
  service = Service(first=40, header={"Retry-After": "0.01"})
  service.refusing = 0.02  # Longer in all than a search may take.
  limits = {"concurrency": 1, "retries": 0, "deadline": 0.5}
  with service.serving(**limits) as retriever:
    assert played(retriever, 3, deadline=0.5) == []
    assert len(service.refusals) == retriever.counters["throttled"] == 40


@pytest.mark.parametrize(
  ("header", "wait", "sentence"),
  [
    ({"Retry-After": "86400"}, 60.0, "asks to wait for 86400 seconds"),
    ({"Retry-After": "0.1"}, 0.35, "429: Too many."),
  ],
)
def test_a_quota_ends_with_a_sentence(header, wait, sentence):
  service = Service(first=10**9, header=header)
  began = time.monotonic()
  with service.serving(wait=wait) as retriever:
    for _ in range(2):
      (failure,) = played(retriever, 1, deadline=5.0)
      assert sentence in failure.reason and "its quota" not in failure.reason
      assert "must list json" in failure.reason  # The service's advice.
  assert time.monotonic() - began < 8
  assert len(service.refusals) == 1 or wait < 1


def test_a_service_that_answers_again_is_asked_although_it_said_tomorrow():
  service = Service(first=1, header={"Retry-After": "86400"})
  with service.serving(wait=0.2, rate=50) as retriever:
    assert len(played(retriever, 1, deadline=5.0)) == 1
    time.sleep(0.25)
    assert played(retriever, 5, deadline=5.0) == []


def test_a_service_that_refuses_for_now_is_no_longer_a_failing_one():
  service = Service(first=1)
  service.status, service.header = 500, {"Retry-After": "0.2"}

  async def one_and_others(retriever):
    first = asyncio.create_task(retriever.search(types.SearchRequest("a", 3)))
    await asyncio.sleep(0.1)  # It was refused, and waits.
    other = retriever.search(types.SearchRequest("b", 3))
    return await asyncio.gather(first, other)

  with service.serving(retries=0) as retriever:
    assert len(played(retriever, 1, deadline=5.0)) == 1
    time.sleep(0.03)
    service.status, service.first = 429, 2
    assert all(loop.run(one_and_others(retriever)))


def test_a_high_rate_is_no_reason_to_ask_again_at_once():
  service = Service(limit=20)
  with service.serving(rate=1000) as retriever:
    assert played(retriever, 40, deadline=5.0) == []
  assert len(service.refusals) < 75


def test_a_slow_search_holds_no_other(tmp_path):
  service = Service(lambda query: 0.4 * (query == "q0"))
  ended = []

  async def timed(searcher, i):
    await searcher.search(types.SearchRequest(f"q{i}", 3))
    ended.append(i)

  async def all_of_them(searcher):
    await asyncio.gather(*(timed(searcher, i) for i in range(8)))

  with service.serving() as retriever:
    named = retrievers.IdentifiedRetriever(retriever, "w")
    recorded = recording.Recorder(
      named, tmp_path / "log", mode="record", identity="w"
    )
    box = tool_retrievers.Toolbox({"search": recorded})
    for each in (retriever, named, recorded, box):
      ended.clear()
      searcher = searching.BatchingRetriever(each, config_lib.SearchConfig())
      loop.run(all_of_them(searcher))
      assert ended[-1] == 0


def test_a_search_that_gives_up_leaves_its_turn_to_others():
  sent = []

  async def all_of_them():
    gate = turns.Gate(1, 2.0, 9.0, counted)

    async def one(name, seconds):
      async with turns.Limit(5.0, seconds) as limit, gate.slot():
        sent.append((name, await gate.turn(limit)))

    waits = [("a", 9.0), ("late", 0.02), ("b", 9.0), ("c", 9.0)]
    tasks = [asyncio.create_task(one(*each)) for each in waits]
    await asyncio.sleep(0.03)
    tasks[2].cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)

  counted = {}
  *_, late, gone, well = loop.run(all_of_them())
  assert isinstance(late, TimeoutError) and well is None
  assert isinstance(gone, asyncio.CancelledError)
  (_, first), (name, second) = sent
  assert name == "c" and 0.45 < second - first < 0.95


def test_a_run_says_that_its_searches_wait(capsys):
  line = progress.Line(7, unit="rollout")
  with Service().serving(rate=5, concurrency=2) as retriever:
    searcher = searching.BatchingRetriever(retriever, config_lib.SearchConfig())
    with line.reporting_waits(searcher.waits, every=0.1):
      assert played(searcher, 10, deadline=5.0) == []
      assert searcher.waits() == ""
  first, *_ = capsys.readouterr().out.splitlines()
  said = r"rollout 0/7  waits for search: [5-9] queries queued, \d+\.\d/s"
  assert re.fullmatch(said, first)


def test_failures_are_counted_by_their_reasons():
  service = Service(lambda query: 1.5 * query.endswith("7"), first=3)
  with service.serving(wait=0.05, deadline=1.0, concurrency=32) as retriever:
    searcher = searching.BatchingRetriever(retriever, config_lib.SearchConfig())
    failures = played(searcher, 3, deadline=5.0)
    service.first = 0
    time.sleep(0.06)
    failures += played(searcher, 18, deadline=5.0)
  counted = searching.metrics(searcher.counters)
  assert len(failures) == counted["search/failures"] == 5
  assert counted["search/failed_busy"] == 3
  assert counted["search/failed_late"] == 2


def test_a_search_whose_turn_does_not_come_is_not_called_late():
  async def give_up():
    limit = turns.Limit(30.0, 0.02)
    with contextlib.suppress(TimeoutError):
      async with limit:
        with turns.waiting():
          await asyncio.sleep(5)
    return limit.why()

  assert loop.run(give_up()) == "it waited 0 seconds for its turn."
