"""The engine over chat completions, against a server of known behaviour."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import chat_endpoint
import openai
import pytest
import scripted
from chat_endpoint import Fault, Message

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.agent import events
from anysearch_jax.host import http_calls, loop
from anysearch_jax.rollout import chat_completions, plain_text

PLAIN = plain_text.PlainText()
LEASE = types.Passage("1", "Lease", "It ends in June 2027.")
CONFIG = config_lib.EpisodeConfig(
  max_generated=600, max_context=6000, turn_deadline=10.0, answer_room=100
)
ANSWER = "In June 2027 [1]."


@contextlib.contextmanager
def engine_at(server, mode="tools", **values):
  values = {"model": "scripted", "deadline": 10.0, "concurrency": 4} | values
  sampling = values.pop("sampling", config_lib.SamplingConfig(top_k=20))
  made = chat_completions.ChatEngine(
    server.url, PLAIN, mode=mode, sampling=sampling, **values
  )
  try:
    yield made
  finally:
    made.close()


def ask(server, *, mode="tools", budget=1, config=CONFIG, **values):
  """Asks an agent; returns its reply, its events and its engine."""
  retriever = scripted.Retriever({"lease end": [LEASE]})
  with (
    engine_at(server, mode, **values) as engine,
    agent_lib.Agent(engine, PLAIN, retriever, config=config, slots=1) as agent,
  ):
    told = list(agent.stream("When does the lease end?", budget=budget))
    assert not engine._conversations  # Released.
  reply = told[-1].reply
  assert len(retriever.requests) == reply.searches <= budget
  return reply, told, engine


def of_model(reply):
  """Returns the texts of the model's turns."""
  spans = reply.trajectory.spans
  return [s.text for s in spans if s.author is types.Author.MODEL]


@pytest.mark.parametrize("streamed", [False, True])
def test_openai_client_reads_the_scripted_server(streamed):
  with chat_endpoint.served("reasoning", queries=["when?"], key="k") as server:
    client = openai.OpenAI(base_url=server.url, api_key="k", max_retries=0)
    messages = [{"role": "user", "content": "When does the lease end?"}]
    tool = {"type": "function", "function": {"name": "search"}}
    asked = {"model": "scripted", "messages": messages, "tools": [tool]}
    if streamed:
      with client.chat.completions.stream(**asked) as stream:
        reply = stream.get_final_completion()
    else:
      reply = client.chat.completions.create(**asked)
    assert [m.id for m in client.models.list()] == ["scripted"]
    (call,) = reply.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"query": "when?"}
    assert reply.choices[0].finish_reason == "tool_calls"
    server.faults.append(Fault(429, retry_after="1"))
    with pytest.raises(openai.RateLimitError):
      client.chat.completions.create(**asked)


@pytest.mark.parametrize("streams", [False, True])
def test_episode_is_a_conversation_with_tool_results(streams):
  with chat_endpoint.served("tools", streams=streams) as server:
    reply, _, engine = ask(server)
  assert (reply.answer, reply.searches) == (ANSWER, 1)
  assert of_model(reply) == [
    "<search>lease end</search>",
    f"<answer>{ANSWER}</answer>",
  ]
  first, second = server.asked
  assert first["tools"][0]["function"]["name"] == "search"
  assert "tool_choice" not in first and "stop" not in first
  assert (first["top_k"], second["tool_choice"]) == (20, "none")
  (prompt,) = first["messages"]
  assert prompt["role"] == "user" and "When does the lease" in prompt["content"]
  call = {"name": "search", "arguments": '{"query": "lease end"}'}
  tool_calls = [{"id": "call_0", "type": "function", "function": call}]
  asked = {"role": "assistant", "content": "", "tool_calls": tool_calls}
  assert second["messages"][:2] == [prompt, asked]
  result = second["messages"][2]
  assert (result["role"], result["tool_call_id"]) == ("tool", "call_0")
  assert "It ends in June 2027." in result["content"]
  assert engine.counters["sampled_tokens"] == 14
  assert engine.counters["prompt_tokens"] > 100


def test_model_that_writes_tags_is_stopped_at_them():
  with chat_endpoint.served(
    lambda body: Message(
      "<think>so</think> <search>lease end "
      if len(body["messages"]) == 1
      else f"<think>x</think> <answer> {ANSWER}"
    )
  ) as server:
    reply, *_ = ask(server, mode="tags")
  assert (reply.answer, reply.searches) == (ANSWER, 1)
  assert server.asked[0]["stop"] == ["</search>", "</answer>"]
  assert "tools" not in server.asked[0]
  prompt, said, found = server.asked[1]["messages"]
  assert said["content"] == "<think>so</think> <search>lease end </search>"
  assert found["role"] == "user" and found["content"].startswith(
    "<information>"
  )


