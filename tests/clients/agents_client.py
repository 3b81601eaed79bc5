"""OpenAI's Agents SDK plays a session, by both of the APIs."""

from __future__ import annotations

import asyncio
import os

import agents
import openai
import pytest

agents.set_tracing_disabled(True)


@agents.function_tool
def search(query: str) -> str:
  """Searches for documents."""
  return f"{query}: Jane wrote it."


@pytest.fixture(
  params=[agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel]
)
def agent(request):
  client = openai.AsyncOpenAI(
    base_url=os.environ["ANYSEARCH_SESSION_URL"],
    api_key=os.environ["ANYSEARCH_SESSION_KEY"],
  )
  model = request.param("gpt-5", openai_client=client)
  return agents.Agent(
    "searcher", instructions="Answer.", model=model, tools=[search]
  )


def test_run_calls_the_tool_and_answers(agent):
  result = agents.Runner.run_sync(agent, "Who wrote Emma?")
  assert result.final_output == "Jane"
  kinds = [item.type for item in result.new_items]
  assert kinds == ["tool_call_item", "tool_call_output_item"] + [
    "message_output_item"
  ]


async def _streamed(agent):
  result = agents.Runner.run_streamed(agent, "Who wrote Emma?")
  kinds = [event.type async for event in result.stream_events()]
  return kinds, result.final_output


def test_streamed_run_answers(agent):
  kinds, answer = asyncio.run(_streamed(agent))
  assert answer == "Jane" and "raw_response_event" in kinds


def test_run_goes_on_after_an_answer(agent):
  first = agents.Runner.run_sync(agent, "Who wrote Emma?")
  question = {"role": "user", "content": "And Persuasion?"}
  again = agents.Runner.run_sync(agent, [*first.to_input_list(), question])
  assert again.final_output == "Jane"
