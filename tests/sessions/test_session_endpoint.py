"""The endpoint of a training over HTTP, with OpenAI's client and without."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import resource
import socket
import threading

import fake_sessions
import httpx2
import openai
import pytest
from fake_sessions import KEY, Session, Sessions, listening
from waits import wait_for

from anysearch_jax import types
from anysearch_jax.host import loop, openai_replies
from anysearch_jax.sessions import turns

USER = {"role": "user", "content": "Who wrote Emma?"}
CHAT = {"model": "gpt-5", "messages": [USER]}
RESPONSE = {"model": "gpt-5", "input": "Who wrote Emma?"}
FUNCTION = {"name": "search", "parameters": {"type": "object"}}
BOTH = {"v1/chat/completions": CHAT, "v1/responses": RESPONSE}
HEADERS = {"authorization": f"Bearer {KEY}"}


def client_of(url, session="a", key=KEY, **settings):
  return openai.OpenAI(
    base_url=f"{url}/sessions/{session}/v1", api_key=key, **settings
  )


def post(url, path, body, *, session="a", headers=HEADERS):
  content = body if isinstance(body, bytes) else json.dumps(body).encode()
  return httpx2.post(
    f"{url}/sessions/{session}/{path}",
    content=content,
    headers=headers,
    timeout=60,
  )


@pytest.fixture
def played():
  """Yields an address, its sessions and the one named "a"."""
  session = Session()
  sessions = Sessions(a=session)
  with listening(sessions) as (url, _):
    yield url, sessions, session


def test_chat_client_calls_tools_and_gets_an_answer(played):
  url, _, session = played
  client = client_of(url)
  messages = [USER]
  tools = [{"type": "function", "function": FUNCTION}]
  completion = client.chat.completions.create(
    model="gpt-5", messages=messages, tools=tools
  )
  (choice,) = completion.choices
  assert choice.finish_reason == "tool_calls"
  messages.append(choice.message)
  for call in choice.message.tool_calls:
    result = {"role": "tool", "tool_call_id": call.id, "content": "Jane"}
    messages.append(result)
  completion = client.chat.completions.create(
    model="gpt-5", messages=messages, tools=tools
  )
  assert completion.choices[0].message.content == "Jane"
  assert completion.model == "gpt-5" and completion.usage.total_tokens == 37
  assert [message.role for message in session.requests[-1].messages] == [
    *("user", "assistant", "tool", "tool"),
  ]
  assert session.requests[-1].messages[1] == fake_sessions.CALLS


def test_responses_client_calls_tools_and_gets_an_answer(played):
  url, _, session = played
  client = client_of(url)
  tools = [{"type": "function", "strict": True, **FUNCTION}]
  items = [USER]
  response = client.responses.create(model="gpt-5", input=items, tools=tools)
  items += response.output
  for item in response.output:
    if item.type == "function_call":
      items.append(
        {
          "type": "function_call_output",
          "call_id": item.call_id,
          "output": "Jane",
        }
      )
  response = client.responses.create(model="gpt-5", input=items, tools=tools)
  assert response.output_text == "Jane"
  assert session.requests[-1].messages[1] == fake_sessions.CALLS


def test_streams_add_up_to_the_message(played):
  url, _, _ = played
  client = client_of(url)
  strict = FUNCTION | {"strict": True}
  with client.chat.completions.stream(
    model="gpt-5",
    messages=[USER],
    tools=[{"type": "function", "function": strict}],
    stream_options={"include_usage": True},
  ) as stream:
    completion = stream.get_final_completion()
  message = completion.choices[0].message
  assert message.content == "Let me look." and message.role == "assistant"
  expected = [call.arguments for call in fake_sessions.CALLS.calls]
  calls = message.tool_calls
  assert [call.function.arguments for call in calls] == expected
  assert completion.usage.total_tokens == 37
  with client.responses.stream(
    model="gpt-5", input="Who?", tools=[{"type": "function", **strict}]
  ) as stream:
    response = stream.get_final_response()
  kinds = [item.type for item in response.output]
  assert kinds == ["reasoning", "message", "function_call", "function_call"]
  assert [item.arguments for item in response.output[2:]] == expected


def test_models_are_listed(played):
  url, _, _ = played
  assert [model.id for model in client_of(url).models.list()] == ["tiny"]


def test_reply_and_refusal_carry_the_budget(played):
  url, _, _ = played
  for number, path in enumerate(BOTH):
    reply = post(url, path, BOTH[path])
    assert reply.headers["x-budget-turns-left"] == str(9 - number)
    reply = post(url, path, {})
    assert reply.status_code == 400
    assert reply.headers["x-budget-turns-left"] == str(9 - number)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BOTH)
def test_spent_budget_is_one_request_with_openais_error(path, stream):
  def spent(request):
    raise turns.RefusedError(
      "The session has no tokens left.",
      status=429,
      kind="insufficient_quota",
      code="budget_exhausted",
    )

  session = Session(spent)
  sessions = Sessions(a=session)
  with listening(sessions) as (url, _):
    client = client_of(url, max_retries=3)
    with pytest.raises(openai.RateLimitError, match="no tokens left") as error:
      client.post(
        path[3:], body=BOTH[path] | {"stream": stream}, cast_to=object
      )
  assert error.value.code == "budget_exhausted"
  assert error.value.type == "insufficient_quota"
  assert len(session.requests) == 1
  assert sessions.events == {"budget_exhausted": 1}


@pytest.mark.parametrize(
  ("error", "status", "code"),
  [
    (types.EngineError("http://10.9.8.7 is secret"), 503, "engine_error"),
    (ZeroDivisionError("secret"), 500, "endpoint_error"),
  ],
)
def test_failure_is_one_request_and_explained_in_the_log_only(
  caplog, error, status, code
):
  def fails(request):
    raise error

  session = Session(fails)
  sessions = Sessions(a=session)
  with listening(sessions) as (url, _):
    with pytest.raises(openai.InternalServerError) as refused:
      client_of(url).chat.completions.create(**CHAT)
  assert (refused.value.status_code, refused.value.code) == (status, code)
  assert "secret" not in str(refused.value.body)
  assert "secret" in caplog.text and "Session a" in caplog.text
  assert len(session.requests) == 1 and sessions.events == {code: 1}


def test_wrong_key_and_unknown_session_are_refused_alike():
  other = Session(key="sk-session-two")
  sessions = Sessions(a=Session(), b=other)
  bodies = set()
  with listening(sessions) as (url, _):
    for session, authorization in (
      *(("a", None), ("a", ""), ("a", KEY), ("a", "Bearer"), ("a", "Bearer x")),
      *(("a", f"Basic {KEY}"), ("a", f"Bearer {KEY}x"), ("a", "Bearer \xe9")),
      *(("a", "Bearer sk-session-two"), ("b", f"Bearer {KEY}")),
      *(("c", f"Bearer {KEY}"), ("A", f"Bearer {KEY}"), ("", "Bearer x")),
    ):
      headers = {}
      if authorization is not None:
        headers["authorization"] = authorization.encode("latin-1")
      # The body is not read before the key is known.
      for path in ("v1/chat/completions", "outcome", "nothing"):
        reply = post(url, path, b"{", session=session, headers=headers)
        assert reply.status_code == 401
        assert reply.headers["x-should-retry"] == "false"
        assert "x-budget-turns-left" not in reply.headers
        bodies.add(reply.content)
    assert post(url, "v1/responses", RESPONSE).status_code == 200
  (body,) = bodies
  error = json.loads(body)["error"]
  assert error["code"] == "invalid_api_key" and "ended" in error["message"]
  assert sessions.events == {
    "wrong_key": 30,
    "unknown_session": 9,
    "intruded": 36,
  }
  assert other.requests == []


def test_unknown_path_is_refused_with_those_there_are(played):
  url, _, _ = played
  for method, path in (
    *(("GET", "/"), ("GET", "/v1/models"), ("POST", "/sessions/a")),
    *(("GET", "/sessions/a/v1/responses"), ("POST", "/x/sessions/a/outcome")),
    *(("POST", "/sessions/a/v1/embeddings"), ("POST", "/sessions/a/")),
  ):
    reply = httpx2.request(method, url + path, headers=HEADERS)
    assert reply.status_code == 404, path
    assert "v1/chat/completions" in reply.json()["error"]["message"]


def test_program_reports_its_outcome_once(played):
  url, _, session = played
  reply = post(url, "outcome", {"answer": "Jane", "reward": 1})
  assert reply.json() == {"object": "session.outcome"}
  assert session.reports == [turns.Report("Jane", 1.0)]
  again = post(url, "outcome", {})
  assert (again.status_code, again.json()["error"]["code"]) == (409, "ended")
  assert again.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
  ("body", "expected"),
  [
    (b"{}", turns.Report()),
    (b'{"answer": null, "reward": null}', turns.Report()),
    (b'{"answer": "", "reward": -2.5}', turns.Report("", -2.5)),
    (b'{"reward": true}', "reward"),
    (b'{"reward": "1"}', "reward"),
    (b'{"reward": NaN}', "no JSON object"),
    (b'{"reward": 1e999}', ""),
    (b'{"answer": 5}', "answer"),
    (b'{"score": 1}', "score"),
    (b'{"answer": "%b"}' % (b"x" * 200_001), "answer"),
    (b"[]", "no JSON object"),
    (b"", "no JSON object"),
  ],
)
def test_report_is_read_strictly(played, body, expected):
  url, sessions, session = played
  reply = post(url, "outcome", body)
  if isinstance(expected, turns.Report):
    assert session.reports == [expected]
  else:
    assert reply.status_code == 400 and not session.reports
    assert expected in reply.json()["error"]["message"]
    assert sessions.events == {"invalid_request": 1}


def hang_up(url, body, done):
  """Sends a request and closes the connection when `done` says so."""
  port = int(url.rpartition(":")[2])
  text = json.dumps(body).encode()
  head = (
    "POST /sessions/a/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    f"authorization: Bearer {KEY}\r\ncontent-length: {len(text)}\r\n\r\n"
  )
  with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
    connection.sendall(head.encode() + text)
    wait_for(done)


async def never(request):
  await asyncio.Event().wait()


@pytest.mark.parametrize("seconds", [15, 0.01])
@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_cancels_its_turn(monkeypatch, stream, seconds):
  monkeypatch.setattr(openai_replies, "HEARTBEAT_SECONDS", seconds)
  session = Session(never)
  sessions = Sessions(a=session)
  with listening(sessions) as (url, served):
    hang_up(url, CHAT | {"stream": stream}, lambda: session.requests)
    wait_for(lambda: session.cancelled == 1 and not served._running)
  assert sessions.events == {"client_left": 1}
  assert sessions.causes == {"a"}


def test_half_a_body_is_no_turn():
  sessions = Sessions(a=Session())
  with listening(sessions) as (url, served):
    port = int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sender:
      sender.sendall(
        b"POST /sessions/a/v1/responses HTTP/1.1\r\nhost: localhost\r\n"
        b"authorization: Bearer %b\r\ncontent-length: 900\r\n\r\n"
        b'{"input": "Who' % KEY.encode()
      )
      wait_for(lambda: served._running)
    wait_for(lambda: not served._running)
  assert sessions.events == {"client_left": 1}
  assert not sessions["a"].requests


@pytest.mark.parametrize("path", BOTH)
def test_silent_stream_has_comments_that_the_client_ignores(monkeypatch, path):
  monkeypatch.setattr(openai_replies, "HEARTBEAT_SECONDS", 0.02)

  async def slowly(request):
    await asyncio.sleep(0.2)
    return fake_sessions.ANSWER

  async def fails(request):
    await asyncio.sleep(0.1)
    raise types.EngineError("secret")

  sessions = Sessions(a=Session(slowly), b=Session(fails))
  body = BOTH[path] | {"stream": True}
  with listening(sessions) as (url, _):
    reply = post(url, path, body)
    refused = post(url, path, body, session="b")
    if "chat" in path:
      chunks = list(client_of(url).chat.completions.create(**body))
      text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
      assert text == "Jane"
    else:
      *_, last = client_of(url).responses.create(**body)
      assert last.response.output_text == "Jane"
  comment = openai_replies.HEARTBEAT.decode()
  assert reply.headers["content-type"].startswith("text/event-stream")
  assert reply.text.startswith(comment) and reply.text.count(comment) >= 3
  assert '"code": "engine_error"' in refused.text
  assert "secret" not in refused.text
  assert sessions.events == {"engine_error": 1}


def test_session_has_eight_requests_at_a_time():
  go = threading.Event()

  async def waits(request):
    while not go.is_set():
      await asyncio.sleep(0.01)
    return fake_sessions.ANSWER

  sessions = Sessions(a=Session(waits), b=Session())
  with (
    listening(sessions) as (url, served),
    concurrent.futures.ThreadPoolExecutor(8) as pool,
  ):
    replies = [
      pool.submit(post, url, "v1/responses", RESPONSE) for _ in "8" * 8
    ]
    wait_for(lambda: len(sessions["a"].requests) == 8)
    with pytest.raises(openai.RateLimitError, match="8 requests") as refused:
      client_of(url, max_retries=3).responses.create(**RESPONSE)
    assert refused.value.code == "too_many_requests"
    # Another session has its own.
    assert client_of(url, "b").responses.create(**RESPONSE).output
    go.set()
    assert [reply.result().status_code for reply in replies] == [200] * 8
    wait_for(lambda: not served._running)
  assert sessions.events == {"too_many_requests": 1}


def test_body_beyond_the_limit_is_refused_and_not_kept():
  sessions = Sessions(a=Session())
  with listening(sessions) as (url, _):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def chunks():
      for _ in range(50):
        yield b" " * 2**20

    reply = httpx2.post(
      f"{url}/sessions/a/v1/responses", content=chunks(), headers=HEADERS
    )
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
  assert reply.status_code == 413 and "8388608 bytes" in reply.text
  assert sessions.events == {"large_body": 1}
  assert kilobytes < 30_000


@pytest.mark.parametrize("path", BOTH)
def test_large_body_of_errors_is_refused_by_its_first(played, path):
  url, sessions, _ = played
  field = "messages" if "chat" in path else "input"
  items = b"[" + b"7," * 10**6 + b"7]"
  fields = b"".join(b'"%d":1,' % number for number in range(10**5))
  for body in (
    b'{"%b": %b}' % (field.encode(), items),
    b'{"%b": [{"role": "user", "content": %b}]}' % (field.encode(), items),
    b"{%b" % fields + b'"n": 1}',
    b'{"tools": %b, "%b": []}' % (items, field.encode()),
    b'{"stop": %b}' % items,
  ):
    reply = post(url, path, body)
    assert reply.status_code == 400 and len(reply.content) < 2000
  assert sessions.events == {"invalid_request": 5}


def test_turns_under_way_end_when_the_endpoint_closes():
  session = Session(never)
  sessions = Sessions(a=session)
  with (
    concurrent.futures.ThreadPoolExecutor(2) as pool,
    listening(sessions) as (url, served),
  ):
    replies = [
      pool.submit(post, url, path, BOTH[path] | {"stream": "chat" in path})
      for path in BOTH
    ]
    wait_for(lambda: len(session.requests) == 2)
    loop.run(served.close())
    for reply in replies:
      assert reply.result().status_code == 503
      assert reply.result().json()["error"]["code"] == "stopping"
    assert session.cancelled == 2
    with pytest.raises(httpx2.ConnectError):
      post(url, "v1/responses", RESPONSE)


def test_endpoint_says_nothing_and_takes_no_signals(capfd, played):
  url, _, _ = played
  post(url, "v1/responses", RESPONSE)
  assert capfd.readouterr() == ("", "")


def test_log_of_a_served_turn_is_silent(caplog, played):
  caplog.set_level(logging.INFO, "anysearch_jax.sessions")
  url, _, _ = played
  post(url, "v1/responses", RESPONSE)
  assert not [each for each in caplog.records if "sessions" in each.name]
