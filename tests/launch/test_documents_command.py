"""`--documents` of `ask`, `chat` and `serve`: from a folder to an answer."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time

import commands
import httpx
import pytest
import source_tree

from launch import ask, documents, http_server, serve

LEASE = "# Lease\n\n## Term\n\nThe lease begins in 2024 and ends in 2027.\n"
# Searches for what it is asked, and then answers with that.
POLICY = """
import scripted

def said(request):
  text = scripted.CODEC.decode(request.token_ids).rpartition("Question:")[2]
  asked = text.partition("<")[0].strip()
  if "<information>" not in text:
    return f"<think>look</think><search>{asked[-60:]}</search>"
  return f"<think>read</think><answer>In 2027 [1][9] {asked!r}</answer>"

def make(config, source):
  return scripted.Engine(said), scripted.CODEC
"""


@pytest.fixture
def notes(tmp_path, monkeypatch):
  """A folder with notes and a policy in it; its index is in a cache beside."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  folder = tmp_path / "notes"
  folder.mkdir()
  (folder / "lease.md").write_text(LEASE)
  (folder / "todo.txt").write_text("Call the plumber.")
  (folder / "bad.md").write_bytes(b"\x00\xff" * 99)
  (tmp_path / "policy.py").write_text(POLICY)
  return folder


def run(command, *arguments):
  return commands.printed(
    command,
    *("--documents=notes", "--scripted=policy.py:make", "--cache="),
    *arguments,
  )


def test_an_answer_names_its_sources_and_the_index_follows_the_folder(
  notes,
):
  ended, printed = run(ask, "--budget=2", "When does the lease end?")
  assert not ended, ended
  lines = printed.splitlines()
  assert lines[0] == "2 searches left"
  assert any(line.startswith("answer: In 2027 [1] ") for line in lines)
  assert "  [1] Lease | notes/lease.md" in lines
  assert "It also cited 9, which no search had shown." in lines
  said = [*documents.described(*updated())]
  assert said[0].startswith("2 files, 2 passages in ")
  assert said[0].endswith(" (as before)")
  assert said[1].startswith("skipped notes/bad.md: ")
  (notes / "todo.txt").unlink()
  (notes / "rent.md").write_text("# Rent\n\nIt is 900 a month.")
  said = [*documents.described(*updated())]
  assert said[0].endswith(" (1 added, 1 removed)")


def test_json_has_citations_with_path_page_and_heading(notes):
  ended, printed = run(ask, "--json", "--budget=2", "When does the lease end?")
  (row,) = map(json.loads, printed.splitlines())
  assert not ended and row["refused_citations"] == [9]
  assert row["citations"] == [
    {
      "number": 1,
      "id": "lease.md#1",
      "title": row["documents"][0][0]["title"],
      "path": "notes/lease.md",
      "page": 0,
      "heading": "Lease",
    }
  ]


def test_a_conversation_passes_earlier_turns_on(notes, monkeypatch):
  lines = ["When does the lease end?", "/budget 1", "/sources", "/budget x"]
  lines += ["And the rent?", "/what", "/quit", "never asked"]
  monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
  ended, printed = run(ask, "--chat", "--budget=2")
  assert not ended, ended
  first, _, second = printed.partition("/budget x: Found 'x'")
  assert "2 searches left" in first and "lease begins in 2024" in first
  assert "1 search left" in second and "/sources" in second
  # Without the numbers of the first answer's passages.
  said = second[second.index("answer: ") :]
  assert "user: When does the lease end?\\nassistant: In 2027 " in said
  assert "[1]" not in said.partition("assistant:")[2].partition("\n")[0]
  assert "question: And the rent?" in said and "never" not in printed


def test_the_oldest_turns_go_where_the_context_is_short(notes, monkeypatch):
  long = "And what of this? " * 350
  monkeypatch.setattr("sys.stdin", io.StringIO(f"The first?\n{long}\n"))
  short = "--config.episode.max_context=3000"
  _, printed = run(ask, "--chat", short)
  assert "The oldest question is left out from here on." in printed


def test_a_service_answers_from_the_documents(notes, monkeypatch):
  told = []

  def served(app, running, **given):
    async def post():
      transport = httpx.ASGITransport(app)
      asked = {"model": "documents", "input": "When does the lease end?"}
      async with httpx.AsyncClient(transport=transport) as client:
        reply = await client.post("http://me/v1/responses", json=asked)
      told.append(reply.json())

    asyncio.run(post())

  monkeypatch.setattr(http_server, "serve", served)
  ended, _ = run(serve, "--port=0")
  assert not ended, ended
  (found,) = told
  assert "In 2027 [1]" in json.dumps(found["output"])
  assert "notes/lease.md" in json.dumps(found["output"])


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--documents=nowhere"], "found nothing at nowhere, expected a file"),
    (["--documents=notes/bad.md"], "bad.md"),
    (["--documents=", "--index="], "or --documents=FOLDER of files to"),
    (["--chat", "--json"], "--chat: expected neither --json nor --compare."),
  ],
)
def test_what_cannot_be_asked_is_one_sentence(notes, arguments, sentence):
  ended, printed = run(ask, *arguments, "Who?")
  assert sentence in ended and "\n" not in ended and not printed


def test_a_small_policy_gets_the_context_that_it_was_made_for(
  notes, monkeypatch
):
  (notes / "config.json").write_text('{"max_position_embeddings": 2048}')
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  found = []
  monkeypatch.setattr(
    ask.policies, "read_flags", lambda config: found.append(config) or exit(7)
  )
  commands.run(ask, "--documents=notes", "--hf=notes", "Who?")
  commands.run(ask, "--documents=notes", "--openai=x", "Who?")
  small, elsewhere = found
  assert small.episode.max_context == 2048
  assert small.episode.max_generated == 1024
  assert small.compute_dtype == "float32"
  assert elsewhere.episode.max_context == 16384


def updated():
  place = str(documents._cached(["notes"]))
  from retrieval.documents import folder

  return folder.update(["notes"], place), place


@pytest.mark.parametrize(
  "name", ["TERM", pytest.param("INT", marks=pytest.mark.slow)]
)
def test_a_signal_ends_an_answer_without_a_traceback(notes, name):
  """One comes while the command is imported, one while the policy writes."""
  slow = POLICY.replace("(said)", "(said, seconds=lambda: 60)")
  (notes.parent / "policy.py").write_text(slow)
  paths = (source_tree.ROOT, source_tree.ROOT / "tests" / "support")
  command = (
    *("env", f"--default-signal={name}", sys.executable, "-m", "launch.ask"),
    *("--documents=notes", "--scripted=policy.py:make", "Who?"),
  )
  early, late = (
    subprocess.Popen(
      command,
      env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for _ in range(2)
  )
  number = signal.Signals[f"SIG{name}"]
  time.sleep(0.3)
  early.send_signal(number)
  assert late.stdout.readline() == "3 searches left\n"
  late.send_signal(number)
  _, said = late.communicate(timeout=20)
  assert said.endswith(f"stopping on {number.name}\nstopped\n")
  _, early_said = early.communicate(timeout=20)
  assert early.returncode in (-number, 128 + number)
  assert "Traceback" not in said + early_said
