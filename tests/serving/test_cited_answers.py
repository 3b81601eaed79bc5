"""Citations of documents in both of OpenAI's APIs and over MCP."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import httpx2
import openai
import pytest
import scripted
import test_mcp_server
from scripted import answer, search
from served_agent import CONFIG, served

from anysearch_jax import types

LEASE = types.Passage(
  "notes/lease.pdf#3",
  '"Lease"',
  "It ends in March, see [2].",
  source=types.Source("/home/joe/notes/lease.pdf", 3, "Term > End"),
)
PETS = types.Passage("pets.md#1", "Pets", "None.")
HITS = {"lease end": [LEASE, PETS], "pets": [PETS]}
TURNS = (search("lease end"), search("pets"), answer("March [1], no [7] [2]."))
DOCUMENTS = dataclasses.replace(CONFIG, prompts="documents")
CITED = {"path": "notes/lease.pdf", "page": 3, "heading": "Term > End"}


@pytest.fixture(scope="module")
def engine():
  def said(request):
    asked = scripted.CODEC.decode(request.token_ids)
    gives_up = request.turn and "Why?" in asked
    return answer("Unknown.") if gives_up else TURNS[request.turn]

  return scripted.Engine(said)


@pytest.fixture(scope="module")
def url(engine):
  found = scripted.Retriever(HITS)
  with served(engine=engine, retriever=found, config=DOCUMENTS) as (url, _):
    yield url


@pytest.fixture(scope="module")
def client(url):
  return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_response_cites_at_its_marks_and_names_no_folder(client):
  response = client.responses.create(input="When?", max_tool_calls=2)
  assert response.output_text == "March [1], no [2]."
  first, second = response.output[-1].content[0].annotations
  assert response.output_text[first.start_index : first.end_index] == "[1]"
  assert first.url == "urn:passage:notes/lease.pdf%233"
  assert first.number == 1 and first.title == "Lease"
  assert {name: getattr(first, name) for name in CITED} == CITED
  assert (second.number, second.url) == (2, "urn:passage:pets.md%231")
  assert response.anysearch["refused_citations"] == [7]
  calls = [i for i in response.output if i.type == "web_search_call"]
  numbers = [[found["number"] for found in call.results] for call in calls]
  assert numbers == [[1, 2], [2]] and calls[0].results[0]["source"] == CITED
  assert "/home" not in response.model_dump_json()


def test_chat_cites_and_takes_earlier_citations_for_history(client, engine):
  engine.requests.clear()
  completion = client.chat.completions.create(
    model="tiny",
    messages=[
      {"role": "user", "content": "Pets?"},
      {"role": "assistant", "content": "None [3]."},
      {"role": "user", "content": "And cats, see [3]?"},
    ],
  )
  cited = completion.choices[0].message.annotations
  assert [each.url_citation.number for each in cited] == [1, 2]
  assert "/home" not in completion.model_dump_json()
  prompt = scripted.CODEC.decode(engine.requests[0].token_ids)
  assert "user: Pets?\nassistant: None.\nquestion: And cats, see [3]?" in prompt


def test_answer_without_marks_has_no_citation(client):
  response = client.responses.create(input="Why?", max_tool_calls=2)
  assert response.output_text == "Unknown." and response.usage.searches == 1
  assert response.output[-1].content[0].annotations == []


def test_mcp_tells_what_was_cited(monkeypatch):
  agent = test_mcp_server.scripted_agent
  monkeypatch.setattr(agent, "CONFIG", DOCUMENTS)
  result = test_mcp_server.ask(
    engine=scripted.Engine(TURNS), retriever=scripted.Retriever(HITS)
  ).structured_content
  assert result["answer"] == "March [1], no [2]."
  named = {"number": 1, "id": "notes/lease.pdf#3", "title": "Lease"}
  assert result["citations"][0] == named | CITED
  assert result["refused_citations"] == [7]
  assert "/home" not in json.dumps(result)


class Words(scripted.Codec):
  """Knows the letters of one word."""

  hf = SimpleNamespace(unk_token_id=0)

  def encode(self, text):
    return [ord(c) if c in "emma <>|/ut" else 0 for c in text]


def test_unknown_words_are_refused_by_both_apis(monkeypatch):
  monkeypatch.setattr("served_agent.CODEC", Words())
  engine = scripted.Engine(())
  asked = {
    "responses": {"input": "Where?"},
    "chat/completions": {"messages": [{"role": "user", "content": "Where?"}]},
  }
  with served(engine=engine) as (url, _):
    for path, body in asked.items():
      told = httpx2.post(f"{url}/v1/{path}", json=body)
      assert told.status_code == 400
      assert "no word for 'Where?'" in told.json()["error"]["message"]
  assert not engine.requests
