"""The official OpenAI client against the service, both APIs."""

from __future__ import annotations

import json
import typing

import httpx2
import openai
import pytest
import response_models
import scripted
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params
from scripted import CODEC, answer, search
from served_agent import SERVED, script, served

CHAT = {"messages": [{"role": "user", "content": "Who?"}]}


@pytest.fixture(scope="module")
def client():
  with served() as (url, _):
    yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_response_has_reasoning_searches_and_a_message_with_citations(client):
  response = client.responses.create(
    model="tiny", input="Who wrote Emma?", max_tool_calls=2
  )
  assert response.status == "completed"
  assert response.output_text == "Jane"
  kinds = [item.type for item in response.output]
  assert kinds == ["reasoning", "web_search_call", "reasoning", "message"]
  _, call, _, message = response.output
  assert call.action.query == "emma" and call.status == "completed"
  urls = ["urn:passage:7", "https://example.org/a"]
  assert [source.url for source in call.action.sources] == urls
  cited = message.content[0].annotations
  assert [(c.url, c.title) for c in cited] == [
    (urls[0], "Emma"),
    (urls[1], "A page"),
  ]
  assert response.max_tool_calls == 2
  usage = response.usage
  assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0
  assert usage.searches == 1


def test_stream_of_a_response_is_the_response(client):
  told = list(
    client.responses.create(
      model="tiny", input="Who wrote Emma?", max_tool_calls=2, stream=True
    )
  )
  assert [event.sequence_number for event in told] == list(range(len(told)))
  assert [event.type.removeprefix("response.") for event in told] == [
    *("created", "in_progress"),
    *("output_item.added", "content_part.added", "reasoning_text.delta"),
    *("reasoning_text.done", "content_part.done", "output_item.done"),
    *("output_item.added", "web_search_call.in_progress"),
    *("web_search_call.searching", "web_search_call.completed"),
    "output_item.done",
    *("output_item.added", "content_part.added", "reasoning_text.delta"),
    *("reasoning_text.done", "content_part.done", "output_item.done"),
    *("output_item.added", "content_part.added", "output_text.delta"),
    *("output_text.annotation.added", "output_text.annotation.added"),
    *("output_text.done", "content_part.done", "output_item.done"),
    "completed",
  ]
  final = told[-1].response
  done = [e.item for e in told if e.type == "response.output_item.done"]
  assert final.output == done and final.output_text == "Jane"
  text = "".join(
    e.delta for e in told if e.type == "response.reasoning_text.delta"
  )
  assert text == "lookknown"


def _bug(request):
  if request.turn:
    raise ZeroDivisionError
  return search("emma")


@pytest.mark.parametrize(
  "script, last",
  [
    (lambda r: answer("J") if r.turn == 2 else search("emma"), "completed"),
    (lambda _: "no action", "failed"),
    (lambda _: "x" * 5000, "incomplete"),
    (_bug, "error"),
  ],
)
def test_every_event_is_strictly_one_of_the_clients_types(script, last):
  with served(engine=scripted.Engine(script)) as (url, _):
    body = {"input": "Who?", "max_tool_calls": 2, "stream": True}
    lines = httpx2.post(f"{url}/v1/responses", json=body).text.splitlines()
  told = [json.loads(each[6:]) for each in lines if each.startswith("data: ")]
  assert [each["sequence_number"] for each in told] == list(range(len(told)))
  for each in told:
    response_models.check(each)
  assert told[-1]["type"].removeprefix("response.") == last
  items = [each for each in told if "output_item" in each["type"]]
  for added, done in zip(items[::2], items[1::2], strict=True):
    assert (added["type"][-5:], done["type"][-4:]) == ("added", "done")
    assert added["item"]["id"] == done["item"]["id"]


