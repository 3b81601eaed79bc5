"""Streamed calls of tools are joined however a server cuts and numbers them."""

import json

import pytest

from anysearch_jax.host import openai_endpoint

_QUERY = '{"query": "flat 7"}'


def _joined(*deltas):
  joiner = openai_endpoint._StreamJoiner(lambda message: None)
  chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
  chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
  chunks.append({"choices": None, "usage": {"prompt_tokens": 3}})
  for chunk in chunks:
    joiner.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
  return json.loads(joiner.whole())["choices"][0]["message"]


def _part(arguments, **fields):
  name = {"name": "search"} if fields.pop("named", False) else {}
  function = {**name, "arguments": arguments}
  return {"tool_calls": [{**fields, "function": function}]}


@pytest.mark.parametrize(
  ("first", "second"),
  [
    ({"index": 0, "id": "a"}, {"index": 0}),
    ({"index": 0, "id": "a"}, {"index": "0"}),
    ({"index": 0, "id": "a"}, {"index": 1}),
    ({"index": 0, "id": "a"}, {"index": 1, "id": "a"}),
    ({"index": None}, {"index": 0}),
    ({}, {}),
    ({"id": "a"}, {"id": "a", "named": True}),
  ],
)
def test_pieces_join_to_one_call(first, second):
  begin = _part(_QUERY[:7], named=True, **first)
  (call,) = _joined(begin, _part(_QUERY[7:], **second))["tool_calls"]
  assert call["function"] == {"name": "search", "arguments": _QUERY}


@pytest.mark.parametrize("arguments", [_QUERY, json.loads(_QUERY)])
@pytest.mark.parametrize("first", ["{}", {}, ""])
def test_empty_arguments_give_way_to_later_ones(first, arguments):
  message = _joined(_part(first, named=True), _part(arguments))
  assert message["tool_calls"][0]["function"]["arguments"] == _QUERY


def test_calls_with_one_index_and_two_ids_stay_apart():
  calls = _joined(
    _part(_QUERY, index=0, id="a", named=True),
    _part(_QUERY, index=0, id="b", named=True),
  )["tool_calls"]
  assert [call["id"] for call in calls] == ["a", "b"]


def test_content_in_parts_is_joined():
  parts = [{"type": "text", "text": "Par"}, {"type": "text", "text": "is"}]
  assert _joined({"content": parts})["content"] == "Paris"
