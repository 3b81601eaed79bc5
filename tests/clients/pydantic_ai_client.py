"""PydanticAI plays a session, by both of the APIs."""

from __future__ import annotations

import asyncio
import os

import pydantic_ai
import pytest
from pydantic_ai.models import openai
from pydantic_ai.providers import openai as providers


@pytest.fixture(params=[openai.OpenAIChatModel, openai.OpenAIResponsesModel])
def agent(request):
  provider = providers.OpenAIProvider(
    base_url=os.environ["ANYSEARCH_SESSION_URL"],
    api_key=os.environ["ANYSEARCH_SESSION_KEY"],
  )
  agent = pydantic_ai.Agent(
    request.param("gpt-5", provider=provider), instructions="Answer."
  )

  @agent.tool_plain
  def search(query: str) -> str:
    """Searches for documents."""
    return f"{query}: Jane wrote it."

  return agent


def test_run_calls_the_tool_and_answers(agent):
  result = agent.run_sync("Who wrote Emma?")
  assert result.output == "Jane"
  history = result.all_messages()
  again = agent.run_sync("And Persuasion?", message_history=history)
  assert again.output == "Jane"


async def _streamed(agent):
  async with agent.run_stream("Who wrote Emma?") as result:
    return await result.get_output()


def test_streamed_run_answers(agent):
  assert asyncio.run(_streamed(agent)) == "Jane"
