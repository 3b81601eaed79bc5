"""`--documents` of `ask`, `chat` and `serve`: from a folder to an answer."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import chat_endpoint
import commands
import httpx
import pytest
import source_tree

from anysearch_jax.host import http_server
from anysearch_jax.launch import ask, documents, policies, serve
from anysearch_jax.retrieval.documents import folder

LEASE = "# Lease\n\n## Term\n\nThe lease begins in 2024 and ends in 2027.\n"
QUESTION = "When does the lease end?"
ANSWER = "In 2027 [1][9]"


@pytest.fixture
def notes(tmp_path, monkeypatch):
  """A folder with notes; their index is in a cache beside it."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  (tmp_path / "notes").mkdir()
  (tmp_path / "notes" / "lease.md").write_text(LEASE)
  (tmp_path / "notes" / "todo.txt").write_text("Call the plumber.")
  (tmp_path / "notes" / "bad.md").write_bytes(b"\x00\xff" * 99)
  return tmp_path / "notes"


def run(server, command, *arguments):
  ended, printed = commands.printed(
    *(command, "--documents=notes", f"--openai={server.url}"), *arguments
  )
  assert not ended, ended
  return printed


def described():
  """Brings the index up to date as a command does; returns what it says."""
  place = str(documents._cache_folder(["notes"]))
  return list(documents.summary_lines(folder.update(["notes"], place), place))


def test_an_answer_names_its_sources_and_the_index_follows_the_folder(notes):
  with chat_endpoint.served(answer=ANSWER) as server:
    lines = run(server, ask, "--budget=2", QUESTION).splitlines()
  assert lines[0] == "2 searches left"
  assert "answer: In 2027 [1]" in lines
  assert "  [1] Lease | notes/lease.md" in lines
  assert sum(line.startswith("  [1] Lease") for line in lines) == 2
  assert "It also cited 9, which no search had shown." in lines
  held, bad = described()
  assert held.startswith("2 files, 2 passages in ")
  assert held.endswith(" (as before)")
  assert bad.startswith("skipped notes/bad.md: ")
  (notes / "todo.txt").unlink()
  (notes / "rent.md").write_text("# Rent\n\nIt is 900 a month.")
  assert described()[0].endswith(" (1 added, 1 removed)")


def test_json_has_citations_with_path_and_heading(notes):
  with chat_endpoint.served(answer=ANSWER) as server:
    row = json.loads(run(server, ask, "--json", "--budget=2", QUESTION))
    table = run(server, ask, "--compare=0,2", QUESTION)
  assert re.search(r"sources +│ +│ \[1\] Lease \| notes/lease.md", table)
  place = {"path": "notes/lease.md", "heading": "Lease"}
  assert row["citations"] == [
    {"number": 1, "id": "lease.md#1", "title": "Lease"} | place
  ]
  assert row["documents"][0][0]["source"] == place
  assert row["refused_citations"] == [9]


def test_a_conversation_passes_earlier_turns_on(notes, monkeypatch):
  long = "And this? " * 4000
  lines = [QUESTION, "/budget 1", "/sources", "/budget x", "And the rent?"]
  lines += ["/what", long, "/quit", "never"]
  monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
  with chat_endpoint.served(answer=ANSWER) as server:
    printed = run(server, ask, "--chat", "--budget=2")
    asked = [body["messages"][0]["content"] for body in server.asked]
  first, _, second = printed.partition("/budget x: Found 'x'")
  assert "2 searches left" in first and "lease begins in 2024" in first
  assert "1 search left" in second and "/sources" in second
  # Without the number, which the next episode has not shown.
  turns = f"user: {QUESTION}\nassistant: In 2027\nquestion: And the rent?"
  assert sum(turns in text for text in asked) == 2
  assert second.count("The oldest question is left out from here on.") == 2
  assert long.strip() in asked[-1] and "And the rent?" not in asked[-1]


def test_a_service_answers_from_the_documents(notes, monkeypatch):
  told = []

  def served(app, running, **given):
    async def post():
      transport = httpx.ASGITransport(app)
      async with httpx.AsyncClient(transport=transport) as client:
        health = (await client.get("http://me/health")).json()
        assert health["passages"] == 2
        asked = {"model": health["model"], "input": QUESTION}
        reply = await client.post("http://me/v1/responses", json=asked)
      told.append(json.dumps(reply.json()["output"]))

    asyncio.run(post())

  monkeypatch.setattr(http_server, "serve", served)
  with chat_endpoint.served(answer=ANSWER) as server:
    run(server, serve, "--port=0")
  assert "In 2027 [1]" in told[0] and "notes/lease.md" in told[0]