def test_chat_completion_has_answer_reasoning_and_usage(client):
  completion = client.chat.completions.create(
    model="tiny", **CHAT, extra_body={"max_tool_calls": 3}
  )
  (choice,) = completion.choices
  assert choice.message.content == "Jane" and choice.finish_reason == "stop"
  assert "search 1: emma" in choice.message.reasoning_content
  assert choice.message.annotations[0].url_citation.url == "urn:passage:7"
  assert completion.usage.searches == 1


def test_chat_stream_adds_up_to_the_completion(client):
  asked = {"stream": True, "stream_options": {"include_usage": True}}
  chunks = list(client.chat.completions.create(model="tiny", **CHAT, **asked))
  deltas = [c.choices[0].delta for c in chunks if c.choices]
  assert "".join(d.content or "" for d in deltas) == "Jane"
  reasoning = "".join(
    getattr(d, "reasoning_content", None) or "" for d in deltas
  )
  assert reasoning.startswith("look") and "found: " in reasoning
  assert chunks[-1].usage.searches == 1
  assert chunks[-2].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
  "how, budget",
  [
    ({"model": "tiny@0"}, 0),
    ({"model": "anysearch@3"}, 3),
    ({"extra_body": {"max_tool_calls": 5}}, 5),
    ({"tool_choice": "none"}, 0),
    ({}, 2),
  ],
)
def test_budget_is_where_a_client_can_say_it(client, how, budget):
  asked = {"model": "tiny"} | how
  completion = client.chat.completions.create(**CHAT, **asked)
  assert completion.choices[0].anysearch["budget"] == budget
  assert completion.model == asked["model"]


def test_answer_has_the_seed_of_its_request():
  def by_seed(request):
    return answer(f"seed {request.address.rollout}")

  with served(engine=scripted.Engine(by_seed)) as (url, _):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    asked = CHAT | {"model": "tiny", "seed": 7}
    completion = client.chat.completions.create(**asked)
    assert completion.choices[0].message.content == "seed 7"


def test_earlier_turns_are_given_as_context(client):
  seen = []

  def remember(request):
    seen.append(CODEC.decode(request.token_ids))
    return answer("Jane")

  with served(engine=scripted.Engine(remember)) as (url, _):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    parts = [{"type": "input_text", "text": "And Persuasion?"}]
    said = [
      {"role": "user", "content": "Who wrote Emma?"},
      {"role": "assistant", "content": "Jane."},
      {"role": "user", "content": parts},
    ]
    asked = {"instructions": "Be brief.", "input": said}
    client.responses.create(model="tiny", **asked)
  assert (
    "instructions: Be brief.\nuser: Who wrote Emma?\nassistant: Jane.\n"
    "question: And Persuasion?"
  ) in seen[0]


def test_models_and_examples(client):
  assert [model.id for model in client.models.list()] == ["tiny"]
  assert client.get("/../examples", cast_to=object) == ["Who wrote Emma?"]
  for name in ("tiny", "anysearch", "tiny@3"):
    assert client.models.retrieve(name).id == name
  with pytest.raises(openai.NotFoundError) as refused:
    client.models.retrieve("gpt/9")
  assert refused.value.code == "model_not_found"


def test_accumulated_stream_has_one_role(client):
  with client.chat.completions.stream(model="tiny", **CHAT) as stream:
    message = stream.get_final_completion().choices[0].message
  assert (message.role, message.content) == ("assistant", "Jane")


