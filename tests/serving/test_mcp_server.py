"""The MCP tools and resources, asked by the official client."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json

import mcp
import pytest
import scripted
import scripted_agent
import served
from scripted import answer, search
from scripted_agent import Held
from waits import wait_for

from anysearch_jax import budgets, types
from anysearch_jax.serving import mcp_server

EMMA = types.Passage("7", "Emma", "A novel by Jane Austen.")
NOVEL = types.Passage("8", "Novel", "A long text.")
SCRIPT = (search("emma"), search("novel"), answer("Jane"))
HITS = {"emma": [EMMA, NOVEL], "novel": [NOVEL]}


def an_agent(engine=None, retriever=None):
  retriever = retriever or scripted.Retriever(HITS)
  return scripted_agent.make(SCRIPT, engine=engine, retriever=retriever)


@contextlib.contextmanager
def serving(engine=None, retriever=None, **kwargs):
  loaded = concurrent.futures.Future()
  with an_agent(engine, retriever) as agent:
    loaded.set_result(agent)
    yield mcp_server.Service(loaded, version="1", **kwargs)


@contextlib.asynccontextmanager
async def client_of(**kwargs):
  """Yields a client of a service in this process."""
  with serving(**kwargs) as service:
    async with mcp.Client(service.server) as client:
      yield client


def ask(question="Who wrote Emma?", budget=3, told=None, **kwargs):
  """Returns the result of one call of `answer`."""

  async def tell(*progress):
    told.append(progress)

  async def call():
    asked = {"question": question, "budget": budget}
    tells = tell if told is not None else None
    async with client_of(**kwargs) as client:
      return await client.call_tool("answer", asked, progress_callback=tells)

  return asyncio.run(asyncio.wait_for(call(), 30))


def test_answer_is_structured_and_each_search_is_reported_as_progress():
  told = []
  result = ask(told=told)
  found = result.structured_content
  assert not result.is_error
  assert json.loads(result.content[0].text) == found
  assert found["answer"] == "Jane" and found["outcome"] == "answered"
  assert found["reason"] == "" and found["searches"] == 2
  assert found["tokens"] == len("".join(SCRIPT)) and found["seconds"] >= 0
  emma, novel = {"id": "7", "title": "Emma"}, {"id": "8", "title": "Novel"}
  assert found["queries"] == [
    {"query": "emma", "sources": [emma, novel]},
    {"query": "novel", "sources": [novel]},
  ]
  assert told == [(1, 3, "search 1: emma"), (2, 3, "search 2: novel")]


def test_budget_of_several_units_holds():
  found = ask(budget="searches=1,tokens=400", told=(told := []))
  assert found.structured_content["searches"] == 1
  assert found.structured_content["tokens"] <= 400
  assert told == [(1, 1, "search 1: emma")]
  # Without searches in it, the service's largest number holds.
  result = ask(budget="tokens=500", max_budget=1)
  assert result.structured_content["searches"] == 1
  result = ask(budget="dollars=0.01")
  assert result.is_error and "has a price" in result.content[0].text
  priced = budgets.Prices(search=6.0)
  result = ask(budget="dollars=0.01", prices=priced)
  assert result.structured_content["searches"] == 1


@pytest.mark.parametrize(
  ("question", "budget", "expected"),
  [
    ("Who?", 5, "budget: found 5, expected 0 to 4."),
    ("Who?", -1, "budget: found -1, expected 0 to 4."),
    (" ", 1, "question: found no text"),
    ("Who?", "many", "budget"),
    ("Who?", "searches=5", "budget: found 5, expected 0 to 4."),
  ],
)
def test_refused_arguments_are_an_error_result(question, budget, expected):
  engine = scripted.Engine(SCRIPT)
  result = ask(question, budget, engine=engine, max_budget=4)
  assert result.is_error and expected in result.content[0].text
  assert not engine.requests


@pytest.mark.parametrize(
  ("changes", "sentence"),
  [
    (
      {"budget": [1]},
      "budget: found [1], expected a valid integer or a valid string.",
    ),
    ({"question": 3}, "question: found 3, expected a valid string."),
    ({"budget": None}, "budget: found None, expected a valid"),
  ],
)
async def test_argument_of_another_type_is_refused_in_one_sentence(
  changes, sentence
):
  async with client_of() as client:
    call = {"question": "Who?", "budget": 1} | changes
    result = await client.call_tool("answer", call)
    missing = await client.call_tool("answer", {"budget": 1})
  assert result.is_error and result.content[0].text.startswith(sentence)
  assert result.content[0].text.count("\n") == 0
  text = missing.content[0].text
  assert text == "question: found nothing, expected a value."


async def test_search_returns_passages_and_asks_no_policy():
  engine = scripted.Engine(SCRIPT)
  changes = ({}, {"k": 2}, {"k": 0}, {"query": ""})
  calls = [{"query": "emma"} | change for change in changes]
  async with client_of(engine=engine, passages=1) as client:
    first, second, *refused = [
      await client.call_tool("search", call) for call in calls
    ]
  emma = {"id": "7", "title": "Emma", "text": "A novel by Jane Austen."}
  assert first.structured_content == {"passages": [emma]}
  assert len(second.structured_content["passages"]) == 2
  assert "k: found 0" in refused[0].content[0].text
  assert "query: found no text" in refused[1].content[0].text
  assert all(result.is_error for result in refused)
  assert not engine.requests


async def test_trajectory_is_a_resource_until_enough_others_were_kept():
  async with client_of(max_replies=2) as client:
    uris = []
    for _ in range(3):
      result = await client.call_tool("answer", {"question": "?", "budget": 2})
      uris.append(result.structured_content["trajectory"])
    with pytest.raises(mcp.MCPError, match="last 2 are kept"):
      await client.read_resource(uris[0])
    (read,) = (await client.read_resource(uris[2])).contents
    listed = await client.list_resource_templates()
  assert len(set(uris)) == 3
  assert read.mime_type == "application/json"
  record = json.loads(read.text)
  assert record["budget"] == 2 and record["answer"] == "Jane"
  assert "".join(span["text"] for span in record["spans"]).count(EMMA.text) == 1
  assert record["documents"][0][0]["text"] == EMMA.text
  template = listed.resource_templates[0].uri_template
  assert uris[0].startswith(template.partition("{")[0])


async def test_outage_is_explained_in_the_log_only(caplog):
  secret = "http://10.9.8.7:8000 answered 500: /srv/secret"
  broken = scripted.Retriever(error=types.RetrievalError(secret))

  async with client_of(retriever=broken) as client:
    found = await client.call_tool("search", {"query": "emma"})
    asked = await client.call_tool("answer", {"question": "?", "budget": 2})
    read = await client.read_resource(asked.structured_content["trajectory"])
  for part in (found.content[0], asked.content[0], read.contents[0]):
    said = part.text
    assert "10.9.8.7" not in said and "secret" not in said
    name = said.partition("log has the cause of ")[2].partition(".")[0]
    assert f"{name}: " in caplog.text
  assert caplog.text.count(secret) >= 2


@pytest.mark.parametrize(
  ("transport", "mode"), [("memory", "auto"), ("http", "legacy")]
)
def test_cancelled_request_frees_its_episode(transport, mode):
  engine = Held()

  async def main(server):
    async with mcp.Client(server, mode=mode) as client:
      call = asyncio.create_task(
        client.call_tool("answer", {"question": "Who?", "budget": 1})
      )
      await asyncio.to_thread(engine.started.wait, 20)
      call.cancel()
      with pytest.raises(asyncio.CancelledError):
        await call
      await asyncio.to_thread(wait_for, lambda: engine.released)

  with serving(engine) as service, contextlib.ExitStack() as stack:
    server = service.server
    if transport == "http":
      app = server.streamable_http_app()
      over_http = served.listening(app, timeout_graceful_shutdown=1)
      server = "http://{}:{}/mcp".format(*stack.enter_context(over_http))
    asyncio.run(main(server))
    assert len(engine.released) == 1
    asyncio.run(asyncio.wait_for(service.drain(5), 60))


def test_client_is_welcomed_while_the_policy_is_being_loaded():
  agent = an_agent()
  loading = concurrent.futures.Future()

  async def main():
    service = mcp_server.Service(loading, version="1")
    async with mcp.Client(service.server) as client:
      tools = (await client.list_tools()).tools
      given_up = asyncio.ensure_future(
        client.call_tool("search", {"query": "emma"})
      )
      asked = asyncio.ensure_future(
        client.call_tool("answer", {"question": "Who?", "budget": 3})
      )
      await asyncio.sleep(0.1)
      assert not asked.done()
      given_up.cancel()
      loading.set_result(agent)
      return tools, await asyncio.wait_for(asked, 30)

  with agent:
    tools, result = asyncio.run(main())
  assert [tool.name for tool in tools] == ["answer", "search"]
  assert result.structured_content["answer"] == "Jane"
