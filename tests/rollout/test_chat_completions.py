"""The engine over chat completions, against a server of known behaviour."""

from __future__ import annotations

import json

import chat_endpoint
import openai
import pytest


@pytest.mark.parametrize("streamed", [False, True])
def test_openai_client_reads_the_scripted_server(streamed):
  with chat_endpoint.served("reasoning", queries=["when?"], key="k") as server:
    client = openai.OpenAI(base_url=server.url, api_key="k", max_retries=0)
    messages = [{"role": "user", "content": "When does the lease end?"}]
    tool = {"type": "function", "function": {"name": "search"}}
    asked = {"model": "scripted", "messages": messages, "tools": [tool]}
    if streamed:
      with client.chat.completions.stream(**asked) as stream:
        reply = stream.get_final_completion()
    else:
      reply = client.chat.completions.create(**asked)
    assert [m.id for m in client.models.list()] == ["scripted"]
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "search"
    assert json.loads(call.function.arguments) == {"query": "when?"}
    assert reply.choices[0].finish_reason == "tool_calls"
    server.faults.append(chat_endpoint.Fault(429, retry_after="1"))
    with pytest.raises(openai.RateLimitError):
      client.chat.completions.create(**asked)
