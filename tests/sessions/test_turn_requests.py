"""Requests of both of OpenAI's APIs as turns, by tables written by hand."""

from __future__ import annotations

import dataclasses
import json
import typing

import hostile
import hypothesis
import pytest
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params
from starlette import exceptions

from anysearch_jax.sessions import chat_api, fields, responses_api, turns

USER = {"role": "user", "content": "Who wrote Emma?"}
ASKED = turns.Message("user", "Who wrote Emma?")
CHAT = {"model": "gpt-5", "messages": [USER]}
RESPONSE = {"model": "gpt-5", "input": "Who wrote Emma?"}
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}
FUNCTION = {"name": "search", "description": "Searches.", "strict": True}
FUNCTION |= {"parameters": PARAMETERS}
TOOL = {"name": "search", "description": "Searches.", "parameters": PARAMETERS}
CALL = turns.Call("call_1", "search", '{"query": "emma"}')
OTHER = turns.Call("call_2", "search", '{"query": "austen"}')


def chat_call(call):
  function = {"name": call.name, "arguments": call.arguments}
  return {"id": call.id, "type": "function", "function": function}


def call_item(call):
  values = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
  return {"type": "function_call", "id": "fc_1", "status": None, **values}


def output_item(call_id, text):
  return {"type": "function_call_output", "call_id": call_id, "output": text}


def read(body):
  api = chat_api if "messages" in body else responses_api
  return fields.read(api.Request, json.dumps(body).encode()).turn()


def test_whole_request_of_each_api_is_the_same_turn():
  both = {"temperature": 0.5, "top_p": 1, "tool_choice": "auto", "stop": "END"}
  both |= {"model": "gpt-5", "seed": 3, "user": "me", "metadata": {"a": "b"}}
  both |= {"store": True, "parallel_tool_calls": False, "service_tier": "auto"}
  chat = both | {
    "messages": [{"role": "developer", "content": "Be brief."}, USER],
    "tools": [{"type": "function", "function": FUNCTION}],
    "max_completion_tokens": 50,
    "max_tokens": 70,
    "presence_penalty": -0.5,
    "frequency_penalty": 0,
  }
  response = both | {
    "instructions": "Be brief.",
    "input": [USER],
    "tools": [{"type": "function", **FUNCTION}],
    "max_output_tokens": 50,
    "presence_penalty": -0.5,
    "frequency_penalty": 0,
  }
  expected = turns.TurnRequest(
    messages=(turns.Message("system", "Be brief."), ASKED),
    tools=(TOOL,),
    max_tokens=50,
    stop=("END",),
    model="gpt-5",
    sampling={
      "temperature": 0.5,
      "top_p": 1,
      "presence_penalty": -0.5,
      "frequency_penalty": 0,
    },
  )
  assert read(chat) == expected
  assert read(response) == expected


def test_least_request_has_the_sessions_defaults():
  for body in ({"messages": [USER]}, {"input": "Who wrote Emma?"}):
    assert read(body) == turns.TurnRequest(messages=(ASKED,))


def test_tool_without_description_and_parameters_takes_none():
  tool = {"name": "now"}
  expected = {
    "name": "now",
    "description": "",
    "parameters": {"type": "object", "properties": {}},
  }
  chat = CHAT | {"tools": [{"type": "function", "function": tool}]}
  response = RESPONSE | {"tools": [{"type": "function", **tool}]}
  assert read(chat).tools == read(response).tools == (expected,)


def test_no_tools_are_offered_if_none_may_be_called():
  tools = [{"type": "function", "function": FUNCTION}]
  assert read(CHAT | {"tools": tools, "tool_choice": "none"}).tools == ()


