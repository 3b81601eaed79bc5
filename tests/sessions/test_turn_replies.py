"""Turns as completions, responses and streams, by tables written by hand."""

from __future__ import annotations

import json
import re

import pytest
import response_models
from fake_sessions import CALLS
from openai.types import chat
from openai.types.responses import response as response_lib

from anysearch_jax.host import openai_replies
from anysearch_jax.sessions import chat_api, fields, responses_api, turns

TURN = turns.TurnReply(
  CALLS, is_cut=False, prompt_tokens=30, written_tokens=7, cached_tokens=20
)
CUT = turns.TurnReply(turns.Message("assistant", "Ja"), True, 30, 2)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Who?"}]}
RESPONSE = {"model": "m", "input": "Who?", "max_output_tokens": 9}
USAGE = {
  "prompt_tokens": 30,
  "completion_tokens": 7,
  "total_tokens": 37,
  "prompt_tokens_details": {"cached_tokens": 20},
}


def function(name, arguments):
  return {"name": name, "arguments": arguments}


FIRST = {"id": "call_1", "type": "function"}
FIRST |= {"function": function("search", '{"query": "emma"}')}
SECOND = {"id": "call_2", "type": "function"}
SECOND |= {"function": function("search", '{"query": "austen"}')}


def asked(api, body):
  return fields.read(api.Request, json.dumps(body).encode())


def test_completion_has_message_calls_and_usage():
  completion = chat_api.collected(asked(chat_api, CHAT), TURN)
  chat.ChatCompletion.model_validate(completion, strict=True)
  assert completion.pop("id").startswith("chatcmpl-")
  assert completion.pop("created") > 1.7e9
  assert completion == {
    "object": "chat.completion",
    "model": "m",
    "choices": [
      {
        "index": 0,
        "logprobs": None,
        "finish_reason": "tool_calls",
        "message": {
          "role": "assistant",
          "content": "Let me look.",
          "refusal": None,
          "reasoning_content": "Who wrote it?",
          "tool_calls": [FIRST, SECOND],
        },
      }
    ],
    "usage": USAGE,
  }


@pytest.mark.parametrize(
  ("message", "is_cut", "content", "reason"),
  [
    (turns.Message("assistant", "Jane"), False, "Jane", "stop"),
    (turns.Message("assistant", "Ja"), True, "Ja", "length"),
    (turns.Message("assistant", ""), False, "", "stop"),
    (
      turns.Message("assistant", "", calls=CALLS.calls),
      *(False, None, "tool_calls"),
    ),
    (turns.Message("assistant", "", calls=CALLS.calls), True, None, "length"),
  ],
)
def test_reason_of_the_end(message, is_cut, content, reason):
  turn = turns.TurnReply(message, is_cut, 3, 2)
  completion = chat_api.collected(asked(chat_api, CHAT), turn)
  (choice,) = completion["choices"]
  assert choice["message"]["content"] == content
  assert choice["finish_reason"] == reason


@pytest.mark.parametrize("has_usage", [False, True])
def test_chunks_of_a_turn(has_usage):
  body = CHAT | {"stream_options": {"include_usage": has_usage}}
  chunks = list(chat_api.streamed(asked(chat_api, body), TURN))
  for chunk in chunks:
    chat.ChatCompletionChunk.model_validate(chunk, strict=True)
  assert len({chunk["id"] for chunk in chunks}) == 1
  choices = [chunk["choices"] for chunk in chunks]
  deltas = [
    {"role": "assistant", "content": ""},
    {"reasoning_content": "Who wrote it?"},
    {"content": "Let me look."},
    {"tool_calls": [{"index": 0} | FIRST]},
    {"tool_calls": [{"index": 1} | SECOND]},
    {},
  ]
  reasons = [None] * 5 + ["tool_calls"]
  expected = [
    [{"index": 0, "logprobs": None, "delta": delta, "finish_reason": reason}]
    for delta, reason in zip(deltas, reasons, strict=True)
  ]
  usages = [chunk.get("usage") for chunk in chunks]
  if has_usage:
    assert choices == [*expected, []]
    assert usages == [None] * 6 + [USAGE]
  else:
    assert choices == expected
    assert usages == [None] * 6


def plain(value):
  """Returns JSON with the beginning of each id alone."""
  text = json.dumps(value)
  text = re.sub(r"\b(resp|rs|msg|fc)_[0-9a-f]{32}", r"\1_", text)
  return json.loads(text)


