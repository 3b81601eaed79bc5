"""Environment variables, what is refused first, and what is said how."""

from __future__ import annotations

import json
import os
import re

import chat_endpoint
import commands
import pytest
import source_tree

from anysearch_jax.launch import (
  ask,
  build_index,
  command_table,
  evaluate,
  serve,
  variables,
)

QUESTION = "When does the lease end?"
# Nobody listens there, which would be the error if the model came first.
NOBODY = "--openai=http://127.0.0.1:9/v1"


@pytest.fixture(autouse=True)
def notes(tmp_path, monkeypatch):
  """A folder with notes; their index is in a cache beside it."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  for name in ("OPENAI_BASE_URL", "NO_COLOR", "FORCE_COLOR"):
    monkeypatch.delenv(name, raising=False)
  (tmp_path / "notes").mkdir()
  (tmp_path / "notes" / "lease.md").write_text("# Lease\n\nIt ends in 2027.\n")
  return tmp_path / "notes"


def asked(tmp_path, *arguments, **environment):
  """Runs `anysearch ask` as a user does, in another process."""
  places = {"PYTHONPATH": str(source_tree.ROOT)}
  return source_tree.python(
    *("-m", "anysearch_jax.launch", "ask", *arguments),
    env=os.environ | places | environment,
    cwd=tmp_path,
  )


def test_base_url_is_the_model_where_no_flag_names_one(tmp_path):
  with chat_endpoint.served() as server, chat_endpoint.served() as other:
    done = asked(
      *(tmp_path, "--documents=notes", QUESTION), OPENAI_BASE_URL=server.url
    )
    assert done.returncode == 0, done.stderr
    first, *_ = done.stderr.splitlines()
    assert first == f"OPENAI_BASE_URL: asks the model at '{server.url}'."
    assert "answer: In June 2027 [1]" in done.stdout and server.asked
    del server.asked[:]
    done = asked(
      *(tmp_path, "--documents=notes", f"--openai={other.url}", QUESTION),
      OPENAI_BASE_URL=server.url,
    )
    assert other.asked and not server.asked
    assert "OPENAI_BASE_URL" not in done.stderr


def test_base_url_leaves_a_configured_policy_alone(monkeypatch):
  monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
  ended, printed = commands.printed(
    ask, "--config=configs/quickstart.py", "--budget=1", "gebos founder ?"
  )
  assert ended == 0 and "1 search left" in printed


def test_base_url_with_a_password_is_refused_and_not_shown(tmp_path):
  url = "http://ann:secret-word@127.0.0.1:9/v1"
  done = asked(tmp_path, "--documents=notes", "x", OPENAI_BASE_URL=url)
  assert done.returncode == 2
  assert "secret-word" not in done.stderr + done.stdout


def test_variables_set_flags_and_typed_flags_win(monkeypatch, notes):
  with chat_endpoint.served() as server:
    monkeypatch.setenv("ANYSEARCH_OPENAI", server.url)
    monkeypatch.setenv("ANYSEARCH_DOCUMENTS", "notes")
    monkeypatch.setenv("ANYSEARCH_JSON", "true")
    monkeypatch.setenv("ANYSEARCH_BUDGET", "2")
    ended, printed = commands.printed(ask, QUESTION)
    assert ended == 0 and json.loads(printed)["budget"] == 2
    # Commands that this one starts get its flags, not its variables.
    assert "ANYSEARCH_BUDGET" not in os.environ
    monkeypatch.setenv("ANYSEARCH_JSON", "true")
    monkeypatch.setenv("ANYSEARCH_BUDGET", "2")
    arguments = ("--documents=notes", f"--openai={server.url}")
    ended, printed = commands.printed(
      ask, *arguments, "--budget=1", "--nojson", QUESTION
    )
    assert ended == 0 and printed.startswith("1 search left")


def test_a_list_that_is_typed_replaces_that_of_a_variable(monkeypatch):
  monkeypatch.setenv("ANYSEARCH_DOCUMENTS", "elsewhere")
  monkeypatch.setenv("ANYSEARCH_OCR", "")
  said = commands.run(ask, "--documents=nowhere", NOBODY, "x")
  assert "found nothing at nowhere" in said


def test_a_value_of_the_wrong_form_names_its_variable(monkeypatch):
  monkeypatch.setenv("ANYSEARCH_SEED", "x")
  assert "ANYSEARCH_SEED: invalid literal" in commands.run(ask, "x")


def test_unknown_variable_is_named_and_its_value_is_not(monkeypatch, capsys):
  for name in ("OPNAI", "BUDGETS", "TEST_ALL", "KEYS", "SOMETHING_ELSE"):
    monkeypatch.setenv(f"ANYSEARCH_{name}", "secret-word")
  with commands.defined(ask):
    assert variables.take_arguments([]) == []
  said = capsys.readouterr().err
  # `evaluate` has --budgets; the others are of the tests and of `cluster`.
  assert re.findall(r"warning: (\w+):", said) == [
    "ANYSEARCH_OPNAI",
    "ANYSEARCH_SOMETHING_ELSE",
  ]
  assert "Did you mean ANYSEARCH_OPENAI?" in said
  assert "secret-word" not in said


def test_every_variable_of_the_project_is_known_to_the_commands():
  named = {
    name
    for folder in ("launch", "examples", "tests", "research", ".ci")
    for path in (source_tree.ROOT / folder).rglob("*")
    if path.suffix in ("", ".py", ".sh", ".ipynb", ".jinja")
    and path.is_file()
    and path.name != "test_variables.py"
    for name in re.findall(r"\bANYSEARCH_[A-Z][A-Z_]+[A-Z]", path.read_text())
  }
  set_flags = {
    f"ANYSEARCH_{flag.name.upper()}"
    for command in command_table.commands()
    for flag in command_table.flags_of(command)
  }
  assert named - set_flags <= variables._OTHERS
  assert "ANYSEARCH_KEYS" in named


@pytest.mark.parametrize(
  ("command", "arguments", "sentence"),
  [
    (ask, ["--documents=nowhere"], "documents: found nothing at nowhere"),
    (ask, ["--documents=notes/*.pdf"], "found nothing at notes/*.pdf"),
    (ask, ["--index=nowhere"], "nowhere: found no folder, expected an index"),
    (ask, ["--documents=notes", "--ocr=nowhere"], "no program 'nowhere'"),
    (ask, ["--documents=notes", "--hf=nowhere"], "--hf=nowhere: found no fol"),
    (serve, ["--documents=nowhere"], "documents: found nothing at nowhere"),
    (serve, ["--mcp", "--documents=nowhere"], "found nothing at nowhere"),
    (
      *(serve, ["--documents=notes", "--keys=nowhere.json"]),
      "--keys=nowhere.json: found no keys",
    ),
    (
      *(evaluate, ["--documents=nowhere", "--output=o"]),
      "documents: found nothing at nowhere",
    ),
    (
      evaluate,
      ["--documents=notes", "--questions=nowhere.csv", "--output=o"],
      "--questions=nowhere.csv: found no file",
    ),
  ],
)
def test_a_missing_path_is_said_before_a_model_is_asked(
  command, arguments, sentence
):
  assert sentence in commands.run(command, NOBODY, *arguments)


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--documents=nowhere"], "documents: found nothing at nowhere"),
    (["--corpus=nowhere.jsonl"], "nowhere.jsonl: found no file"),
    (
      ["--documents=notes", "--questions=nowhere.jsonl"],
      "nowhere.jsonl: found no file",
    ),
  ],
)
def test_a_missing_path_is_said_before_an_encoder_is_read(arguments, sentence):
  said = commands.run(
    *(build_index, "--kind=flat", "--encoder=no_encoder", "--output=o"),
    *arguments,
  )
  assert sentence in said


def test_json_is_whole_or_absent_and_titles_have_no_quotes(tmp_path):
  with chat_endpoint.served() as server:
    flags = ("--documents=notes", f"--openai={server.url}", "--json")
    done = asked(tmp_path, *flags, QUESTION)
    row = json.loads(done.stdout)
    assert row["citations"][0]["title"] == "Lease"
    assert row["documents"][0][0]["title"] == "Lease"
  assert done.returncode == 0
  done = asked(tmp_path, "--documents=nowhere", NOBODY, "--json", "x")
  assert done.returncode == 1 and done.stdout == ""
  (sentence,) = done.stderr.splitlines()
  assert sentence.startswith(
    "anysearch ask: documents: found nothing at nowhere"
  )


def test_a_warning_is_a_sentence(tmp_path):
  with chat_endpoint.served(refused=("seed", "top_p")) as server:
    flags = ("--documents=notes", f"--openai={server.url}")
    done = asked(tmp_path, *flags, QUESTION)
  assert done.returncode == 0, done.stderr
  warnings = [x for x in done.stderr.splitlines() if "from now on" in x]
  assert warnings and all(x.startswith("warning: ") for x in warnings)
  assert not re.search(r"^[WE]\d{4} ", done.stderr, re.MULTILINE)


_COMMAND = """
from absl import logging
from anysearch_jax.launch import flags

