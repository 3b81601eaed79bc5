"""The search service under load, delays and failures."""

from __future__ import annotations

import asyncio

import held_search
import served


def test_full_queue_refuses_until_it_has_space():
  async def scenario(client, search):
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
    assert (
      await client.post("/retrieve", json={"queries": ["c"]})
    ).status_code == 200

  served.play(scenario, queries=2, queue=2)


def test_late_answer_is_an_error_and_the_next_is_not():
  async def scenario(client, search):
    search.free.clear()
    body = {"queries": ["a"]}
    responses = await asyncio.gather(
      *(client.post("/retrieve", json=body) for _ in range(3))
    )
    for response in responses:
      served.refused(response, 504, "No answer within 0.5 seconds")
    assert client.app.state.service.batcher.waiting == 0
    health = await client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "stuck")
    search.free.set()
    while client.app.state.service.batcher.busy:
      await asyncio.sleep(0.001)
    assert (await client.get("/health")).status_code == 200
    return await client.post("/retrieve", json=body)

  assert served.play(scenario, deadline=0.5).status_code == 200


def test_failing_index_is_an_error_and_the_server_continues():
  async def scenario(client, search):
    search.wrong["poison"] = RuntimeError("secret path")
    response = await client.post("/retrieve", json={"queries": ["poison"]})
    served.refused(response, 500, "The search failed (RuntimeError)")
    assert "secret" not in response.text
    return await client.post("/retrieve", json={"queries": ["a"]})

  assert served.play(scenario).status_code == 200


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


def test_a_client_that_leaves_frees_its_place():
  async def scenario(client, search):
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
    return (await client.get("/metrics")).text

  search = held_search.HeldSearch()
  text = served.play(scenario, search=search)
  assert 'retrieval_requests_total{route="/retrieve",status="499"} 1.0' in text
  assert [queries for queries, _ in search.calls] == [["a"], ["d"]]


def test_a_client_that_leaves_within_the_body_is_not_searched_for():
  async def scenario(client, search):
    messages = asyncio.Queue()
    messages.put_nowait(body_of(b'{"queries": ["a"]}', more=True))
    messages.put_nowait(LEFT)
    start, _ = await connect(client.app, messages)
    assert start["status"] == 499
    return await client.post("/retrieve", json={"queries": ["b"]})

  search = held_search.HeldSearch()
  assert served.play(scenario, search=search).status_code == 200
  assert [queries for queries, _ in search.calls] == [["b"]]


def test_draining_service_answers_and_then_ends_open_requests():
  async def scenario(client, search):
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

  served.play(scenario)
