"""Completion, by the shells themselves."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time

import commands
import pytest

from anysearch_jax.launch import completion

# Offers of each shell after what is typed, in any order.
CASES = [
  ("anysearch eval", {"evaluate"}),
  ("anysearch ask --budg", {"--budget="}),
  ("anysearch build-index --kind=fai", {"faiss_file"}),
  ("anysearch chat --openai_c", {"--openai_calls="}),
  ("anysearch ask --openai_calls=t", {"tools", "tags"}),
  ("anysearch serve_retriever --max_t", {"--max_topk="}),
  ("anysearch ask --jso", {"--json"}),
  ("anysearch ask --set_conf", {"--set_config="}),
]


@pytest.fixture
def script(tmp_path):
  """Returns a function that writes the script of a shell."""

  def write(shell):
    ended, text = commands.printed(completion, shell)
    assert ended == 0
    path = tmp_path / f"script.{shell}"
    path.write_text(text)
    return path

  return write


# What moves a terminal's cursor, or changes its colours.
_CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|\x1b[=>]|[\x08\x07]")


def needs(shell):
  return pytest.mark.skipif(not shutil.which(shell), reason=f"no {shell}")


_TRY = r"""
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_anysearch
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(("typed", "offers"), CASES)
def test_bash_offers_commands_flags_and_values(script, typed, offers):
  # As bash splits words: "=" is one.
  words = typed.replace("=", " = ").split()
  done = subprocess.run(
    ["bash", "-c", _TRY, "bash", str(script("bash")), *words],
    capture_output=True,
    text=True,
    check=True,
  )
  assert {line.split()[0] for line in done.stdout.splitlines()} == offers
  assert done.stderr == ""


@needs("fish")
@pytest.mark.parametrize(("typed", "offers"), CASES)
def test_fish_offers_commands_flags_and_values(script, typed, offers):
  if "build-index" in typed:
    typed = typed.replace("-index", "_index")
  done = subprocess.run(
    ["fish", "--no-config", "-c", f"source $argv[1]; complete -C '{typed}'"]
    + [str(script("fish"))],
    capture_output=True,
    text=True,
    check=True,
    env=os.environ | {"TERM": "dumb"},
  )
  names = [line.split("\t")[0] for line in done.stdout.splitlines()]
  assert {name.rpartition("=")[2] or name for name in names} == {
    offer.rstrip("=") for offer in offers
  }
  if typed.endswith("budg"):
    assert "\tBudget of each answer" in done.stdout


def terminal(command, lines, expected):
  """Types lines into a shell on a terminal, and returns what it shows."""
  child, descriptor = pty.fork()
  if child == 0:
    os.execvpe(
      command[0], command, os.environ | {"TERM": "xterm", "PS1": "ready> "}
    )
  shown = ""
  try:
    for line, answer in zip(lines, expected, strict=True):
      os.write(descriptor, line.encode())
      end = time.monotonic() + 60
      begin = len(shown)
      while answer not in shown[begin:] and time.monotonic() < end:
        if select.select([descriptor], [], [], 1)[0]:
          output = os.read(descriptor, 65536).decode(errors="replace")
          shown += _CONTROL.sub("", output)
      assert answer in shown[begin:], shown
  finally:
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(descriptor)
  return shown


def test_bash_on_a_terminal_lists_meanings_and_inserts_names(script):
  shown = terminal(
    ["bash", "--norc", "-i"],
    [
      f"source {script('bash')}; echo so${{#HOME}}urced\n",
      "anysearch ask --budg\t",
      "3 --openai\t\t",
    ],
    ["urced\r\n", "--budget=", "(Name of the model at"],
  )
  # No blank after "=", where a value follows.
  assert "--budget=3 --openai" in shown


@needs("zsh")
def test_zsh_on_a_terminal_completes(script):
  path = script("zsh")
  terminal(
    ["zsh", "-f", "-i"],
    [
      "autoload -U compinit; compinit -u -D; echo loa''ded\n",
      f"source {path}; echo so''urced\n",
      "anysearch eval\t",
      "--outp\t",
      "x --scri\t",
      "y\x15anysearch build-index --kind=fai\t",
      "\x15anysearch ask --openai_calls=t\t\t",
    ],
    [
      "loaded\r\n",
      "sourced\r\n",
      "anysearch evaluate ",
      "--output=",
      "--scripted=",
      "--kind=faiss_file",
      "tools",
    ],
  )


def test_another_shell_is_refused():
  said = commands.run(completion, "tcsh")
  assert said == "Found tcsh, expected one of bash, zsh, fish."
