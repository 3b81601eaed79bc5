"""Streams and collected answers: silence, separators, clients that left."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time

import httpx2
import openai
import pytest
import scripted
from scripted import answer, search
from scripted_agent import EMMA, wait_for
from served_agent import CONFIG, served

from anysearch_jax import types
from anysearch_jax.agent import events
from anysearch_jax.serving import fields, keys, service, wire

QUESTION = {"input": "Who wrote Emma?", "max_tool_calls": 2}


def told_by(text):
  """Returns the JSON of each event of a stream."""
  return [
    json.loads(line[6:])
    for line in text.splitlines()
    if line.startswith("data: {")
  ]


def plain(response):
  """Returns a response without what differs from request to request."""
  left = {k: v for k, v in response.items() if k not in ("id", "created_at")}
  left["output"] = [
    {k: v for k, v in item.items() if k != "id"} for item in left["output"]
  ]
  left["anysearch"] = left["anysearch"] | {"seconds": 0}
  return left


def test_passage_without_room_is_no_source_and_no_citation():
  long = types.Passage("8", "Long", "x" * 20_000)
  retriever = scripted.Retriever({"emma": [EMMA], "long": [long]})
  turns = (search("emma"), search("long"), answer("Jane"))
  with served(
    engine=scripted.Engine(lambda request: turns[request.turn]),
    retriever=retriever,
    config=dataclasses.replace(CONFIG, answer_room=100),
  ) as (url, _):
    response = httpx2.post(f"{url}/v1/responses", json=QUESTION).json()
    chat = {"messages": [{"role": "user", "content": "Who?"}]}
    found = httpx2.post(f"{url}/v1/chat/completions", json=chat).json()
  calls = [i for i in response["output"] if i["type"] == "web_search_call"]
  assert [len(call["action"]["sources"]) for call in calls] == [1, 0]
  cited = response["output"][-1]["content"][0]["annotations"]
  assert [each["url"] for each in cited] == ["urn:passage:7"]
  shown = response["anysearch"]["documents"]
  assert [[d["id"] for d in documents] for documents in shown] == [["7"], []]
  (choice,) = found["choices"]
  assert [
    each["url_citation"]["url"] for each in choice["message"]["annotations"]
  ] == ["urn:passage:7"]
  assert choice["anysearch"]["documents"] == shown


@pytest.fixture
def impatient(monkeypatch):
  monkeypatch.setattr(service, "HEARTBEAT_SECONDS", 0.05)


def test_silent_stream_has_comments_that_the_official_client_ignores(impatient):
  with served(retriever=scripted.Retriever(seconds=0.4)) as (url, _):
    text = httpx2.post(
      f"{url}/v1/responses", json=QUESTION | {"stream": True}
    ).text
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    told = list(
      client.responses.create(model="tiny", input="Who?", stream=True)
    )
    chunks = list(
      client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Who?"}],
        stream=True,
      )
    )
  beat = wire.HEARTBEAT.decode()
  before, _, _ = text.partition("response.web_search_call.completed")
  assert before.count(beat) >= 3
  assert text.replace(beat, "").count(": still") == 0
  assert [each.sequence_number for each in told] == list(range(len(told)))
  assert told[-1].response.output_text == "Jane"
  assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("mark", ["\u2028", "\x85", "\ud800", "\r"])
def test_no_character_of_a_policy_ends_a_line_of_a_stream(mark):
  policy = scripted.Engine(lambda _: f"a{mark}b<answer>c{mark}d</answer>")
  with served(engine=policy) as (url, _):
    sent = QUESTION | {"stream": True}
    with httpx2.stream("POST", f"{url}/v1/responses", json=sent) as response:
      lines = list(response.iter_lines())
    collected = httpx2.post(f"{url}/v1/responses", json=QUESTION).json()
  told = told_by("\n".join(lines))
  final = told[-1]["response"]
  assert final["output"][-1]["content"][0]["text"] == f"c{mark}d"
  assert plain(final) == plain(collected)


def account(**values):
  asked = fields.Asked(
    *("Who?", "tiny"),
    budget=3,
    max_tokens=100,
    seed=1,
    deadline=9,
    stream=False,
  )
  return keys.Account("responses", asked=asked, **values)


def test_nothing_is_used_after_the_end_of_a_request():
  mine = account()
  mine.tell(events.Budget(0, 3))
  mine.tell(events.Searching(1, "emma"))
  mine.close()
  assert mine.used() == (1, 100)
  for event in (events.Searching(2, "again"), events.Budget(0, 3)):
    with pytest.raises(keys.EndedError):
      mine.tell(event)


def test_clients_that_leave_at_any_moment_pay_for_every_search(tmp_path):
  """The key is charged at least what the retriever was asked."""
  path = tmp_path / "keys.json"
  key = keys.add(path, "alice")
  listed = json.loads(path.read_text())
  listed["alice"]["requests"] = 64
  path.write_text(json.dumps(listed))
  guard = keys.Guard(keys.read(path), tmp_path / "used.sqlite")
  retriever = scripted.Retriever(seconds=0.003)
  engine = scripted.Engine(lambda request: search(f"q{request.turn}"))
  with served(
    engine=engine, retriever=retriever, guard=guard, slots=16, most=100
  ) as (url, service):
    port = int(url.rpartition(":")[2])

    def leave(i):
      body = json.dumps(
        {"input": f"Who {i}?", "max_tool_calls": 5, "stream": i % 2 == 0}
      ).encode()
      head = (
        "POST /v1/responses HTTP/1.1\r\nhost: x\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
      )
      with socket.create_connection(("127.0.0.1", port), timeout=10) as each:
        each.sendall(head.encode() + body)
        time.sleep(0.002 * (i % 10))

    threads = [threading.Thread(target=leave, args=[i]) for i in range(30)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(30)
    wait_for(lambda: service._running == 0)
  (known,) = guard.keys
  searches, tokens = guard.used(known)
  assert len(retriever.requests) <= searches <= 30 * 5
  assert tokens <= 30 * 2000
  guard.close()