SEARCHED, ANSWERED = "<search>lease end</search>", f"<answer>{ANSWER}</answer>"


@pytest.mark.parametrize(
  ("behaviour", "turns"),
  [
    ("prose", [ANSWERED]),
    ("obedient", ["<search>again</search>", ANSWERED]),
    ("parallel", [SEARCHED, ANSWERED]),
    ("malformed", ['search({"query": "lea)', ANSWERED]),
    ("no query", ['search({"query": " "})', ANSWERED]),
    ("unknown tool", ['lookup({"query": "a"})', ANSWERED]),
    ("empty", ["", "", ""]),
    ("null", ["", "", ""]),
    ("forever", ["<search>again</search>"] * 4),
    ("in vain", [SEARCHED] + ["<tool_call>{}</tool_call>"] * 3),
    ("reasoning", [
      f"<think>I look ‹search›it‹/search› up.</think>\n{turn}"
      for turn in (SEARCHED, ANSWERED)]),
    ("thinking", [f"<think>I look it up.</think>\n{SEARCHED}",
                  f"<think>I look it up.</think>\n{ANSWERED}"]),
  ],
)  # fmt: skip
def test_behaviour_ends_in_an_answer_or_a_reason(behaviour, turns):
  with chat_endpoint.served(behaviour) as server:
    reply, told, _ = ask(server)
  assert of_model(reply) == turns
  assert reply.answer == (ANSWER if ANSWERED in turns[-1] else None)
  assert reply.reason or reply.answer
  thought = "".join(e.text for e in told if isinstance(e, events.Thinking))
  if behaviour == "reasoning":
    assert thought.count("I look ‹search›it‹/search› up.") == 2
  for message in server.asked[-1]["messages"]:
    for call in message.get("tool_calls", ()):
      json.loads(call["function"]["arguments"])
  # A call that is no search gets its answer as the tool's result.
  roles = [message["role"] for message in server.asked[-1]["messages"]]
  calls = [m for m in server.asked[-1]["messages"] if m.get("tool_calls")]
  assert roles.count("tool") == len(calls)


def test_model_that_ignores_tool_choice_is_offered_no_tool_at_the_end():
  with chat_endpoint.served(
    lambda body: (
      Message(None, (chat_endpoint.search("lease end"),))
      if "tools" in body
      else Message(ANSWER)
    )
  ) as server:
    reply, *_ = ask(server)
  assert (reply.answer, reply.searches) == (ANSWER, 1)
  assert [b.get("tool_choice", "tools" in b) for b in server.asked] == [
    *(True, "none", False)
  ]


@pytest.mark.parametrize(
  ("faults", "answer", "reason"),
  [
    ([Fault(429, retry_after="0.2")], ANSWER, ""),
    ([Fault(500), Fault(503)], ANSWER, ""),
    ([Fault(hang="before"), Fault(hang="middle")], ANSWER, ""),
    ([Fault(drip=0.01)], ANSWER, ""),
    ([Fault(500)] * 9, None, "HTTP 500: the server is busy"),
    ([Fault(hang="middle")] * 9, None, "the stream ended before the message"),
    ([Fault(hang="silent")], None, "no whole answer within 1 seconds"),
    ([Fault(drip=2.0)], None, "no whole answer within 1 seconds"),
  ],
)
def test_fault_is_waited_out_or_named_within_the_deadline(
  faults, answer, reason
):
  started = time.monotonic()
  with chat_endpoint.served("reasoning", faults=faults) as server:
    late = reason.startswith("no whole")
    reply, told, _ = ask(server, deadline=1.0 if late else 10.0)
  assert time.monotonic() - started < 8
  assert reply.answer == answer and reason in reply.reason
  thought = "".join(e.text for e in told if isinstance(e, events.Thinking))
  # A stream that began anew is not told twice.
  turns = len(reply.trajectory.spans) if answer else 1
  assert thought.count("I look") <= turns


def test_the_deadline_is_one_between_tokens():
  started = time.monotonic()
  with chat_endpoint.served("reasoning", faults=[Fault(drip=0.3)]) as server:
    reply, *_ = ask(server, deadline=1.0)
  assert reply.answer == ANSWER
  assert time.monotonic() - started > 3


def test_what_was_written_before_a_stream_stalls_is_kept():
  faults = [Fault(), Fault(hang="stalls")]
  with chat_endpoint.served("tools", faults=faults) as server:
    reply, *_ = ask(server, deadline=1.0)
  assert of_model(reply)[:2] == [SEARCHED, "In June 2027 [1"]
  assert len(server.asked) > 2


