"""Processes of `mcp_search_server.py`, and tools over them, for tests.

Importing this module skips a module of tests without the SDK. A module takes
the fixture by an assignment, `url = mcp_servers.url`.
"""

from __future__ import annotations

import asyncio
import pathlib
import socket
import subprocess
import sys

import pytest
import waits

tool_lib = pytest.importorskip(
  "anysearch_jax.retrieval.mcp_tool", reason="needs the extra [serve]"
)
from anysearch_jax import config as config_lib  # noqa: E402
from anysearch_jax import types  # noqa: E402
from anysearch_jax.host import http_calls  # noqa: E402
from anysearch_jax.retrieval import requests as requests_lib  # noqa: E402

SERVER = pathlib.Path(__file__).parent / "mcp_search_server.py"
COMMAND = (sys.executable, str(SERVER))
EMMA = ["w/1", "w/2", "w/3"]


def ask(retriever, *queries, k=10):
  requests = [types.SearchRequest(query, k) for query in queries]
  return asyncio.run(requests_lib.answers(retriever, requests))


def ids(answer):
  return [passage.id for passage in answer]


def started(port, *limit):
  """Returns a server at a port that answers."""
  process = subprocess.Popen(
    [*COMMAND, "--http", str(port), *limit], stderr=subprocess.DEVNULL
  )
  waits.wait_for(lambda: _answers(port))
  return process


def _answers(port):
  with socket.socket() as asking:
    return not asking.connect_ex(("127.0.0.1", port))


@pytest.fixture(scope="module")
def url():
  port = waits.free_port()
  process = started(port)
  yield f"http://127.0.0.1:{port}/mcp"
  process.kill()
  process.wait(10)


def opened(server, price=0.0, patience=http_calls.DEFAULT, **settings):
  """Returns a tool of a server, `search_documents` unless one is given."""
  given = {"tool": "search_documents", "deadline": 90.0}
  if "tool" not in settings:
    given |= {"query": "search_query", "k": "max_results"}
  url = server if isinstance(server, str) else ""
  command = () if url else server
  made = config_lib.McpConfig(command=command, **given | settings)
  return tool_lib.McpRetriever(url, made, price=price, patience=patience)