REASONING = {
  "id": "rs_00",
  "type": "reasoning",
  "status": "completed",
  "content": [{"type": "reasoning_text", "text": "Who wrote it?"}],
  "summary": [],
}
PART = {"type": "output_text", "annotations": [], "logprobs": []}
MESSAGE = {
  "id": "msg_01",
  "type": "message",
  "status": "completed",
  "content": [PART | {"text": "Let me look."}],
  "role": "assistant",
}


def called(number, call_id, arguments):
  return {
    "id": f"fc_0{number}",
    "type": "function_call",
    "status": "completed",
    "call_id": call_id,
    "name": "search",
    "arguments": arguments,
  }


def call_events(item, index):
  """Returns the events of a call, by hand."""
  place = {"output_index": index, "item_id": item["id"]}
  begun = item | {"arguments": "", "status": "in_progress"}
  arguments = item["arguments"]
  return [
    ("output_item.added", {"output_index": index, "item": begun}),
    ("function_call_arguments.delta", place | {"delta": arguments}),
    (
      "function_call_arguments.done",
      place | {"name": "search", "arguments": arguments},
    ),
    ("output_item.done", {"output_index": index, "item": item}),
  ]


def text_events(item, index, kind, **values):
  """Returns the events of an item with one text, by hand."""
  place = {"output_index": index, "item_id": item["id"], "content_index": 0}
  (part,) = item["content"]
  text = part["text"]
  begun = item | {"content": [], "status": "in_progress"}
  return [
    ("output_item.added", {"output_index": index, "item": begun}),
    ("content_part.added", place | {"part": part | {"text": ""}}),
    (f"{kind}.delta", place | {"delta": text} | values),
    (f"{kind}.done", place | {"text": text} | values),
    ("content_part.done", place | {"part": part}),
    ("output_item.done", {"output_index": index, "item": item}),
  ]


def test_events_of_a_turn():
  tool = {"type": "function", "name": "search", "description": "Searches."}
  body = RESPONSE | {"tools": [tool], "temperature": 0.5}
  events = plain(list(responses_api.streamed(asked(responses_api, body), TURN)))
  for number, event in enumerate(events):
    response_models.check(event)
    assert event.pop("sequence_number") == number
  first = called(2, "call_1", '{"query": "emma"}')
  second = called(3, "call_2", '{"query": "austen"}')
  output = [REASONING, MESSAGE, first, second]
  response = {
    "id": "resp_",
    "object": "response",
    "status": "in_progress",
    "output": [],
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": False,
    "model": "m",
    "tool_choice": "auto",
    "tools": [
      tool
      | {"parameters": {"type": "object", "properties": {}}, "strict": False}
    ],
    "temperature": 0.5,
    "top_p": None,
    "max_output_tokens": 9,
    "usage": None,
  }
  usage = {
    "input_tokens": 30,
    "input_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 0},
    "output_tokens": 7,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 37,
  }
  final = response | {"output": output, "status": "completed", "usage": usage}
  expected = [
    ("created", {"response": response}),
    ("in_progress", {"response": response}),
    *text_events(REASONING, 0, "reasoning_text"),
    *text_events(MESSAGE, 1, "output_text", logprobs=[]),
    *call_events(first, 2),
    *call_events(second, 3),
    ("completed", {"response": final}),
  ]
  for event in events:
    if "response" in event:
      assert event["response"].pop("created_at") > 1.7e9
  assert events == [
    {"type": f"response.{name}", **values} for name, values in expected
  ]


def test_response_is_that_of_the_last_event():
  for turn, status in ((TURN, "completed"), (CUT, "incomplete")):
    request = asked(responses_api, RESPONSE)
    response = responses_api.collected(request, turn)
    response_lib.Response.model_validate(response, strict=True)
    *_, last = responses_api.streamed(request, turn)
    assert last["type"] == f"response.{status}"
    assert plain(last["response"]) | {"created_at": 0} == plain(response) | {
      "created_at": 0
    }
  assert response["incomplete_details"] == {"reason": "max_output_tokens"}
  assert response["output"][0]["content"][0]["text"] == "Ja"


@pytest.mark.parametrize("mark", ["\u2028", "\x85", "\ud800", "\r", "\n\n"])
def test_no_character_of_a_policy_ends_a_line_of_a_stream(mark):
  message = turns.Message("assistant", f"a{mark}b")
  turn = turns.TurnReply(message, False, 3, 2)
  for api, body in ((chat_api, CHAT), (responses_api, RESPONSE)):
    for value in api.streamed(asked(api, body), turn):
      *names, data, blank, end = openai_replies.frame(value).split(b"\n")
      assert len(names) == ("type" in value) and blank == end == b""
      assert data.isascii() and json.loads(data[6:]) == value
