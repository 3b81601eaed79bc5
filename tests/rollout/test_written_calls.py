"""Calls that models write as text, in the spelling of each family."""

from __future__ import annotations

import json
import time

import chat_endpoint
import hypothesis
import pytest
import test_chat_completions as chat
from chat_endpoint import Message
from hypothesis import strategies as st

from anysearch_jax import types
from anysearch_jax.host import loop, openai_endpoint
from anysearch_jax.rollout import chat_completions, written_calls

SPELLINGS = {
  "Qwen2.5-Coder": ('{"name": "search", "arguments": {"query": "lease end"}}'),
  "a forgotten brace": '{"name": "search", "arguments": {"query": "lease end"}',
  "two, in a fence": (
    '```json\n{"name": "search", "arguments": {"query": "lease end"\n```'
  ),
  "fenced JSON": (
    '```json\n{"name": "search", "arguments": {"query": "lease end"}}\n```'
  ),
  "Hermes, Qwen": (
    "<tool_call>\n"
    '{"name": "search", "arguments": {"query": "lease end"}}\n'
    "</tool_call>"
  ),
  "Qwen3-Coder": (
    "<tool_call>\n"
    "<function=search>\n"
    "<parameter=query>\n"
    "lease end\n"
    "</parameter>\n"
    "</function>\n"
    "</tool_call>"
  ),
  "Llama 3.1": (
    '<|python_tag|>{"name": "search", "parameters": {"query": "lease end"}}'
  ),
  "Llama 3.2": ('<function=search>{"query": "lease end"}</function>'),
  "Mistral": (
    '[TOOL_CALLS][{"name": "search", "arguments": {"query": "lease end"}}]'
  ),
  "Mistral 11": ('[TOOL_CALLS]search{"query": "lease end"}'),
  "Mistral 13": ('[TOOL_CALLS]search[CALL_ID]abc[ARGS]{"query": "lease end"}'),
  "Harmony": (
    "<|channel|>commentary to=functions.search <|constrain|>json<"
    '|message|>{"query": "lease end"}<|call|>'
  ),
  "Gemma, printed": ('```tool_code\nprint(search(query="lease end"))\n```'),
  "Gemma": ('```tool_code\nsearch(query="lease end")\n```'),
  "Phi-4": (
    '<|tool_call|>[{"name": "search", "arguments": {"query": "lea'
    'se end"}}]<|/tool_call|>'
  ),
  "Phi-4 mini": (
    'functools[{"name": "search", "arguments": {"query": "lease end"}}]'
  ),
  "Granite": (
    '<|tool_call|>[{"name": "search", "arguments": {"query": "lease end"}}]'
  ),
  "XML": (
    "<tool_call><name>search</name><arguments><query>lease end</q"
    "uery></arguments></tool_call>"
  ),
  "MiniMax": (
    "<function_calls>\n"
    '<invoke name="search">\n'
    '<parameter name="query">lease end</parameter>\n'
    "</invoke>\n"
    "</function_calls>"
  ),
  "GLM": (
    "<tool_call>search\n"
    "<arg_key>query</arg_key>\n"
    "<arg_value>lease end</arg_value>\n"
    "</tool_call>"
  ),
  "DeepSeek 3": (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>s"
    "earch\n"
    "```json\n"
    '{"query": "lease end"}\n'
    "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
  ),
  "DeepSeek 3.1": (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"q'
    'uery": "lease end"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
  ),
  "DeepSeek 3.2": (
    "<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="search">\n'
    '<｜DSML｜parameter name="query" string="true">lease end</｜DSML'
    "｜parameter>\n"
    "</｜DSML｜invoke>"
  ),
  "Kimi": (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.sea"
    'rch:0<|tool_call_argument_begin|>{"query": "lease end"}<|too'
    "l_call_end|>"
  ),
  "Llama 4": ('[search(query="lease end")]'),
  "LFM": ('<|tool_call_start|>[search(query="lease end")]<|tool_call_end|>'),
  "JSON after prose": (
    "I look it up.\n"
    "```json\n"
    '{"name": "search", "arguments": {"query": "lease end"}}\n'
    "```\n"
  ),
  "OpenAI's own JSON": (
    '{"type":"function","function":{"name":"search","arguments":"'
    '{\\"query\\": \\"lease end\\"}"}}'
  ),
  "a list of calls": (
    '{"tool_calls":[{"name":"search","arguments":{"query":"lease end"}}]}'
  ),
  "the paper's tags": ("<search>lease end</search>"),
}
ANSWERS = (
  "In June 2027 [1].",
  '{"answer": "June 2027"}',
  '{"name": "Ada", "age": 36}',
  "Call search(query) to look it up.",
  "They search (in vain) for it.",
  "f(x) = {x}",
  "The tool_call ends the function=search.",
)
MALFORMED = (
  '<tool_call>{"name": "search", "arguments": {"query": "lea</tool_call>',
  "<tool_call>{}</tool_call>",
  "[TOOL_CALLS]search{",
  "<function=search></function>",
  '{"name": "lookup", "arguments": {"query": "lease"}}',
  '```json\n{"name": "search", "arguments": {"words": "lease"}}\n```',
)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("family", SPELLINGS)
def test_a_written_call_is_a_search(family, streams):
  spelled = SPELLINGS[family]

  def reply(body):
    return Message(spelled if len(body["messages"]) == 1 else chat.ANSWER)

  with chat_endpoint.served(reply, streams=streams) as server:
    answered, _, _ = chat.ask(server)
  assert (answered.answer, answered.searches) == (chat.ANSWER, 1)
  assert answered.trajectory.queries == ("lease end",)
  # It is repeated as a call, so that the result has one to answer.
  _, call, result = server.asked[1]["messages"]
  (repeated,) = call["tool_calls"]
  arguments = json.loads(repeated["function"]["arguments"])
  assert arguments["query"] == "lease end"
  assert spelled not in call["content"]
  assert (result["role"], result["tool_call_id"]) == ("tool", repeated["id"])


