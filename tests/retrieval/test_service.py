"""The search service from a client's view: answers, limits and metrics."""

from __future__ import annotations

import asyncio
import time

import held_search
import pytest
import served

from anysearch_jax.host import http_server
from anysearch_jax.retrieval.service import dialects


@pytest.mark.parametrize(
  ("values", "request_", "sentence"),
  [
    ({"max_topk": 5}, {"queries": ["a"], "topk": 6}, "1 to 5 passages"),
    ({"max_topk": 5}, {"queries": ["a"], "topk": -1}, "1 to 5 passages"),
    ({"queries": 2}, {"queries": ["a"] * 3}, "3 queries, expected at most 2"),
    (
      {"max_topk": 4, "passages": 8},
      {"queries": ["a"] * 3, "topk": 4},
      "3 queries for 4 passages each, expected at most 8",
    ),
    ({}, b"{", "expected an object"),
  ],
)
def test_requests_beyond_a_limit_are_refused(values, request_, sentence):
  served.refused(served.ask(request_, **values), 422, sentence)


async def test_the_beginning_of_a_long_query_is_searched_and_counted():
  async with served.opened(characters=3) as (client, search):
    body = {"queries": ["abcde", "abc", " " * 4 + "b"], "topk": 1}
    result = (await client.post("/retrieve", json=body)).json()["result"]
    texts = [some and some[0]["text"] for some in result]
    assert texts == ["about abc", "about abc", []]
    lines = (await client.get("/metrics")).text.splitlines()
  assert "retrieval_cut_queries_total 2.0" in lines
  assert "retrieval_blank_queries_total 1.0" in lines


@pytest.mark.parametrize("blank", ["", " ", "\n\t\u2003"])
def test_a_blank_query_has_no_passages(blank):
  result = served.ask({"queries": ["a", blank, "b"]}).json()["result"]
  assert [len(some) for some in result] == [3, 0, 3]


async def test_a_large_body_is_refused_and_not_kept(monkeypatch):
  monkeypatch.setattr(http_server, "_DRAINED_BYTES", 1000)
  sent = []

  async def chunks():
    for _ in range(1000):
      sent.append(1)
      yield b" " * 100

  async with served.opened(body=250) as (client, search):
    served.refused(
      await client.post("/retrieve", content=chunks()), 413, "250 bytes"
    )
    assert len(sent) == 11  # Its client may read only after it has sent.
    whole = b" " * 251
    served.refused(
      await client.post("/retrieve", content=whole), 413, "250 bytes"
    )
    # A client that waits with its body need not send it.
    sent.clear()
    response = await client.post(
      "/retrieve",
      content=chunks(),
      headers={"content-length": "251", "expect": "100-continue"},
    )
    served.refused(response, 413, "250 bytes")
    assert not sent


async def test_search_and_metrics_need_the_token():
  async with served.opened(token="secret") as (client, search):
    for header in (
      *(None, "", "secret", "Bearer", "Bearer wrong", "Bearer secre"),
      *("Bearer secret ", "Basic secret"),
      "Bearer s\u00e9cret".encode("latin-1"),
    ):
      headers = {} if header is None else {"authorization": header}
      # The body is not looked at before the token is.
      response = await client.post("/retrieve", content=b"{", headers=headers)
      served.refused(response, 401, "Authorization: Bearer TOKEN")
      assert response.headers["www-authenticate"] == "Bearer"
      response = await client.get("/metrics", headers=headers)
      served.refused(response, 401, "Authorization: Bearer TOKEN")
    assert (await client.get("/health")).status_code == 200
    right = {"authorization": "Bearer secret"}
    assert (await client.get("/metrics", headers=right)).status_code == 200
    # The scheme is spelled either way.
    right = {"authorization": "bearer secret"}
    body = {"queries": ["a"]}
    found = await client.post("/retrieve", json=body, headers=right)
    assert found.status_code == 200


async def test_health_has_the_identity():
  async with served.opened(topk=5, max_topk=20) as (client, search):
    response = await client.get("/health")
  assert response.status_code == 200
  assert response.json() == {
    **{"status": "ok", "passages": 7, "topk": 5, "max_topk": 20},
    "identity": held_search.HeldSearch.identity,
  }


async def test_metrics_count_requests_queries_and_searches():
  async with served.opened() as (client, search):
    await client.post("/retrieve", json={"queries": ["a", "b", "a"]})
    await client.post("/retrieve", json={"queries": ["a"]})
    await client.post("/retrieve", content=b"{")
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
  for line in (
    'retrieval_requests_total{status="200"} 2.0',
    'retrieval_requests_total{status="422"} 1.0',
    "retrieval_request_seconds_count 3.0",
    "retrieval_queries_total 4.0",
    "retrieval_search_queries_sum 3.0",
    "retrieval_search_queries_count 2.0",
    "retrieval_search_seconds_count 2.0",
    "retrieval_waiting_queries 0.0",
  ):
    assert line in lines


@pytest.mark.parametrize(
  "values, sentence",
  [
    ({"topk": 0}, "topk: found 0, expected more"),
    ({"topk": 9, "max_topk": 8}, "max_topk: found 8"),
    ({"max_topk": 9, "passages": 8}, "passages: found 8, expected max_topk"),
    ({"queries": 9, "queue": 8}, r"queue: found 8, expected queries \(9\)"),
    ({"deadline": float("nan")}, "deadline: found nan"),
  ],
)
def test_invalid_limits_are_refused(values, sentence):
  with pytest.raises(ValueError, match=sentence):
    dialects.Limits(**values)


# Load, delays and failures.


