"""OpenAI's client, newest and oldest: both APIs, streams, conversations."""

from __future__ import annotations

import asyncio
import os

import openai
import pytest

QUESTION = {"role": "user", "content": "Who wrote Emma?"}
UNANSWERABLE = {"role": "user", "content": "Who? It is unanswerable."}


@pytest.fixture(scope="module")
def client():
  return openai.OpenAI(
    base_url=os.environ["ANYSEARCH_URL"], api_key="none", max_retries=0
  )


def _accumulated(client, messages):
  """Returns the message that the client makes of a stream."""
  completions = client.chat.completions
  if not hasattr(completions, "stream"):  # Where older versions have it.
    completions = client.beta.chat.completions
  with completions.stream(model="tiny", messages=messages) as stream:
    return stream.get_final_completion().choices[0].message


def _complete(client, messages):
  completion = client.chat.completions.create(model="tiny", messages=messages)
  return completion.choices[0].message


def test_models(client):
  assert [model.id for model in client.models.list()] == ["tiny"]
  assert client.models.retrieve("tiny").id == "tiny"
  with pytest.raises(openai.NotFoundError):
    client.models.retrieve("gpt-9")


@pytest.mark.parametrize("ask", [_complete, _accumulated])
def test_chat_completion(client, ask):
  message = ask(client, [QUESTION])
  assert (message.role, message.content) == ("assistant", "Jane")
  annotation, *_ = message.to_dict()["annotations"]
  assert annotation["url_citation"]["url"] == "urn:passage:7"


@pytest.mark.parametrize("ask", [_complete, _accumulated])
def test_conversation_goes_on_after_an_unanswered_question(client, ask):
  unanswered = ask(client, [UNANSWERABLE])
  assert not unanswered.content and "answer" in unanswered.refusal
  again = ask(client, [UNANSWERABLE, unanswered, QUESTION])
  assert again.content == "Jane"
  values = unanswered.model_dump(exclude_none=True)
  assert ask(client, [UNANSWERABLE, values, QUESTION]).content == "Jane"


def test_usage_of_a_stream_is_in_its_last_chunk(client):
  chunks = list(
    client.chat.completions.create(
      model="tiny",
      messages=[QUESTION],
      stream=True,
      stream_options={"include_usage": True},
    )
  )
  pieces = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
  assert "".join(piece.content or "" for piece in pieces) == "Jane"
  assert [piece.role for piece in pieces if piece.role] == ["assistant"]
  assert chunks[-1].usage.completion_tokens > 0


def test_response_and_its_stream(client):
  request = {"model": "tiny", "input": "Who wrote Emma?"}
  response = client.responses.create(**request)
  assert (response.status, response.output_text) == ("completed", "Jane")
  *_, last = client.responses.create(**request, stream=True)
  assert last.type == "response.completed"
  assert last.response.output_text == "Jane"


def test_responses_can_be_sent_back(client):
  for question, status in ((QUESTION, "completed"), (UNANSWERABLE, "failed")):
    response = client.responses.create(model="tiny", input=[question])
    assert response.status == status
    back = [question, *response.output, QUESTION]
    again = client.responses.create(model="tiny", input=back)
    assert again.output_text == "Jane"


def test_refusal_is_an_error_with_its_field(client):
  with pytest.raises(openai.BadRequestError, match="temperature: found 5"):
    client.chat.completions.create(
      model="tiny", messages=[QUESTION], temperature=5
    )


async def _ask_in_a_loop():
  async with openai.AsyncOpenAI(
    base_url=os.environ["ANYSEARCH_URL"], api_key="none"
  ) as client:
    completion = await client.chat.completions.create(
      model="tiny", messages=[QUESTION]
    )
    return completion.choices[0].message.content


def test_asynchronous_client():
  assert asyncio.run(_ask_in_a_loop()) == "Jane"