@pytest.mark.parametrize("family", ["Qwen2.5-Coder", "Hermes, Qwen", "GLM"])
def test_reasoning_may_stand_before_a_written_call(family):
  spelled = f"<think>search?</think>\n{SPELLINGS[family]}"

  def reply(body):
    return Message(spelled if len(body["messages"]) == 1 else chat.ANSWER)

  with chat_endpoint.served(reply) as server:
    answered, _, _ = chat.ask(server)
  assert chat.of_model(answered)[0] == (
    "<think>search?</think>\n<search>lease end</search>"
  )


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_that_is_no_call_stays_an_answer(text):
  assert written_calls.find(text, ("search",)) is None
  assert not written_calls.is_call(text)
  with chat_endpoint.served("prose", answer=text) as server:
    answered, _, _ = chat.ask(server)
  assert answered.answer.startswith(text.partition(" [1]")[0])


def test_an_answer_in_the_papers_tags_is_its_content():
  with chat_endpoint.served(
    "prose", answer="So: <answer>June [1]</answer>"
  ) as server:
    answered, _, _ = chat.ask(server)
  assert answered.answer == "June [1]"


@pytest.mark.parametrize("text", MALFORMED)
def test_a_call_that_is_no_search_gets_an_error_line(text):
  def reply(body):
    return Message(text if len(body["messages"]) == 1 else chat.ANSWER)

  with chat_endpoint.served(reply) as server:
    answered, _, _ = chat.ask(server)
  assert (answered.answer, answered.searches) == (chat.ANSWER, 0)
  assert "Neither a search nor" in server.asked[1]["messages"][-1]["content"]


def test_the_probe_sees_written_calls():
  def reply(body):
    return Message(SPELLINGS["Qwen2.5-Coder"])

  with (
    chat_endpoint.served(reply) as server,
    chat.engine_at(server, mode="") as engine,
  ):
    assert loop.run(engine.probe()) == "tools"


@pytest.mark.parametrize("content", ["", " \n", None])
@pytest.mark.parametrize("mode", ["tools", "tags"])
def test_an_empty_message_is_not_sent_back_empty(content, mode):
  """llama.cpp refuses a message without text or calls, and all that follow."""

  def reply(body):
    if len(body["messages"]) == 1:
      return Message(content)
    return Message(f"<answer>{chat.ANSWER}</answer>")

  with chat_endpoint.served(reply) as server:
    chat.ask(server, mode=mode)
  for body in server.asked:
    for message in body["messages"]:
      assert message["content"].strip() or message.get("tool_calls")