async def test_full_queue_refuses_until_it_has_space():
  async with served.opened(queries=2, queue=2) as (client, search):
    search.free.clear()
    body = {"queries": ["a", "b"]}
    first = asyncio.create_task(client.post("/retrieve", json=body))
    await asyncio.to_thread(search.wait_for_call)
    second = asyncio.create_task(client.post("/retrieve", json=body))
    while client.app.state.service.batcher.waiting < 2:
      await asyncio.sleep(0.001)
    third = await client.post("/retrieve", json={"queries": ["c"]})
    served.refused(third, 429, "holds 2 of at most 2 queries")
    assert int(third.headers["retry-after"]) >= 1
    search.free.set()
    assert (await first).status_code == (await second).status_code == 200
    fourth = await client.post("/retrieve", json={"queries": ["c"]})
    assert fourth.status_code == 200


async def test_late_answer_is_an_error_and_the_next_is_not():
  async with served.opened(deadline=0.5) as (client, search):
    search.free.clear()
    body = {"queries": ["a"]}
    responses = await asyncio.gather(
      *(client.post("/retrieve", json=body) for _ in range(3))
    )
    for response in responses:
      served.refused(response, 504, "No answer within 0.5 seconds")
    assert client.app.state.service.batcher.waiting == 0
    # The search began a little later than the requests whose time it exceeds.
    health = await client.get("/health")
    async with asyncio.timeout(10):
      while health.status_code == 200:
        await asyncio.sleep(0.01)
        health = await client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "stuck")
    search.free.set()
    while client.app.state.service.batcher.busy:
      await asyncio.sleep(0.001)
    assert (await client.get("/health")).status_code == 200
    assert (await client.post("/retrieve", json=body)).status_code == 200


async def contents(client, queries):
  """Asks as Search-R1 does; returns the passages' lines for each query."""
  body = {"queries": queries, "topk": 3, "return_scores": True}
  results = (await client.post("/retrieve", json=body)).json()["result"]
  texts = [[hit["document"]["contents"] for hit in hits] for hits in results]
  return ["\n".join(some).splitlines() for some in texts]


class Slow(held_search.HeldSearch):
  def search(self, queries, k):
    time.sleep(0.02 * len(queries))
    return super().search(queries, k)


async def test_a_deadline_grows_with_the_queries_of_a_request():
  values = {"deadline": 0.2, "per_query": 0.3, "batch": 4}
  async with served.opened(search=Slow(), **values) as (client, search):
    texts = await contents(client, [f"q{i}" for i in range(30)])
  assert len(texts) == 30
  assert all(f"about q{i}" in text for i, text in enumerate(texts))


async def test_failing_index_is_an_error_and_the_server_continues(caplog):
  async with served.opened() as (client, search):
    search.wrong["poison"] = RuntimeError("secret path")
    response = await client.post("/retrieve", json={"queries": ["poison"]})
    served.refused(response, 500, "The search failed (RuntimeError)")
    assert "secret" not in response.text
    name = response.headers["x-request-id"]
    assert name in response.text
    assert f"{name} failed: RuntimeError('secret path')" in caplog.text
    found = await client.post("/retrieve", json={"queries": ["a"]})
    assert found.status_code == 200


async def connect(app, messages):
  """Sends a request to /retrieve over ASGI; returns the app's messages."""
  sent = []

  async def send(message):
    sent.append(message)

  scope = {
    **{"type": "http", "method": "POST", "path": "/retrieve", "headers": []},
    **{"query_string": b"", "root_path": "", "http_version": "1.1"},
  }
  await app(scope, messages.get, send)
  return sent


def body_of(content, *, more=False):
  return {"type": "http.request", "body": content, "more_body": more}


LEFT = {"type": "http.disconnect"}


async def test_a_client_that_leaves_frees_its_place():
  async with served.opened() as (client, search):
    running = client.app.state.service
    search.free.clear()
    first = asyncio.create_task(
      client.post("/retrieve", json={"queries": ["a"]})
    )
    await asyncio.to_thread(search.wait_for_call)
    messages = asyncio.Queue()
    messages.put_nowait(body_of(b'{"queries": ["b", "c"]}'))
    leaving = asyncio.create_task(connect(client.app, messages))
    while running.batcher.waiting < 2:
      await asyncio.sleep(0.001)
    messages.put_nowait(LEFT)
    await leaving
    assert running.batcher.waiting == 0
    search.free.set()
    assert (await first).status_code == 200
    await client.post("/retrieve", json={"queries": ["d"]})
    text = (await client.get("/metrics")).text
  assert 'retrieval_requests_total{status="499"} 1.0' in text
  assert [queries for queries, _ in search.calls] == [["a"], ["d"]]


async def test_a_client_that_leaves_within_the_body_is_not_searched_for():
  async with served.opened() as (client, search):
    messages = asyncio.Queue()
    messages.put_nowait(body_of(b'{"queries": ["a"]}', more=True))
    messages.put_nowait(LEFT)
    start, _ = await connect(client.app, messages)
    assert start["status"] == 499
    found = await client.post("/retrieve", json={"queries": ["b"]})
    assert found.status_code == 200
  assert [queries for queries, _ in search.calls] == [["b"]]


async def test_draining_service_answers_and_then_ends_open_requests():
  async with served.opened() as (client, search):
    running = client.app.state.service
    running.drain(60)
    health = await client.get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == "draining"
    body = {"queries": ["a"]}
    assert (await client.post("/retrieve", json=body)).status_code == 200
    search.free.clear()
    running.drain(0.05)
    cut_off = await client.post("/retrieve", json=body)
    served.refused(cut_off, 503, "stopped before it had")
    closed = await client.post("/retrieve", json=body)
    served.refused(closed, 503, "is stopping")
    assert closed.headers["retry-after"] == "1"