flags.run(
  lambda argv: logging.warning("It \\x1b[2J is late."), plain_log={plain}
)
"""


@pytest.mark.parametrize(
  ("plain", "line"),
  [
    (True, r"warning: It \ufffd\[2J is late\."),
    (False, r"W\d{4} \d\d:\d\d:\d\d\.\d+ .*\] It .* is late\."),
  ],
)
def test_commands_that_run_for_long_keep_time_and_place(plain, line):
  code = _COMMAND.format(plain=plain)
  done = source_tree.python("-c", code, check=True)
  assert re.fullmatch(line, done.stderr.strip()), done.stderr


_COLOUR = re.compile(r"\x1b\[(?:\d+;)*(3[0-8]|9[0-7])[;m]")


def test_colours_are_forced_and_forbidden(tmp_path):
  with chat_endpoint.served() as server:
    flags = ("--documents=notes", f"--openai={server.url}", QUESTION)
    plain = asked(tmp_path, *flags, TERM="xterm")
    forced = asked(tmp_path, *flags, TERM="xterm", FORCE_COLOR="1")
    forbidden = asked(
      *(tmp_path, *flags), TERM="xterm", FORCE_COLOR="1", NO_COLOR="1"
    )
  assert "\x1b" not in plain.stdout
  assert _COLOUR.search(forced.stdout)
  assert forbidden.returncode == 0 and not _COLOUR.search(forbidden.stdout)