@pytest.mark.parametrize(
  ("message", "expected"),
  [
    (USER, ASKED),
    (
      {
        "role": "user",
        "name": "joe",
        "content": [{"type": "text", "text": ""}],
      },
      turns.Message("user", ""),
    ),
    (
      {
        "role": "user",
        "content": [
          {"type": "text", "text": "a", "cache_control": None},
          {"type": "text", "text": "b"},
        ],
      },
      turns.Message("user", "a\nb"),
    ),
    (
      {"role": "assistant", "content": "x", "reasoning_content": "y"},
      turns.Message("assistant", "x", reasoning="y"),
    ),
    (
      {"role": "assistant", "content": None, "refusal": "No."},
      turns.Message("assistant", "No."),
    ),
    (
      {
        "role": "assistant",
        "content": [{"type": "refusal", "refusal": "No."}],
        "tool_calls": None,
        "function_call": None,
        "audio": None,
        "annotations": [],
      },
      turns.Message("assistant", "No."),
    ),
    (
      {"role": "assistant", "tool_calls": [chat_call(CALL), chat_call(OTHER)]},
      turns.Message("assistant", "", calls=(CALL, OTHER)),
    ),
    (
      {"role": "tool", "tool_call_id": "call_1", "content": "Jane"},
      turns.Message("tool", "Jane", call_id="call_1"),
    ),
  ],
)
def test_message_of_chat_completions(message, expected):
  assert read({"messages": [message]}).messages == (expected,)


REASONING = {"type": "reasoning", "id": "rs_1", "summary": []}
THOUGHT = {"content": [{"type": "reasoning_text", "text": "Who?"}]}
SAID = {
  "type": "message",
  "id": "msg_1",
  "status": "completed",
  "role": "assistant",
  "content": [{"type": "output_text", "text": "Look.", "annotations": []}],
}
TOLD = turns.Message("tool", "Jane", call_id="call_1")


@pytest.mark.parametrize(
  ("items", "expected"),
  [
    ([SAID], [turns.Message("assistant", "Look.")]),
    # A reply of reasoning, message and calls is one message again.
    (
      [
        REASONING | THOUGHT,
        SAID,
        call_item(CALL),
        call_item(OTHER),
        output_item("call_1", "Jane"),
      ],
      [
        turns.Message("assistant", "Look.", (CALL, OTHER), reasoning="Who?"),
        TOLD,
      ],
    ),
    (
      [
        call_item(CALL),
        output_item("call_1", [{"type": "input_text"} | {"text": "Jane"}]),
        SAID,
      ],
      [
        turns.Message("assistant", "", (CALL,)),
        TOLD,
        turns.Message("assistant", "Look."),
      ],
    ),
    # Two replies in a row stay two.
    (
      [SAID, SAID],
      [
        turns.Message("assistant", "Look."),
        turns.Message("assistant", "Look."),
      ],
    ),
    (
      [SAID, REASONING | THOUGHT, call_item(CALL)],
      [
        turns.Message("assistant", "Look."),
        turns.Message("assistant", "", (CALL,), reasoning="Who?"),
      ],
    ),
    (
      [
        REASONING | {"summary": [{"type": "summary_text", "text": "Hm."}]},
        USER,
      ],
      [turns.Message("assistant", "", reasoning="Hm."), ASKED],
    ),
  ],
)
def test_items_of_responses_are_messages(items, expected):
  assert list(read({"input": items}).messages) == expected


@pytest.mark.parametrize(
  "reply",
  [
    turns.Message("assistant", "Jane"),
    turns.Message("assistant", ""),
    turns.Message("assistant", "", reasoning="Who?"),
    turns.Message("assistant", "", calls=(CALL,)),
    turns.Message("assistant", "Look.", calls=(CALL, OTHER), reasoning="Who?"),
  ],
)
def test_reply_that_is_sent_back_is_the_same_message(reply):
  turn = turns.TurnReply(reply, False, 3, 2)
  asked = fields.read(chat_api.Request, json.dumps(CHAT).encode())
  completion = chat_api.collected(asked, turn)
  (choice,) = completion["choices"]
  assert read({"messages": [USER, choice["message"], USER]}).messages == (
    *(ASKED, reply, ASKED),
  )
  asked = fields.read(responses_api.Request, json.dumps(RESPONSE).encode())
  items = responses_api.collected(asked, turn)["output"]
  assert read({"input": [USER, *items, USER]}).messages == (
    *(ASKED, reply, ASKED),
  )


