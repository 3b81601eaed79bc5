"""`launch.serve --mcp` as a client starts it, with the shipped policy."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading

import commands
import foreign_pages
import mcp
import pytest

from anysearch_jax.launch import serve

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Found at budget 3, after a search in other words.
QUESTION = "gebos employer founder ?"
COMMAND = (
  *(sys.executable, "-m", "anysearch_jax.launch.serve", "--mcp"),
  *("--config=configs/quickstart.py", "--max_budget=3", "--threads=1"),
)
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu"}


async def used(server):
  """Uses every part of a server and returns what the client saw."""
  told = []

  async def tell(*progress):
    told.append(progress)

  async with mcp.Client(server) as client:
    answered = await client.call_tool(
      "answer", {"question": QUESTION, "budget": 3}, progress_callback=tell
    )
    refused = await client.call_tool(
      "answer", {"question": QUESTION, "budget": 4}
    )
    found = await client.call_tool("search", {"query": "gebos works", "k": 2})
    read = await client.read_resource(answered.structured_content["trajectory"])
    return client.instructions, answered, told, refused, found, read


def check(instructions, answered, told, refused, found, read):
  assert "world" in instructions and "?" in instructions
  reply = answered.structured_content
  assert reply["outcome"] == "answered" and reply["answer"]
  assert 1 <= reply["searches"] == len(reply["queries"]) == len(told) <= 3
  assert [p[2] for p in told] == [
    f"search {i}: {query['query']}"
    for i, query in enumerate(reply["queries"], 1)
  ]
  assert refused.is_error and "expected 0 to 3" in refused.content[0].text
  assert len(found.structured_content["passages"]) == 2
  record = json.loads(read.contents[0].text)
  assert record["question"] == QUESTION and record["answer"] == reply["answer"]


def started(*flags, **kwargs):
  """Returns the command as a process with pipes, killed if it lasts."""
  process = subprocess.Popen(
    [*COMMAND, *flags],
    cwd=ROOT,
    env=ENVIRONMENT,
    stdout=subprocess.PIPE,
    text=True,
    **kwargs,
  )
  timer = threading.Timer(120, process.kill)
  timer.daemon = True
  timer.start()
  return process


def test_official_client_starts_it_and_talks_over_stdio():
  server = mcp.StdioServerParameters(
    command=COMMAND[0], args=COMMAND[1:], cwd=ROOT, env=ENVIRONMENT
  )
  check(*asyncio.run(asyncio.wait_for(used(server), 120)))


def test_only_the_protocol_is_on_stdout_and_a_signal_ends_it():
  process = started(stdin=subprocess.PIPE)

  def send(**message):
    process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    process.stdin.flush()

  client = {"name": "test", "version": "0"}
  params = {"protocolVersion": "2025-06-18", "clientInfo": client}
  send(id=1, method="initialize", params={**params, "capabilities": {}})
  first = json.loads(process.stdout.readline())
  send(method="notifications/initialized")
  arguments = {"question": QUESTION, "budget": 0}
  asked = {"name": "answer", "arguments": arguments}
  send(id=2, method="tools/call", params=asked)
  second = json.loads(process.stdout.readline())
  process.send_signal(signal.SIGTERM)  # The input is still open.
  assert process.stdout.read() == ""
  assert process.wait(20) == 0
  assert [first["id"], second["id"]] == [1, 2]
  assert second["result"]["structuredContent"]["searches"] == 0


def test_policy_that_cannot_be_loaded_ends_the_server_with_a_sentence(tmp_path):
  """Its configuration is sound, so that the client is welcomed first."""
  folder = tmp_path / "policy"
  shutil.copytree(ROOT / "configs" / "graded_world_policy", folder)
  for weights in folder.glob("*.safetensors"):
    weights.write_bytes(weights.read_bytes()[:-1000])
  process = started(
    f"--hf={folder}", stdin=subprocess.PIPE, stderr=subprocess.PIPE
  )
  said = process.stderr.read()  # The input stays open.
  assert process.wait(20) == 1
  assert "anysearch serve: " in said and str(folder) in said
  assert "Traceback" not in said
  process.stdin.close()


@pytest.mark.slow
def test_official_client_talks_over_http_and_a_signal_ends_the_server():
  process = started("--http", "--port=0")
  greeting = process.stdout.readline()
  url = re.search(r"http://127\.0\.0\.1:\d+/mcp", greeting)[0]
  check(*asyncio.run(asyncio.wait_for(used(url), 60)))
  foreign_pages.check(url, "/mcp", metrics="/mcp")
  process.send_signal(signal.SIGTERM)
  assert process.wait(20) == 0


def test_another_host_is_refused():
  flags = ("--config=configs/quickstart.py", "--http", "--host=0.0.0.0")
  said = commands.run(serve, "--mcp", *flags)
  assert "--host=0.0.0.0: expected 127.0.0.1" in said