def test_a_service_follows_its_documents(notes, monkeypatch):
  told = []

  def served(app, running, **given):
    async def post(client):
      await asyncio.sleep(1.1)
      body = {"model": "scripted", "input": QUESTION}
      reply = await client.post("http://me/v1/responses", json=body)
      told.append(json.dumps(reply.json()))

    async def change():
      transport = httpx.ASGITransport(app)
      async with httpx.AsyncClient(transport=transport) as client:
        await post(client)
        (notes / "lease.md").write_text(LEASE.replace("2027", "2031"))
        await post(client)
        (notes / "lease.md").unlink()
        (notes / "rent.md").write_text("# Rent\n\nThe lease is 900 a month.")
        await post(client)
        for file in notes.iterdir():
          file.unlink()
        await post(client)

    asyncio.run(change())

  monkeypatch.setattr(http_server, "serve", served)
  with chat_endpoint.served(answer="Then [1].") as server:
    run(server, serve, "--port=0", "--name=scripted")
  first, changed, moved, empty = told
  assert "ends in 2027" in first
  assert "ends in 2031" in changed and "2027" not in changed
  assert "900 a month" in moved and "2031" not in moved
  assert "900 a month" not in empty and "plumber" not in empty


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--documents=nowhere"], "found nothing at nowhere, expected a file"),
    (["--documents=notes/bad.md"], "bad.md"),
    (["--index=notes/bad.md"], "--index=FOLDER names another place."),
    (["--documents="], "or --documents=FOLDER of files to ask about."),
    (["--chat", "--json"], "--chat: expected neither --json nor --compare."),
  ],
)
def test_what_cannot_be_asked_is_one_sentence(notes, arguments, sentence):
  unasked = "--openai=http://127.0.0.1:9/v1", "--openai_model=m"
  said = commands.run(
    *(ask, "--documents=notes", *unasked, "--openai_calls=tags"),
    *(*arguments, "x"),
  )
  assert sentence in said and "\n" not in said


def test_a_small_policy_gets_the_context_that_it_was_made_for(
  notes, monkeypatch
):
  (notes / "config.json").write_text('{"max_position_embeddings": 2048}')
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  found = []

  def read_flags(config, **how):
    found.append(config)
    sys.exit(7)

  monkeypatch.setattr(policies, "read_flags", read_flags)
  for policy in ("--hf=notes", "--openai=x"):
    commands.run(ask, "--documents=notes", policy, "Who?")
  small, elsewhere = found
  assert small.episode.max_context == 2048
  assert small.episode.max_generated == 1024
  assert small.compute_dtype == "float32"
  assert elsewhere.episode.max_context == 16384


@pytest.mark.parametrize(
  "name", ["TERM", pytest.param("INT", marks=pytest.mark.slow)]
)
def test_a_signal_ends_an_answer_without_a_traceback(notes, name):
  """One comes while the command is imported, one while the model is asked."""
  number = signal.Signals[f"SIG{name}"]
  silent = chat_endpoint.Fault(hang="silent")
  with chat_endpoint.served(faults=[silent] * 2) as server:
    command = (
      *(
        "env",
        f"--default-signal={name}",
        sys.executable,
        "-m",
        "anysearch_jax.launch.ask",
      ),
      *("--documents=notes", f"--openai={server.url}", "Who?"),
      "--openai_calls=tools",
    )
    early, late = (
      subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(source_tree.ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
      for _ in range(2)
    )
    time.sleep(0.3)
    early.send_signal(number)
    while not server.asked and late.poll() is None:
      time.sleep(0.05)
    late.send_signal(number)
    _, said = late.communicate(timeout=120)
    assert said.endswith(f"stopping on {number.name}\nstopped\n")
    _, early_said = early.communicate(timeout=120)
    assert early.returncode in (-number, 128 + number)
  assert "Traceback" not in said + early_said
  # JAX computed nothing: it would have kept the program there.
  assert not (notes.parent / ".jax_cache").exists()
