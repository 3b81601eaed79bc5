"""LlamaIndex's models: an endpoint like OpenAI's, and its Responses API."""

from __future__ import annotations

import os

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses

QUESTION = ChatMessage("Who wrote Emma?", role="user")


@pytest.fixture(scope="module", params=[OpenAILike, OpenAILikeResponses])
def model(request):
  return request.param(
    model="tiny",
    api_base=os.environ["ANYSEARCH_URL"],
    api_key="none",
    is_chat_model=True,
    max_retries=0,
  )


def test_answer(model):
  assert model.chat([QUESTION]).message.content == "Jane"


def test_complete(model):
  assert model.complete("Who wrote Emma?").text == "Jane"


def test_stream_adds_up_to_the_answer(model):
  *_, last = model.stream_chat([QUESTION])
  assert last.message.content == "Jane"


def test_conversation(model):
  first = model.chat([QUESTION]).message
  assert model.chat([QUESTION, first, QUESTION]).message.content == "Jane"


def test_conversation_goes_on_after_an_unanswered_question(model):
  unanswerable = ChatMessage("Who? It is unanswerable.", role="user")
  first = model.chat([unanswerable]).message
  assert not first.content
  again = model.chat([unanswerable, first, QUESTION])
  assert again.message.content == "Jane"
