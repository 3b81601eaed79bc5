"""The table of exit codes of docs/commands.md, by running commands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import chat_endpoint
import pytest
import source_tree

PAGE = source_tree.ROOT / "docs" / "commands.md"
ROW = re.compile(r"^\| (\d+) \| ", re.MULTILINE)
DOCUMENTS = "--documents=notes"
COMMANDS = {
  0: ["list", "retrievers"],
  1: ["ask", "--documents=nowhere", "x"],
  2: ["ask", "--seed=x"],
  74: ["list", "retrievers"],
  75: ["evaluate", DOCUMENTS, "--questions=mine.jsonl", "--output=e"],
  129: ["ask", DOCUMENTS, "x"],
  130: ["chat", DOCUMENTS, "x"],
  143: ["ask", DOCUMENTS, "--json", "x"],
}
SIGNALS = {
  75: signal.SIGINT,
  129: signal.SIGHUP,
  130: signal.SIGINT,
  143: signal.SIGTERM,
}


def _restore_signals():
  for number in SIGNALS.values():
    signal.signal(number, signal.SIG_DFL)
  signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def run(tmp_path):
  """Returns a function that starts a command in a folder with notes."""
  (tmp_path / "notes").mkdir()
  (tmp_path / "notes" / "lease.md").write_text("It ends in 2027.")
  (tmp_path / "mine.jsonl").write_text('{"question": "x", "answer": "y"}\n')
  places = {
    "PYTHONPATH": str(source_tree.ROOT),
    "XDG_CACHE_HOME": str(tmp_path / "cache"),
  }

  def start(arguments, **how):
    # A shell that runs the tests in the background ignores some signals, which
    # its children then do too, as after nohup.
    return source_tree.started(
      *("-m", "anysearch_jax.launch", *arguments),
      cwd=tmp_path,
      env=os.environ | places,
      preexec_fn=_restore_signals,
      **how,
    )

  return start


def test_page_has_every_code():
  assert [int(code) for code in ROW.findall(PAGE.read_text())] == [*COMMANDS]


@pytest.mark.parametrize("code", sorted(set(COMMANDS) - set(SIGNALS)))
def test_command_ends_with_the_code(run, code):
  place = "/dev/full" if code == 74 else "/dev/null"
  with open(place, "w") as out:
    process = run(COMMANDS[code], stdout=out, stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=120)
  assert process.returncode == code, said
  assert bool(said) == (code != 0)
  assert "Traceback" not in said


@pytest.mark.parametrize("code", SIGNALS)
def test_command_that_is_stopped_ends_with_the_code(run, code):
  silent = [chat_endpoint.Fault(hang="silent")] * 8
  with chat_endpoint.served(faults=silent) as server:
    process = run(
      [*COMMANDS[code], f"--openai={server.url}", "--openai_calls=tools"],
      stderr=subprocess.PIPE,
      stdin=subprocess.DEVNULL,
    )
    end = time.monotonic() + 120
    while not server.asked and time.monotonic() < end:
      time.sleep(0.05)
    assert process.poll() is None
    process.send_signal(SIGNALS[code])
    printed, said = process.communicate(timeout=120)
  assert process.returncode == code, said
  assert "stopped" in said and "Traceback" not in said
  assert ("the same command resumes" in said) == (code == 75)
  assert "answer" not in printed
