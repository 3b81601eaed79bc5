"""A tool of an MCP server as a retriever, over both transports.

The server is one of the official SDK, in a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import sys
import threading
import time

import mcp_servers
import pytest
import web_site
from mcp_servers import COMMAND, EMMA, ask, ids, opened
from waits import free_port

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.host import http_calls
from anysearch_jax.launch import retrievers
from anysearch_jax.retrieval import mcp_tool
from anysearch_jax.rollout import searching

url = mcp_servers.url

# Starting a server takes seconds.
BOTH = [pytest.param("process", marks=pytest.mark.slow), "address"]


@pytest.fixture(params=["process", "address"])
def open_tool(request):
  """Opens the tool over a transport."""
  made = []

  def start(**settings):
    server = COMMAND
    if request.param == "address":
      server = request.getfixturevalue("url")
    made.append(opened(server, **settings))
    return made[-1]

  yield start
  for each in made:
    each.close()


@pytest.mark.parametrize("open_tool", BOTH, indirect=True)
def test_a_tool_is_searched_and_its_limits_kept(open_tool):
  retriever = open_tool(price=0.5)
  all_of_them, none, odd = ask(retriever, "emma", " \n", "qzxv\ud800")
  assert ids(all_of_them) == EMMA
  assert all_of_them[1] == types.Passage(
    "w/2", "Jane Austen", "An author. She wrote Emma.", 1.0
  )
  assert none == odd == ()
  assert ids(ask(retriever, "emma", k=2)[0]) == EMMA[:2]
  failed, found = ask(retriever, "error", "peru")
  assert isinstance(failed, http_calls.AnswerError)
  # What could steer a terminal is not quoted.
  assert str(failed).isprintable() and ids(found) == ["w/3"]
  assert "The index is being built." in str(failed)
  counted = {"queries": 6, "failures": 1, "connections": 1, "cost": 2.5}
  assert retriever.counters == counted
  assert retriever.identity() == {
    **{"kind": "mcp", "server": "library", "tool": "search_documents"},
    **{"query": "search_query", "k": "max_results"},
    "arguments": {},
  }


def test_texts_are_passages_and_an_image_is_none(url):
  retriever = opened(url, tool="lines", query="q")
  found, image, nothing = ask(retriever, "emma", "image", "qzxv")
  assert [p.text for p in found][0] == "Emma: A novel by Jane Austen, of 1815."
  assert len({p.id for p in found}) == 3 and nothing == ()
  with pytest.raises(http_calls.AnswerError, match=r"no text \(image\)"):
    raise image
  retriever.close()


@pytest.mark.parametrize(
  ("settings", "sentence"),
  [
    ({"tool": "find"}, "found 'find'; the tools of the server are: both, clo"),
    ({"tool": ""}, "mcp.tool: found 'search'; the tools"),
    ({"tool": "clock"}, r"found the arguments \['query'\].*: none"),
    ({"tool": "both"}, r"\['query'\].*\(required: query, index"),
    ({"k": "words"}, "'words'.* search_query, max_results"),
    ({"arguments": '{"x": 1}'}, r"'max_results', 'x'\]"),
    ({"arguments": '{"search_query": 1}'}, "each once"),
  ],
)
def test_a_tool_that_does_not_fit_is_refused_with_what_there_is(
  url, settings, sentence
):
  with pytest.raises(ValueError, match=sentence):
    opened(url, **settings)


@pytest.mark.parametrize("open_tool", BOTH, indirect=True)
def test_a_call_without_an_answer_ends_at_its_deadline_and_blocks_no_other(
  open_tool,
):
  retriever = open_tool(deadline=2.0)
  started_at = time.monotonic()
  hung, found = ask(retriever, "hang", "emma")
  assert time.monotonic() - started_at < 30
  assert "no answer within 2 seconds" in str(hung) and ids(found) == EMMA


def test_a_server_that_dies_is_started_again():
  retriever = opened(COMMAND)
  (dead,) = ask(retriever, "die")
  assert isinstance(dead, types.RetrievalError)
  assert "The server said: The disk is gone." in str(dead)
  assert ids(ask(retriever, "emma")[0]) == EMMA
  assert retriever.counters["connections"] == 3
  retriever.close()


def test_a_result_that_is_too_large_fails_its_search(url):
  retriever = opened(url)
  huge, found = ask(retriever, "huge", "emma")
  assert "expected at most 2000000" in str(huge)
  assert ids(found) == EMMA
  retriever.close()


@pytest.mark.parametrize("rate", [0.0, 20.0])
def test_an_address_that_limits_searches_fails_none(rate):
  port = free_port()
  process = mcp_servers.started(port, "22" if rate else "20")
  patience = http_calls.Patience(concurrency=16, rate=rate)
  address = f"http://127.0.0.1:{port}/mcp"
  retriever = opened(address, deadline=5.0, patience=patience)
  try:
    searcher = searching.BatchingRetriever(retriever, config_lib.SearchConfig())
    found = ask(searcher, *(f"emma {i}" for i in range(30)))
    assert list(map(ids, found)) == [EMMA] * 30
    assert retriever.counters["failures"] == 0
    assert retriever.counters["connections"] == 1
  finally:
    retriever.close()
    process.kill()
    process.wait(10)


def test_a_search_that_waits_connects_to_nothing_after_the_end(url):
  retriever = opened(url, patience=http_calls.Patience(rate=2.0))
  closing = threading.Timer(0.2, retriever.close)
  closing.start()
  *_, waited = ask(retriever, "emma", "peru")
  closing.join()
  assert "was closed" in str(waited)
  assert retriever.counters["connections"] == 1


@pytest.mark.slow  # It starts twice.
def test_a_server_that_was_started_again_is_found():
  port = free_port()
  process = mcp_servers.started(port)
  retriever = opened(f"http://127.0.0.1:{port}/mcp")
  try:
    assert ids(ask(retriever, "emma")[0]) == EMMA
    process.kill()
    process.wait(10)
    (down,) = ask(retriever, "emma")
    assert isinstance(down, types.RetrievalError)
    process = mcp_servers.started(port)
    assert ids(ask(retriever, "emma")[0]) == EMMA
  finally:
    retriever.close()
    process.kill()
    process.wait(10)


def test_closing_ends_the_server_and_its_children(tmp_path):
  noted = tmp_path / "pids"
  script = (
    "import os, subprocess, sys\n"
    "child = subprocess.Popen(['sleep', '600'])\n"
    f"open({str(noted)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
    f"os.execv(sys.executable, [sys.executable, {str(mcp_servers.SERVER)!r}])\n"
  )
  opened((sys.executable, "-c", script), tool="lines", query="q").close()
  server, child = map(int, noted.read_text().split())
  os.kill(child, signal.SIGKILL)  # The SDK ends the server alone, if it obeys.
  for _ in range(100):
    try:
      state = pathlib.Path(f"/proc/{server}/stat").read_text().split()[2]
    except OSError:
      return
    if state == "Z":  # It ended, and its parent did not look yet.
      return
    time.sleep(0.05)
  os.kill(server, signal.SIGKILL)
  raise AssertionError("The server lives on.")


@pytest.mark.parametrize(
  ("command", "sentence"),
  [
    (("no-such-program",), "FileNotFoundError"),
    ((sys.executable, "-c", "raise SystemExit('no key')"), "no key"),
    (("cat",), "MCP tool"),
    (("sleep", "60"), "not ready in time"),
  ],
)
def test_a_command_that_is_no_server_is_refused(command, sentence, monkeypatch):
  # Python starts slowly on a busy machine.
  start = 20.0 if command[0] == sys.executable else 0.5
  monkeypatch.setattr(mcp_tool, "_START_SECONDS", start)
  began = time.monotonic()
  with pytest.raises(types.RetrievalError, match=sentence):
    opened(command, deadline=1.0)
  assert time.monotonic() - began < 40


@pytest.mark.parametrize(
  "page",
  [
    web_site.reply(200, b"<html>", "text/html"),
    web_site.reply(200, b"{}", "application/json"),
    web_site.reply(500, b"Oops."),
  ],
)
def test_an_address_that_is_no_server_is_refused(page, monkeypatch):
  monkeypatch.setattr(mcp_tool, "_START_SECONDS", 5.0)
  with web_site.Site() as site:
    site.post = page
    with pytest.raises(types.RetrievalError, match="MCP tool"):
      opened(f"{site.origin}/mcp", deadline=1.0)
    assert site.asked


# What tools answer.


@pytest.mark.parametrize(
  ("tool", "fields", "expected"),
  [
    # The only list of the structured result.
    (
      "search_documents",
      (),
      ["w/1", "Emma", "A novel by Jane Austen, of 1815."],
    ),
    ("search_documents", ("text=title",), ["w/1", "Emma", "Emma"]),
    # A text that is JSON is read only if its fields are named.
    (
      "text_of_json",
      ("results=data.hits", "text=body.words", "id=link", "title=name"),
      ["w/1", "Emma", "A novel by Jane Austen, of 1815."],
    ),
  ],
)
def test_passages_are_where_the_schema_or_the_settings_say(
  url, tool, fields, expected
):
  arguments = {"query": "search_query", "k": "max_results"}
  if tool == "text_of_json":
    arguments = {"query": "q"}
  retriever = opened(url, tool=tool, fields=fields, **arguments)
  (found,) = ask(retriever, "emma")
  assert [found[0].id, found[0].title, found[0].text] == expected
  assert retriever.identity().get("fields", {}) == dict(
    field.split("=") for field in fields
  )
  retriever.close()


def test_a_text_of_json_is_one_passage_if_nothing_says_what_it_is(url):
  retriever = opened(url, tool="text_of_json", query="q")
  (found,) = ask(retriever, "emma")
  assert len(found) == 1 and found[0].text.startswith('{"data"')
  retriever.close()


@pytest.mark.parametrize(
  ("fields", "sentence"),
  [
    (("results=hits",), "expected a list at hits .retrieval.mcp.fields"),
    (("results=data.hits",), "expected a text at text .retrieval.mcp.fields"),
  ],
)
def test_results_at_another_place_are_refused(url, fields, sentence):
  retriever = opened(url, tool="text_of_json", query="q", fields=fields)
  (failed,) = ask(retriever, "emma")
  assert isinstance(failed, http_calls.AnswerError)
  with pytest.raises(http_calls.AnswerError, match=sentence):
    raise failed
  retriever.close()


def test_fields_that_cannot_be_are_refused_at_once(url):
  with pytest.raises(ValueError, match="expected entries such as text=snippet"):
    opened(url, fields=("body=snippet",))


# Runs.


def config(**values):
  made = config_lib.ExperimentConfig()
  retrieval = config_lib.RetrievalConfig(kind="mcp", **values)
  return dataclasses.replace(made, retrieval=retrieval)


def test_a_run_searches_a_tool_and_a_replay_asks_no_server(url, tmp_path):
  log = str(tmp_path / "answers.sqlite")
  mcp = config_lib.McpConfig(
    tool="search_documents", query="search_query", k="max_results"
  )
  live = retrievers.make(config(url=url, mcp=mcp, log=log), None)
  found = ask(live, "emma", "peru", k=2)
  assert [ids(answer) for answer in found] == [EMMA[:2], ["w/3"]]
  gone = f"http://127.0.0.1:{free_port()}/mcp"
  strict = config(url=gone, mcp=mcp, log=log, log_mode="strict")
  again = retrievers.make(strict, None)
  assert ask(again, "emma", "peru", k=2) == found
  assert again.identity() == live.identity()


def test_a_token_is_sent_and_never_shown(monkeypatch):
  monkeypatch.setenv("LIBRARY_TOKEN", "s3cret-of-nobody")
  with web_site.Site() as site:
    body = json.dumps({"error": "bad s3cret-of-nobody"}).encode()
    site.post = web_site.reply(401, body, "application/json")
    made = config(url=f"{site.origin}/mcp", key_variable="LIBRARY_TOKEN")
    with pytest.raises(ValueError, match="retrieval: ") as caught:
      retrievers.make(made, None)
    assert "s3cret" not in str(caught.value)
    sent = {head["Authorization"] for head in site.heads}
    assert sent == {"Bearer s3cret-of-nobody"}


def test_variables_reach_the_command_and_others_do_not(monkeypatch):
  monkeypatch.setenv("MY_KEY", "key-of-nobody")
  monkeypatch.setenv("OTHER_KEY", "kept")
  check = (
    "import os, sys; "
    "key = os.environ['MY_KEY']; "
    "sys.exit(f'bad {key}: {len(key)}, {\"OTHER_KEY\" in os.environ}')"
  )
  mcp = config_lib.McpConfig(
    command=(sys.executable, "-c", check), variables=("MY_KEY",)
  )
  # What the server says of the key is not shown.
  with pytest.raises(ValueError, match=r"said: bad \.\.\.: 13, False"):
    retrievers.make(config(mcp=mcp), None)


def test_a_field_that_is_named_twice_is_refused():
  assert mcp_tool._fields(["text=a", "title=b"]) == {"text": "a", "title": "b"}
  with pytest.raises(ValueError, match="text=a, text=b.*each once"):
    mcp_tool._fields(["text=a", "text=b"])
