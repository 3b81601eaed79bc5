"""smolagents plays a session: agents of code and of calls, by two clients."""

from __future__ import annotations

import os

# Otherwise the import of LiteLLM downloads a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import pytest
import smolagents

SETTINGS = {
  "api_base": os.environ["ANYSEARCH_SESSION_URL"],
  "api_key": os.environ["ANYSEARCH_SESSION_KEY"],
}


@smolagents.tool
def search(query: str) -> str:
  """Searches for documents.

  Args:
    query: the words to search for.
  """
  return f"{query}: Jane wrote it."


@pytest.fixture(params=["openai", "litellm"])
def make_model(request):
  def make(**settings):
    if request.param == "openai":
      return smolagents.OpenAIModel("gpt-5", **SETTINGS, **settings)
    return smolagents.LiteLLMModel("openai/gpt-5", **SETTINGS, **settings)

  return make


@pytest.mark.parametrize("stream", [False, True])
def test_agent_of_code(make_model, stream):
  agent = smolagents.CodeAgent(
    tools=[search], model=make_model(), stream_outputs=stream, max_steps=2
  )
  assert agent.run("Who wrote Emma?") == "emma: Jane wrote it."


@pytest.mark.parametrize("stream", [False, True])
def test_agent_of_calls(make_model, stream):
  # smolagents asks for a call by force unless it is told otherwise.
  agent = smolagents.ToolCallingAgent(
    tools=[search],
    model=make_model(tool_choice="auto"),
    stream_outputs=stream,
    max_steps=3,
  )
  assert agent.run("Who wrote Emma?") == "Jane"


def test_agent_that_would_force_calls_says_what_to_do(make_model):
  agent = smolagents.ToolCallingAgent(tools=[search], model=make_model())
  with pytest.raises(Exception, match="expected 'auto' or 'none'"):
    agent.run("Who wrote Emma?")