def tools(**tool):
  return {"tools": [{"type": "function", "function": tool}]}


def deep(depth):
  return json.loads('{"a":' * depth + "1" + "}" * depth)


@pytest.mark.parametrize(
  ("body", "param", "sentence"),
  [
    (CHAT | {"n": 2}, "n", "found 2"),
    (CHAT | {"logprobs": True}, "logprobs", "found True, expected false"),
    (CHAT | {"top_logprobs": 2}, "top_logprobs", "found 2"),
    (CHAT | {"stop": list("abcde")}, "stop", "at most 4"),
    (CHAT | {"stop": [""]}, "stop", "found ''"),
    (CHAT | {"max_tokens": 0}, "max_tokens", "found 0"),
    (CHAT | {"max_tokens": True}, "max_tokens", "found True"),
    (CHAT | {"temperature": 2.5}, "temperature", "found 2.5"),
    (CHAT | {"presence_penalty": -3}, "presence_penalty", "found -3"),
    (CHAT | {"logit_bias": {"5": 1}}, "logit_bias.5", "found 1"),
    (CHAT | {"tool_choice": "required"}, "tool_choice", "a training cannot"),
    (
      CHAT | {"tool_choice": {"type": "function", "function": {"name": "f"}}},
      "tool_choice",
      "expected 'auto' or 'none'",
    ),
    (
      CHAT | {"response_format": {"type": "json_object"}},
      "response_format",
      "expected 'text'",
    ),
    (CHAT | {"functions": [{"name": "f"}]}, "functions", "no such field"),
    (CHAT | {"modalities": ["audio"]}, "modalities", "found 'audio'"),
    (CHAT | {"web_search_options": {"a": 1}}, "web_search_options", "no such"),
    (CHAT | {"no_such_field": 1}, "no_such_field", "no such field"),
    (CHAT | {"stream": "yes"}, "stream", "found 'yes'"),
    (CHAT | {"messages": 5}, "messages", "found 5"),
    (CHAT | {"messages": []}, "", "found nothing"),
    (CHAT | {"messages": [5]}, "messages", "found 5"),
    (CHAT | {"messages": [{"role": "user"}]}, "messages", "content"),
    (CHAT | {"messages": [{"role": "function"}]}, "messages", "'function'"),
    (
      CHAT | {"messages": [{"role": "tool", "content": "x"}]},
      "messages",
      "tool_call_id",
    ),
    (
      CHAT
      | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
      "messages",
      "found 'image_url', expected 'text'",
    ),
    (
      CHAT | {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
      "messages",
      "found no 'function'",
    ),
    (CHAT | tools(description="x"), "tools", "no 'name'"),
    (CHAT | tools(name=""), "tools", "found ''"),
    (CHAT | tools(name="f", parameters=[]), "tools", "found []"),
    (CHAT | tools(name="f", parameters=deep(300)), "tools", "expected"),
    (CHAT | {"tools": [{"type": "custom"}]}, "tools", "found 'custom'"),
    (RESPONSE | {"tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
    (
      RESPONSE | {"previous_response_id": "resp_1"},
      "previous_response_id",
      "the whole conversation",
    ),
    (RESPONSE | {"conversation": "c"}, "conversation", "no such field"),
    (RESPONSE | {"max_tool_calls": 3}, "max_tool_calls", "the training"),
    (RESPONSE | {"truncation": "auto"}, "truncation", "expected 'disabled'"),
    (RESPONSE | {"background": True}, "background", "expected false"),
    (
      RESPONSE | {"text": {"format": {"type": "json_schema"}}},
      "text.format",
      "expected 'text'",
    ),
    (
      RESPONSE | {"input": [{"type": "item_reference", "id": "x"}]},
      "input",
      "an item of type message, function_call,",
    ),
    (RESPONSE | {"input": [7]}, "input", "found 7"),
    (RESPONSE | {"input": 7}, "input", "found 7"),
    (
      RESPONSE | {"input": [{"type": "function_call", "name": "f"}]},
      "input",
      "found no 'call_id'",
    ),
  ],
)
def test_what_cannot_be_honoured_is_refused_by_its_field(body, param, sentence):
  with pytest.raises(exceptions.HTTPException) as refused:
    read(body)
  assert refused.value.status_code == 400
  assert (refused.value.param or "") == (param or "messages")
  assert sentence in refused.value.detail
  assert len(refused.value.detail) < 400


@pytest.mark.parametrize(
  "body",
  [
    *(b"", b"{", b"[]", b"7", b"null", b"\xff", b'{"messages": [', b"\0"),
    *(b"[" * 100_000, b'{"a":' * 100_000, b'{"messages": [NaN]}'),
    *(b'{"temperature": Infinity}', b'{"messages": "\\ud800"}'),
  ],
)
def test_body_that_is_no_json_object_is_refused(body):
  for api in (chat_api, responses_api):
    with pytest.raises(exceptions.HTTPException, match="no JSON object"):
      fields.read(api.Request, body)


# The value that each of the clients' parameters may have without an effect.
_NEUTRAL = {
  "frequency_penalty": 0,
  "function_call": "auto",
  "include": ["reasoning.encrypted_content"],
  "instructions": "",
  "logprobs": False,
  "max_completion_tokens": 20,
  "max_output_tokens": 20,
  "max_tokens": 20,
  "metadata": {"run": "1"},
  "modalities": ["text"],
  "n": 1,
  "parallel_tool_calls": True,
  "prediction": {"type": "content", "content": ""},
  "presence_penalty": 0,
  "prompt_cache_key": "x",
  "prompt_cache_options": {"mode": "implicit"},
  "prompt_cache_retention": "24h",
  "reasoning": {"effort": "low"},
  "reasoning_effort": "low",
  "response_format": {"type": "text"},
  "safety_identifier": "x",
  "seed": 7,
  "service_tier": "auto",
  "stop": ["END"],
  "store": True,
  "stream": False,
  "stream_options": {"include_obfuscation": False},
  "temperature": 1,
  "text": {"format": {"type": "text"}, "verbosity": "low"},
  "tool_choice": "auto",
  "top_logprobs": 0,
  "top_p": 1,
  "truncation": "disabled",
  "user": "x",
  "verbosity": "low",
  "background": False,
}


@pytest.mark.parametrize(
  ("params", "body"),
  [
    (completion_create_params.CompletionCreateParamsBase, CHAT),
    (response_create_params.ResponseCreateParamsBase, RESPONSE),
  ],
)
def test_harmless_value_of_every_parameter_is_accepted(params, body):
  for name in set(typing.get_type_hints(params)) - set(body):
    read(body | {name: None})
    if name in _NEUTRAL:
      read(body | {name: _NEUTRAL[name]})


WHOLE = {
  "messages": [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "assistant", "content": None, "tool_calls": [chat_call(CALL)]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Jane"},
  ],
  "tools": [{"type": "function", "function": FUNCTION}],
  "stop": ["END"],
  "temperature": 1,
}
WHOLE_RESPONSE = {
  "input": [USER, REASONING | THOUGHT, SAID, call_item(CALL)]
  + [output_item("call_1", "Jane")],
  "tools": [{"type": "function", **FUNCTION}],
  "instructions": "Be brief.",
  "text": {"format": {"type": "text"}},
}


@hostile.cases(2000)
@hypothesis.given(hostile.tapes())
def test_no_changed_request_is_more_than_refused(tape):
  body = tape.pick((WHOLE, WHOLE_RESPONSE))
  for _ in range(1 + tape.below(3)):
    body = tape.change(body, (USER, SAID, FUNCTION, CALL.arguments))
  api = (
    responses_api if isinstance(body, dict) and "input" in body else chat_api
  )
  try:
    turn = fields.read(api.Request, hostile.as_json(body)).turn()
  except exceptions.HTTPException as error:
    assert error.status_code == 400 and len(error.detail) < 1000
    return
  # What a chat template gets can be written as JSON.
  json.dumps(dataclasses.asdict(turn), allow_nan=False).encode()
  for message in turn.messages:
    assert isinstance(message.content, str)