@pytest.mark.parametrize("context", [40, 10**6])
def test_a_server_that_cuts_prompts_is_named_once(caplog, context):
  """Ollama reads no more than its num_ctx, and says so only in the usage."""

  def reply(body):
    characters = len(json.dumps(body["messages"]))
    return Message("a", read=min(characters // 4, context))

  with (
    chat_endpoint.served(reply) as server,
    chat.engine_at(server) as engine,
  ):
    for number in range(2):
      address = types.Address(0, number, 0)
      ids = chat.PLAIN.encode("When? " + "word " * 900 * (number + 1))
      stops = ("</search>", "</answer>")
      request = types.GenerateRequest(address, 0, tuple(ids), 50, stops)
      loop.run(engine.generate(request))
    count = engine.counters["cut_prompts"]
  warnings = [r for r in caplog.records if "cut prompts" in r.getMessage()]
  assert (count, len(warnings)) == ((2, 1) if context == 40 else (0, 0))


def test_tools_that_are_offered_no_more_are_no_cut(caplog):
  """A server counts the tokens of the tools that it writes into a prompt."""

  def reply(body):
    written = json.dumps([body["messages"], body.get("tools", "")])
    if len(body["messages"]) == 1:
      call = chat_endpoint.search("lease end")
      return Message(None, (call,), read=len(written) // 4)
    if "tools" in body:  # It ignores tool_choice.
      call = chat_endpoint.search("lease end")
      return Message(None, (call,), read=len(written) // 4)
    return Message("June", read=len(written) // 4)

  with chat_endpoint.served(reply) as server:
    answered, _, engine = chat.ask(server)
    assert answered.answer == "June"
    again, _, _ = chat.ask(server)
  assert again.answer == "June" and not engine.counters["cut_prompts"]
  assert not [r for r in caplog.records if "cut prompts" in r.getMessage()]


def test_reading_takes_time_in_proportion_to_a_text():
  for piece in (
    "{",
    "[",
    "<tool_call>",
    '{"a":',
    "search(",
    "<function=search>",
  ):
    started = time.process_time()
    text = piece * (200_000 // len(piece))
    written_calls.find(text, ("search",))
    written_calls.is_call(text)
    assert time.process_time() - started < 2.0, piece


JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(
      st.sampled_from(
        ["name", "arguments", "function", "index", "id", "text", "query"]
      ),
      inner,
      max_size=4,
    )
  ),
  max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
  {},
  optional={
    name: JSON
    for name in ("content", "tool_calls", "function_call", "reasoning", "role")
  },
)
CHOICE = st.fixed_dictionaries(
  {},
  optional={
    "message": MESSAGE | JSON,
    "delta": MESSAGE | JSON,
    "finish_reason": JSON | st.sampled_from(["stop", "length"]),
  },
)
REPLY = st.fixed_dictionaries(
  {}, optional={"choices": st.lists(CHOICE, max_size=2) | JSON, "usage": JSON}
)


@hypothesis.settings(deadline=None)
@hypothesis.given(reply=REPLY | JSON)
def test_no_whole_reply_ends_in_a_traceback(reply):
  """It is read, or refused as a value of another shape."""
  try:
    choice = reply["choices"][0]
  except (KeyError, IndexError, TypeError):
    return
  request = types.GenerateRequest(
    types.Address(0, 0, 0), 0, (1,), 50, ("</search>", "</answer>")
  )
  try:
    message = chat_completions._read_message(choice)
  except (KeyError, IndexError, TypeError, AttributeError):
    return  # What OpenAIEndpoint.ask takes for another shape.
  if message is not None:
    for tools in (False, True):
      try:
        chat_completions._turn_of_message(
          message, request, chat.PLAIN, tools=tools
        )
      except types.EngineError:
        pass


@hypothesis.settings(deadline=None)
@hypothesis.given(chunks=st.lists(REPLY | JSON, max_size=6))
def test_no_stream_ends_in_a_traceback(chunks):
  told = []
  joiner = openai_endpoint._StreamJoiner(told.append)
  try:
    for chunk in chunks:
      joiner.feed(f"data: {json.dumps(chunk)}\n\n".encode())
    joiner.feed(b"data: [DONE]\n\n")
    whole = json.loads(joiner.whole())
  except openai_endpoint.httpx2.RemoteProtocolError:
    return
  assert whole["choices"][0]["message"] is not None