def play_at_once(server, count):
  """Asks for turns at once; returns them and the seconds."""
  with engine_at(server, deadline=1.5, concurrency=count) as engine:

    async def play():
      requests = (
        types.GenerateRequest(
          types.Address(0, question, 0), 0, (65,), 50, ("</search>",)
        )
        for question in range(count)
      )
      turns = map(engine.generate, requests)
      return await asyncio.gather(*turns, return_exceptions=True)

    started = time.monotonic()
    return loop.run(play()), time.monotonic() - started


def test_the_queue_of_a_server_counts_against_no_deadline():
  faults = [Fault(drip=0.1)] * 8
  with chat_endpoint.served("prose", plays=1, faults=faults) as server:
    turns, seconds = play_at_once(server, 8)
  assert seconds > 4
  assert all(isinstance(turn, types.Generation) for turn in turns)


def test_a_queue_behind_early_headers_counts_against_no_deadline():
  faults = [Fault(drip=0.5), Fault(first=2.5)]
  with chat_endpoint.served("prose", faults=faults) as server:
    turns, seconds = play_at_once(server, 2)
  assert seconds > 2.5
  assert all(isinstance(turn, types.Generation) for turn in turns)


def test_a_request_alone_is_late_behind_early_headers():
  with chat_endpoint.served("prose", faults=[Fault(first=4.0)]) as server:
    (error,), seconds = play_at_once(server, 1)
  assert isinstance(error, types.EngineError)
  assert "no whole answer within 1.5 seconds" in str(error)
  assert seconds < 3


def test_fields_that_a_server_refuses_are_left_out(caplog):
  refused = ("seed", "top_k", "max_tokens", "max_completion_tokens", "stream")
  with chat_endpoint.served("tools", refused=refused) as server:
    reply, _, engine = ask(server)
  assert reply.answer == ANSWER and engine.refused == {*refused}
  assert len(server.asked) == len(refused) + 2
  assert server.asked[3]["max_completion_tokens"] > 0
  assert len(caplog.records) == len(refused)


def test_discarded_turn_is_sampled_from_the_earlier_messages():
  def turn(engine, address, ids):
    request = types.GenerateRequest(
      address, 0, tuple(ids), 50, ("</search>", "</answer>")
    )
    return loop.run(engine.generate(request))

  with chat_endpoint.served("tools") as server, engine_at(server) as engine:
    first = types.Address(0, 0, 0)
    prompt = PLAIN.encode("When?")
    context = [*prompt, *turn(engine, first, prompt).token_ids]
    context += PLAIN.encode("A passage.")
    turn(engine, first, context)
    again = first._replace(attempt=2)
    engine.release(first)
    turn(engine, again, context)
    engine.release(again)
    assert server.asked[1]["messages"] == server.asked[2]["messages"]
    # Nothing is known of it any more.
    engine.release(again)
    turn(engine, first, context)
  (message,) = server.asked[3]["messages"]
  assert message["content"] == f"When?{SEARCHED}A passage."


@pytest.mark.parametrize(
  ("behaviour", "values", "mode", "why"),
  [
    ("tools", {}, "tools", "it called the tool"),
    ("tags", {}, "tags", "it did not call"),
    ("tools", {"refused": ("tools",)}, "tags", "takes no tools"),
  ],
)
def test_probe_decides_by_one_question(behaviour, values, mode, why):
  with (
    chat_endpoint.served(behaviour, **values) as server,
    engine_at(server, mode="") as engine,
  ):
    assert loop.run(engine.probe()) == engine.mode == mode
  assert why in engine.why
  assert len(server.asked) == (2 if values else 1)


@pytest.mark.parametrize(
  ("values", "sentence"),
  [
    ({"routes": ()}, "HTTP 404: Not Found"),
    ({"models": ("other",)}, "does not exist"),
    ({"key": "k"}, "Incorrect API key"),
  ],
)
def test_probe_of_an_unusable_server_is_an_error(values, sentence):
  with (
    chat_endpoint.served(**values) as server,
    engine_at(server, mode="") as engine,
    pytest.raises(http_calls.StatusError, match=sentence),
  ):
    loop.run(engine.probe())


def test_a_model_that_rambles_in_the_probe_is_asked_by_tags():
  """A slow model, on a CPU, does not keep a user from asking."""
  silent = Fault(hang="silent")
  with (
    chat_endpoint.served("tags", faults=[silent]) as server,
    engine_at(server, mode="", deadline=0.5) as engine,
  ):
    assert loop.run(engine.probe()) == engine.mode == "tags"
  assert "did not come in time" in engine.why
  assert [body["max_tokens"] for body in server.asked] == [256, 1]


def test_a_mode_that_is_given_is_checked_by_one_token():
  with (
    chat_endpoint.served("tools") as server,
    engine_at(server, mode="tools") as engine,
  ):
    assert loop.run(engine.probe()) == "tools"
  (body,) = server.asked
  assert body["max_tokens"] == 1 and "tools" not in body
