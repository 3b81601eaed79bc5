"""Pages show what their commands print.

    ANYSEARCH_WRITE_PAGES=1 python -m pytest tests/house/test_shown_output.py

writes what they print today into the pages.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any
from unittest import mock

import chat_endpoint
import pytest
import shown_output

from anysearch_jax.launch import local_servers
from anysearch_jax.retrieval.encoder import installed

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
LEASE = "# Lease\n\n## Term\n\nThe lease begins in 2024 and ends in 2027.\n"
QUESTIONS = '{"question": "When does the lease end?", "answer": "2027"}\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A reader's folder: notes, questions, and the files that a page shows."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  # A reader has not installed the extra `dense` yet.
  monkeypatch.setattr(installed, "is_installed", lambda: False)
  (tmp_path / "my_notes").mkdir()
  (tmp_path / "my_notes/lease.md").write_text(LEASE)
  (tmp_path / "my_notes/todo.txt").write_text("Call the plumber.\n")
  (tmp_path / "mine.jsonl").write_text(QUESTIONS)
  return tmp_path


def answer(body: dict[str, Any]) -> str:
  """Returns the answer of a model: what it read, or that it read nothing."""
  read = any(message["role"] == "tool" for message in body["messages"])
  return "2027 [1]" if read else "I do not know."


def pages(slow: bool) -> list[pathlib.Path]:
  """Returns the pages that show the output of a slow command, or of others."""
  return [
    page
    for page in PAGES
    if any(block.slow == slow for block in shown_output.shown(page))
  ]


def compared(page: pathlib.Path, slow: bool) -> None:
  shown_output.write_files(page, pathlib.Path.cwd())
  with chat_endpoint.served(answer=answer) as server:
    replaced = {
      "http://localhost:11434/v1": server.url,
      "qwen3:8b": chat_endpoint.NAME,
    }
    blocks = [b for b in shown_output.shown(page) if b.slow == slow]
    ports = {server.site.port: "Ollama"}
    with mock.patch.object(local_servers, "PORTS", ports):
      outputs = [shown_output.printed(block, replaced) for block in blocks]
  if os.environ.get("ANYSEARCH_WRITE_PAGES"):
    text = page.read_text()
    # From the last one on, so that earlier places stay where they are.
    for block, output in reversed(list(zip(blocks, outputs, strict=True))):
      begin, end = block.span
      text = text[:begin] + shown_output.shortened(output) + text[end:]
    page.write_text(text)
  for block, output in zip(shown_output.shown(page), outputs, strict=False):
    if block.slow == slow:
      assert shown_output.agrees(block.output, output), output


@pytest.mark.parametrize("page", pages(slow=False), ids=lambda page: page.stem)
def test_page_shows_what_its_commands_print(page, folder):
  compared(page, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(slow=True), ids=lambda page: page.stem)
def test_page_shows_what_its_slow_commands_print(page, folder):
  compared(page, slow=True)


@pytest.mark.parametrize(
  ("shown", "output", "agree"),
  [
    ("3 of 16 right (0.12)\n", "4 of 16  right (0.25)\n", True),
    ("first\n...\n", "first\nsecond\nthird\n", True),
    ("first\n...\nlast\n", "first\nlast\n", True),
    ("first\n", "first\nsecond\n", False),
    ("3 searches\n", "3 turns\n", False),
    ("answer [1] of Qwen3\n", "answer [2] of Qwen2\n", False),
  ],
)
def test_only_numbers_spaces_and_dots_may_differ(shown, output, agree):
  assert shown_output.agrees(shown, output) == agree
