"""The official client of the Model Context Protocol over streamable HTTP."""

from __future__ import annotations

import asyncio
import os

import mcp


def _with_client(use):
  """Returns what `use` returns for a client."""

  async def run():
    async with mcp.Client(os.environ["ANYSEARCH_MCP_URL"]) as client:
      return await use(client)

  return asyncio.run(asyncio.wait_for(run(), 60))


def test_tools_and_their_results():
  async def use(client):
    tools = (await client.list_tools()).tools
    found = await client.call_tool("search", {"query": "emma"})
    asked = {"question": "Who wrote Emma?", "budget": 2}
    answered = await client.call_tool("answer", asked)
    uri = answered.structured_content["trajectory"]
    return tools, found, answered, await client.read_resource(uri)

  tools, found, answered, trajectory = _with_client(use)
  assert [tool.name for tool in tools] == ["answer", "search"]
  assert found.structured_content["passages"][0]["id"] == "7"
  assert answered.structured_content["answer"] == "Jane"
  assert '"Jane"' in trajectory.contents[0].text


def test_wrong_argument_is_one_sentence():
  async def use(client):
    return await client.call_tool("answer", {"question": 3, "budget": 1})

  result = _with_client(use)
  (content,) = result.content
  assert result.is_error
  assert content.text == "question: found 3, expected a valid string."
