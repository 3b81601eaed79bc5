"""LiteLLM's calls of an endpoint of OpenAI's kind."""

from __future__ import annotations

import os

# Otherwise the import downloads a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import pytest

SETTINGS = {
  "model": "openai/tiny",
  "api_base": os.environ["ANYSEARCH_URL"],
  "api_key": "none",
}
QUESTION = {"role": "user", "content": "Who wrote Emma?"}


def test_completion():
  completion = litellm.completion(messages=[QUESTION], **SETTINGS)
  assert completion.choices[0].message.content == "Jane"
  assert completion.usage.completion_tokens > 0


def test_stream_adds_up_to_the_completion():
  chunks = list(
    litellm.completion(messages=[QUESTION], stream=True, **SETTINGS)
  )
  completion = litellm.stream_chunk_builder(chunks)
  message = completion.choices[0].message
  assert (message.role, message.content) == ("assistant", "Jane")


def test_response():
  response = litellm.responses(input="Who wrote Emma?", **SETTINGS)
  (message,) = [item for item in response.output if item.type == "message"]
  assert message.content[0].text == "Jane"


def test_conversation_goes_on_after_an_unanswered_question():
  unanswerable = {"role": "user", "content": "Who? It is unanswerable."}
  first = litellm.completion(messages=[unanswerable], **SETTINGS)
  reply = first.choices[0].message
  assert not reply.content
  messages = [unanswerable, reply, QUESTION]
  again = litellm.completion(messages=messages, **SETTINGS)
  assert again.choices[0].message.content == "Jane"


def test_refusal_is_a_bad_request():
  with pytest.raises(litellm.BadRequestError, match="temperature: found 5"):
    litellm.completion(messages=[QUESTION], temperature=5, **SETTINGS)
