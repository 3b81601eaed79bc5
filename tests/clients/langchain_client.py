"""LangChain's client of OpenAI: messages, streams, batches, conversations."""

from __future__ import annotations

import os

import langchain_openai
import pytest
from langchain_core import messages, tools


@pytest.fixture(scope="module", params=[False, True], ids=["chat", "responses"])
def model(request):
  return langchain_openai.ChatOpenAI(
    base_url=os.environ["ANYSEARCH_URL"],
    api_key="none",
    model="tiny",
    max_retries=0,
    use_responses_api=request.param,
  )


def test_answer_and_usage(model):
  message = model.invoke("Who wrote Emma?")
  assert message.text == "Jane"
  assert message.usage_metadata["output_tokens"] > 0


def test_stream_adds_up_to_the_answer(model):
  pieces = list(model.stream("Who wrote Emma?"))
  assert "".join(piece.text for piece in pieces) == "Jane"


def test_batch(model):
  assert [m.text for m in model.batch(["Who?", "Where?"])] == ["Jane", "Jane"]


def test_conversation(model):
  question = messages.HumanMessage("Who wrote Emma?")
  first = model.invoke([messages.SystemMessage("Be brief."), question])
  assert model.invoke([question, first, question]).text == "Jane"


def test_conversation_goes_on_after_an_unanswered_question():
  model = langchain_openai.ChatOpenAI(
    base_url=os.environ["ANYSEARCH_URL"], api_key="none", model="tiny"
  )
  unanswerable = messages.HumanMessage("Who? It is unanswerable.")
  question = messages.HumanMessage("Who wrote Emma?")
  first = model.invoke([unanswerable])
  assert first.additional_kwargs["refusal"]
  assert model.invoke([unanswerable, first, question]).text == "Jane"


@tools.tool
def search(query: str) -> str:
  """Searches for documents.

  Args:
    query: the words to search for.
  """
  return f"{query}: Jane wrote it."


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("use_responses_api", [False, True])
def test_loop_of_tools_plays_a_session(use_responses_api, streams):
  model = langchain_openai.ChatOpenAI(
    base_url=os.environ["ANYSEARCH_SESSION_URL"],
    api_key=os.environ["ANYSEARCH_SESSION_KEY"],
    model="gpt-5",
    use_responses_api=use_responses_api,
    streaming=streams,
  ).bind_tools([search])
  conversation = [messages.HumanMessage("Who wrote Emma?")]
  conversation.append(model.invoke(conversation))
  (call,) = conversation[-1].tool_calls
  conversation.append(search.invoke(call))
  assert model.invoke(conversation).text == "Jane"
