"""A tool of an MCP server as a retriever, over both transports.

The server is one of the official SDK, in a process of its own.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import sys
import time

import mcp_servers
import pytest
import web_site
from mcp_servers import COMMAND, EMMA, PATIENCE, ask, ids, over_http

from anysearch_jax import types
from anysearch_jax.host.http import errors
from retrieval.mcp_tools import tool as tool_lib
from retrieval.mcp_tools import transports

SHORT = dataclasses.replace(PATIENCE, deadline=2.0)
url = mcp_servers.url


# Starting a server takes seconds.
BOTH = [pytest.param("process", marks=pytest.mark.slow), "address"]


@pytest.fixture(params=["process", "address"])
def open_tool(request):
  """Opens tools over a transport; `.servers` has them."""
  made = []

  def start(tool="search_documents", **settings):
    patience = settings.pop("patience", PATIENCE)
    if request.param == "process":
      server = transports.Process(COMMAND, {}, tool_lib.LARGEST)
      made.append(
        tool_lib.McpRetriever(server, tool=tool, patience=patience, **settings)
      )
    else:
      url = request.getfixturevalue("url")
      made.append(over_http(url, tool=tool, patience=patience, **settings))
    return made[-1]

  yield start
  for each in made:
    each.close()


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
  assert isinstance(failed, tool_lib.ToolError)
  assert "The index is being built." in str(failed) and ids(found) == ["w/3"]
  assert retriever.counters == {
    **{"queries": 6, "calls": 5, "retries": 0, "failures": 1},
    **{"connections": 1, "cost": 2.5},
  }
  assert retriever.identity() == {
    **{"kind": "mcp", "server": "library", "tool": "search_documents"},
    **{"query": "search_query", "k": "max_results"},
    "arguments": {},
  }


def test_texts_are_passages_and_an_image_is_none(url):
  retriever = over_http(url, tool="lines")
  found, image, nothing = ask(retriever, "emma", "image", "qzxv")
  assert [p.text for p in found][0] == "Emma: A novel by Jane Austen, of 1815."
  assert len({p.id for p in found}) == 3 and nothing == ()
  with pytest.raises(errors.AnswerError, match=r"without text \(image\)"):
    raise image
  retriever.close()


def test_fixed_arguments_are_sent(url):
  retriever = over_http(url, tool="both", fixed={"index": "main"})
  (found,) = ask(retriever, "peru")
  assert [p.text[:17] for p in found] == ["main: The capital"]
  assert retriever.identity()["arguments"] == {"index": "main"}
  retriever.close()


@pytest.mark.parametrize(
  ("settings", "sentence"),
  [
    ({"tool": "find"}, "found 'find'; the server's tools are: both, clock, l"),
    ({"tool": ""}, "found nothing; expected the name of one"),
    ({"tool": "clock"}, "no argument that is clearly a query.*: none"),
    ({"tool": "both"}, "the tool also requires index"),
    ({"query": "words"}, "mcp.query: found 'words'; the tool's arguments are"),
    ({"count": "words"}, "mcp.k: found 'words'; .* search_query, max_results"),
    ({"fixed": {"x": 1}}, "mcp.arguments: found 'x'"),
  ],
)
def test_a_tool_that_does_not_fit_is_refused_with_what_there_is(
  url, settings, sentence
):
  with pytest.raises(ValueError, match=sentence):
    over_http(url, **{"tool": "search_documents"} | settings)


@pytest.mark.parametrize("open_tool", BOTH, indirect=True)
def test_a_call_without_an_answer_ends_at_its_deadline_and_blocks_no_other(
  open_tool,
):
  retriever = open_tool(patience=SHORT)
  started_at = time.monotonic()
  hung, found = ask(retriever, "hang", "emma")
  assert time.monotonic() - started_at < 8
  assert "no answer within 2 seconds" in str(hung) and ids(found) == EMMA


@pytest.mark.parametrize("open_tool", BOTH, indirect=True)
def test_an_answer_of_50_megabytes_is_refused(open_tool):
  retriever = open_tool()
  (huge,) = ask(retriever, "huge")
  assert isinstance(huge, types.RetrievalError)
  assert "a message of more than 16777216 bytes" in str(huge)
  # A process is lost with such an answer; what else it was asked is repeated.
  assert retriever.counters["calls"] <= 2
  assert ids(ask(retriever, "emma")[0]) == EMMA


def test_a_server_that_dies_is_started_again():
  server = transports.Process(COMMAND, {}, tool_lib.LARGEST)
  once = dataclasses.replace(PATIENCE, retries=0)
  retriever = tool_lib.McpRetriever(
    server, tool="search_documents", patience=once
  )
  (dead,) = ask(retriever, "die")
  assert "tried 1 times" in str(dead)
  assert "The server said: The disk is gone." in str(dead)
  assert ids(ask(retriever, "emma")[0]) == EMMA
  assert retriever.counters["connections"] == 2
  retriever.close()


@pytest.mark.slow  # It starts twice, the second time slowly.
def test_a_server_may_take_longer_to_start_than_a_call_may_last(tmp_path):
  slowly = (
    "import os, pathlib, sys, time; "
    f"started = pathlib.Path({str(tmp_path / 'started')!r}); "
    "time.sleep(3 * started.exists()); started.touch(); "
    f"os.execv(sys.executable, {list(COMMAND)!r})"
  )
  server = transports.Process(
    (sys.executable, "-c", slowly), {}, tool_lib.LARGEST
  )
  once = dataclasses.replace(SHORT, deadline=1.5, retries=0)
  retriever = tool_lib.McpRetriever(
    server, tool="search_documents", patience=once
  )
  ask(retriever, "die")
  answers = [ask(retriever, "emma")[0]]
  ends = time.monotonic() + 60
  while isinstance(answers[-1], Exception) and time.monotonic() < ends:
    answers += ask(retriever, "emma")
  assert ids(answers[-1]) == EMMA
  assert all("no answer within 1.5" in str(late) for late in answers[:-1])
  assert len(answers) > 2 and retriever.counters["connections"] == 2
  retriever.close()


@pytest.mark.slow  # It starts twice.
def test_a_server_that_was_started_again_is_found():
  port = mcp_servers.free_port()
  process = mcp_servers.started(port)
  server = transports.Address(
    f"http://127.0.0.1:{port}/mcp", {}, tool_lib.LARGEST
  )
  retriever = tool_lib.McpRetriever(
    server, tool="search_documents", patience=PATIENCE
  )
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
  server = transports.Process((sys.executable, "-c", script), {}, 1 << 20)
  retriever = tool_lib.McpRetriever(server, tool="lines", patience=PATIENCE)
  retriever.close()
  for pid in map(int, noted.read_text().split()):
    for _ in range(100):
      try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2]
      except OSError:
        break
      if state == "Z":  # It ended, and its parent did not look yet.
        break
      time.sleep(0.05)
    else:
      os.kill(pid, signal.SIGKILL)
      raise AssertionError(f"{pid} lives on")
  with pytest.raises(types.RetrievalError, match="was closed"):
    ask(retriever, "emma")


@pytest.mark.parametrize(
  ("command", "sentence"),
  [
    (("no-such-program",), "FileNotFoundError"),
    ((sys.executable, "-c", "raise SystemExit('no key')"), "no key"),
    ((sys.executable, "-c", "print('hello')"), "did not tell its tools"),
    (("cat",), "did not tell its tools"),
    (("sleep", "60"), "not ready within 2 seconds"),
    (("yes", "a" * 100), "did not tell its tools"),
  ],
)
def test_a_command_that_is_no_server_is_refused(command, sentence):
  # Python starts slowly on a busy machine.
  start = 10.0 if command[0] == sys.executable else 2.0
  server = transports.Process(command, {}, 1 << 20, start=start)
  began = time.monotonic()
  with pytest.raises(types.RetrievalError, match=sentence):
    tool_lib.McpRetriever(server, patience=PATIENCE)
  assert time.monotonic() - began < 24


@pytest.mark.parametrize(
  "page",
  [
    web_site.reply(200, b"<html>", "text/html"),
    web_site.reply(200, b"{}", "application/json"),
    web_site.reply(500, b"Oops."),
    web_site.reply(200, b"x", "application/json", content_encoding="br"),
  ],
)
def test_an_address_that_is_no_server_is_refused(page):
  with web_site.Site() as site:
    site.post = page
    with pytest.raises(types.RetrievalError, match="did not tell its tools"):
      over_http(f"{site.origin}/mcp")
    assert site.asked