_REPLIES = {
  "answered": script,
  "unanswered": lambda _: "nothing",
  "truncated": lambda _: "x" * 5000,
  "unanswered after a search": (
    lambda request: "nothing" if request.turn else search("emma")
  ),
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("script", _REPLIES.values(), ids=_REPLIES.keys())
def test_every_reply_can_be_sent_back(script, streams):
  turn = {"role": "user", "content": "And Persuasion?"}
  with served(engine=scripted.Engine(script)) as (url, _):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chat, responses = client.chat.completions, client.responses
    if streams:
      # `get_final_completion` raises for a cut answer.
      with chat.stream(model="tiny", **CHAT) as stream:
        stream.until_done()
        message = stream.current_completion_snapshot.choices[0].message
      *_, last = responses.create(model="tiny", input="Who?", stream=True)
      response = last.response
    else:
      message = chat.create(model="tiny", **CHAT).choices[0].message
      response = responses.create(model="tiny", input="Who?")
    for back in (
      message,
      message.model_dump(),
      message.model_dump(exclude_none=True),
    ):
      messages = [*CHAT["messages"], back, turn]
      assert chat.create(model="tiny", messages=messages).choices
    for output in (
      response.output,
      [item.model_dump() for item in response.output],
    ):
      items = [{"role": "user", "content": "Who?"}, *output, turn]
      assert responses.create(model="tiny", input=items).id


def test_refusal_of_an_earlier_question_is_history():
  seen = []

  def remember(request):
    seen.append(CODEC.decode(request.token_ids))
    return answer("Jane")

  refused = {"role": "assistant", "content": None, "refusal": "No answer."}
  call = {"function": {"name": "f", "arguments": "{}"}, "id": "1"}
  with served(engine=scripted.Engine(remember)) as (url, _):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages = [*CHAT["messages"], refused, *CHAT["messages"]]
    client.chat.completions.create(model="tiny", messages=messages)
    refused["tool_calls"] = [call | {"type": "function"}]
    with pytest.raises(openai.BadRequestError, match="messages"):
      client.chat.completions.create(model="tiny", messages=messages)
  assert "user: Who?\nassistant: No answer.\nquestion: Who?" in seen[0]


# What means the same as an absent field, of each parameter of the client.
# None: the parameter has no such value.
_BOTH_NEUTRAL = {
  "metadata": {},
  "moderation": None,
  "parallel_tool_calls": False,
  "prompt_cache_key": "",
  "prompt_cache_options": {},
  "prompt_cache_retention": "in_memory",
  "safety_identifier": "",
  "service_tier": "auto",
  "store": False,
  "stream": False,
  "stream_options": {},
  "temperature": 1,
  "tool_choice": "auto",
  "tools": [],
  "top_logprobs": 0,
  "top_p": 1,
  "user": "",
}
_CHAT_NEUTRAL = _BOTH_NEUTRAL | {
  "audio": None,
  "frequency_penalty": 0,
  "function_call": "auto",
  "functions": [],
  "logit_bias": {},
  "logprobs": False,
  "max_completion_tokens": 2000,
  "max_tokens": 2000,
  "modalities": ["text"],
  "n": 1,
  "prediction": {"type": "content", "content": ""},
  "presence_penalty": 0,
  "reasoning_effort": "none",
  "response_format": {"type": "text"},
  "seed": 0,
  "stop": [],
  "verbosity": "medium",
  "web_search_options": {},
}
_RESPONSES_NEUTRAL = _BOTH_NEUTRAL | {
  "access_programs": {},
  "background": False,
  "background_options": {},
  "context_management": [],
  "conversation": None,
  "image": {},
  "include": [],
  "instructions": "",
  "max_output_tokens": 2000,
  "max_tool_calls": 2,
  "previous_response_id": None,
  "prompt": None,
  "reasoning": {},
  "text": {"format": {"type": "text"}, "verbosity": "medium"},
  "truncation": "disabled",
}


@pytest.mark.parametrize(
  ("params", "neutral", "question"),
  [
    (completion_create_params.CompletionCreateParamsBase, _CHAT_NEUTRAL, CHAT),
    (
      response_create_params.ResponseCreateParamsBase,
      _RESPONSES_NEUTRAL,
      {"input": "Who?"},
    ),
  ],
)
def test_neutral_value_of_every_parameter_is_accepted(
  client, params, neutral, question
):
  path = "/chat/completions" if "messages" in question else "/responses"
  names = set(typing.get_type_hints(params)) - {"model", *question}
  assert not names - set(neutral)
  client.post(path, body=question | neutral, cast_to=object)
  for name, value in neutral.items():
    for same in (value, None):
      client.post(path, body=question | {name: same}, cast_to=object)


@pytest.mark.parametrize(
  "field",
  [
    {"logit_bias": {"50256": 1}},
    {"top_logprobs": 2},
    {"functions": [{"name": "f"}]},
    {"function_call": {"name": "f"}},
    {"modalities": ["text", "audio"]},
    {"audio": {"voice": "alloy", "format": "wav"}},
  ],
)
def test_the_same_fields_with_an_effect_are_refused(client, field):
  with pytest.raises(openai.BadRequestError) as refused:
    client.post("/chat/completions", body=CHAT | field, cast_to=object)
  (name,) = field
  assert refused.value.body["param"].partition(".")[0] == name


@pytest.mark.parametrize(
  "body, param",
  [
    ({"messages": []}, "messages"),
    (CHAT | {"temperature": 2.1}, "temperature"),
    (CHAT | {"top_p": 0}, "top_p"),
    (CHAT | {"top_k": 5}, "top_k"),
    (CHAT | {"stop": ["x", ""]}, "stop"),
    (CHAT | {"stop": 1}, "stop"),
    (CHAT | {"n": 99}, "n"),
    (CHAT | {"seed": -1}, "seed"),
    (CHAT | {"max_tokens": 0}, "max_tokens"),
    (CHAT | {"max_tool_calls": -1}, "max_tool_calls"),
    (CHAT | {"max_tool_calls": 6}, "max_tool_calls"),
    (CHAT | {"max_tool_calls": 1, "model": "tiny@2"}, "max_tool_calls"),
    (CHAT | {"n": 2}, "n"),
    (CHAT | {"model": "tiny@x"}, "model"),
    (CHAT | {"deadline": 0}, "deadline"),
    (CHAT | {"budget": 3}, "budget"),
    (CHAT | {"budget": "tokens=many"}, "budget"),
    (CHAT | {"budget": "searches=6"}, "budget"),
    (CHAT | {"budget": "dollars=0.02"}, "budget"),
    (CHAT | {"budget": "searches=1", "max_tool_calls": 2}, "budget"),
    (CHAT | {"stream": "yes"}, "stream"),
    (CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT | {"tools": [{"type": "function", "function": {}}]}, "tools"),
    (CHAT | {"tool_choice": "required"}, "tool_choice"),
    (CHAT | {"no_such_field": 1}, "no_such_field"),
    (CHAT | {"logprobs": True}, "logprobs"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    (
      {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
      "messages",
    ),
    ({}, "input"),
    ({"input": 3}, "input"),
    ({"input": "Who?", "tools": [{"type": "file_search"}]}, "tools"),
    ({"input": "Who?", "previous_response_id": "x"}, "previous_response_id"),
    ({"input": "Who?", "background": True}, "background"),
    ({"input": "Who?", "max_output_tokens": 0}, "max_output_tokens"),
    (
      {"input": "Who?", "text": {"format": {"type": "json_schema"}}},
      "text.format",
    ),
  ],
)
def test_field_that_cannot_be_honoured_is_refused_by_name(client, body, param):
  path = "/chat/completions" if "messages" in body else "/responses"
  with pytest.raises(openai.BadRequestError) as refused:
    client.post(path, body=body, cast_to=object)
  assert refused.value.body["param"] == param
  assert refused.value.body["type"] == "invalid_request_error"
  assert "expected" in refused.value.body["message"]


def test_no_question_and_no_such_model(client):
  with pytest.raises(openai.BadRequestError, match="question"):
    client.responses.create(model="tiny", input="  ")
  with pytest.raises(openai.NotFoundError) as refused:
    client.responses.create(model="gpt-9", input="Who?")
  assert refused.value.code == "model_not_found"


def test_search_tools_and_harmless_fields_are_accepted(client):
  fields = {
    **{"input": "Who?", "tools": [{"type": "web_search"}], "store": False},
    **{"temperature": 1, "top_p": 1.0, "metadata": {"a": "b"}, "user": "me"},
    **{"parallel_tool_calls": False, "reasoning": {"effort": "low"}},
    **{"include": ["web_search_call.action.sources"], "truncation": "auto"},
    "text": {"format": {"type": "text"}},
  }
  response = client.responses.create(model="tiny", **fields)
  assert response.output_text == "Jane"


def test_policy_without_an_answer_is_a_typed_reason():
  with served(engine=scripted.Engine(lambda _: "nothing")) as (url, _):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    response = client.responses.create(model="tiny", input="Who?")
    assert response.status == "failed"
    assert "answer" in response.error.message
    completion = client.chat.completions.create(model="tiny", **CHAT)
    message = completion.choices[0].message
    assert message.content is None and "answer" in message.refusal


def test_tokens_that_run_out_are_incomplete():
  with served(engine=scripted.Engine(lambda _: "x" * 5000)) as (url, _):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    response = client.responses.create(
      model="tiny", input="Who?", max_output_tokens=50
    )
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens <= 50
    completion = client.chat.completions.create(
      model="tiny", max_completion_tokens=50, **CHAT
    )
    assert completion.choices[0].finish_reason == "length"


def test_budget_of_several_units_holds_and_is_told(client):
  budget = {"budget": "searches=1,tokens=900,seconds=30"}
  asked = CHAT | {"model": "tiny"}
  both = client.chat.completions.create(**asked, extra_body=budget)
  told = both.choices[0].anysearch
  assert told["budget"] == 1 and told["outcome"] == "answered"
  assert told["caps"] == {"tokens": 900, "seconds": 30}
  budget = {"budget": "tokens=20"}
  few = client.chat.completions.create(**asked, extra_body=budget)
  assert few.choices[0].anysearch["budget"] == 2
  assert few.usage.completion_tokens <= 20


def drawn(ask, served_as=SERVED):
  """Returns how the engine was asked to draw, and the answer to `ask`."""
  engine = scripted.Engine(lambda _: answer("Jane Austen, 1815"))
  with served(engine=engine, served=served_as) as (url, _):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    found = ask(client)
  (request,) = engine.requests
  return (request.temperature, request.top_p, request.top_k), found


@pytest.mark.parametrize(
  "asked, expected",
  [
    ({"temperature": 1, "top_p": 1.0}, (None, None, None)),
    ({"temperature": 0.3, "top_p": 0.5}, (0.3, 0.5, 0)),
  ],
)
def test_both_apis_pass_a_requests_own_sampling_to_the_engine(asked, expected):
  by_chat, _ = drawn(
    lambda c: c.chat.completions.create(model="tiny", **CHAT, **asked)
  )
  by_response, response = drawn(
    lambda c: c.responses.create(model="tiny", input="Who?", **asked)
  )
  assert by_chat == by_response == expected
  assert response.temperature == asked.get("temperature", 1)
  assert response.top_p == asked.get("top_p", 1)


def test_answer_is_cut_before_the_first_stop_text():
  stop, expected = [" 18", "Aus"], "Jane "
  _, chat = drawn(
    lambda c: c.chat.completions.create(model="tiny", **CHAT, stop=stop)
  )
  assert chat.choices[0].message.content == expected
  _, chunks = drawn(
    lambda c: list(
      c.chat.completions.create(model="tiny", **CHAT, stop=stop, stream=True)
    )
  )
  deltas = [chunk.choices[0].delta.content or "" for chunk in chunks]
  assert "".join(deltas) == expected
  _, response = drawn(
    lambda c: c.responses.create(
      model="tiny", input="Who?", extra_body={"stop": stop}
    )
  )
  assert response.output_text == expected
  assert response.output[-1].type == "message"
