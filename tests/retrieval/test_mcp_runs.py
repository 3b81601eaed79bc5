"""Runs whose retriever is a tool of an MCP server: settings, logs, secrets."""

from __future__ import annotations

import dataclasses
import json
import sys

import mcp_servers
import pytest
import web_site
from mcp_servers import EMMA, SERVER, ask, free_port, ids

from anysearch_jax import config as config_lib
from launch import retrieval_settings, retrievers

url = mcp_servers.url


def config(**values):
  made = config_lib.ExperimentConfig()
  retrieval = config_lib.RetrievalConfig(kind="mcp", **values)
  return dataclasses.replace(made, retrieval=retrieval)


def test_a_run_searches_a_tool_and_a_replay_asks_no_server(url, tmp_path):
  log = str(tmp_path / "answers.sqlite")
  mcp = config_lib.McpConfig(tool="search_documents")
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
    with pytest.raises(ValueError, match="retrieval.mcp: ") as caught:
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


@pytest.mark.parametrize(
  ("values", "sentence"),
  [
    ({}, "mcp.command: found .* expected one of them"),
    (
      {"url": "http://a", "mcp": config_lib.McpConfig(command=("b",))},
      "expected one of them",
    ),
    ({"url": "a"}, "retrieval.url: found 'a'"),
    (
      {"url": "http://a", "mcp": config_lib.McpConfig(arguments="[1]")},
      r"mcp.arguments: found '\[1\]', expected a JSON object",
    ),
    (
      {"mcp": config_lib.McpConfig(command=("a",), variables=("sk-123",))},
      r"mcp.variables\[0\]: expected the name",
    ),
    (
      {"mcp": config_lib.McpConfig(command=("a",)), "key_variable": "KEY"},
      "expected it in retrieval.mcp.variables",
    ),
  ],
)
def test_invalid_settings_of_a_tool_are_refused(values, sentence):
  with pytest.raises(ValueError, match=sentence) as caught:
    retrieval_settings.validate(config(**values).retrieval)
  assert "sk-123" not in str(caught.value)


@pytest.mark.slow
def test_our_own_server_is_searched(monkeypatch):
  """`launch.serve_mcp` loads a policy, so its first answer takes a while."""
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.chdir(SERVER.parents[2])
  mcp = config_lib.McpConfig(
    command=(
      *(sys.executable, "-m", "launch.serve_mcp"),
      *("--config=configs/quickstart.py", "--threads=1"),
    ),
    variables=("JAX_PLATFORMS",),
    deadline=120.0,
  )
  made = retrievers.make(config(mcp=mcp), None)
  (found,) = ask(made, "gebos works", k=2)
  assert len(found) == 2
  assert {p.title for p in found} == {"gebos"}
  assert "gebos works" in f"{found[0].title} {found[0].text}"
