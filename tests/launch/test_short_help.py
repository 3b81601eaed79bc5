"""`--help` of every command, and the table of their flags."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess

import commands
import pytest
import source_tree
from absl import flags

from anysearch_jax.launch import command_table

NAMES = sorted(command_table.commands())


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_two_examples_and_the_flags_needed_first(name):
  done = source_tree.python("-m", "anysearch_jax.launch", name, "-h")
  assert done.returncode == 0, done.stderr
  usage, empty, sentence, _, *lines = done.stdout.splitlines()
  assert usage.startswith(f"usage: anysearch {name} [flags]") and not empty
  assert sentence.endswith(".")
  assert len(lines) <= 50 and all(len(line) <= 90 for line in lines)
  assert "launch." not in done.stdout
  known = {flag.name for flag in command_table.flags_of(name)}
  text = done.stdout.replace("\\\n", " ")
  examples = re.findall(r"^    (anysearch .*)$", text, re.MULTILINE)
  assert len(examples) == 2
  for example in examples:
    assert shlex.split(example, comments=True)[1] == name
    assert {*re.findall(r" --([a-z_]+)(?:[= ]|$)", example)} <= known, example
  listed = re.findall(r"^  --([a-z_]+)", done.stdout, re.MULTILINE)
  assert {*listed} <= known and len(listed) <= 12
  assert bool(listed) == bool(known)
  assert lines[-1].startswith(f"`anysearch {name} --helpfull` ")


@pytest.mark.parametrize("name", NAMES)
def test_table_has_the_flags_that_the_command_defines(name):
  command, *_ = command_table.ALIASES.get(name, (name,))
  module = importlib.import_module(f"anysearch_jax.launch.{command}")
  before = {*flags.FLAGS}
  with commands.defined(module):
    defined = {n: flags.FLAGS[n] for n in {*flags.FLAGS} - before}
    # Flags of other commands that this process had imported.
    defined |= {
      flag.name: flags.FLAGS[flag.name] for flag in command_table.flags_of(name)
    }
  table = {flag.name: flag for flag in command_table.flags_of(name)}
  assert table.keys() == defined.keys()
  for flag in table.values():
    values = getattr(defined[flag.name].parser, "enum_values", ())
    assert list(flag.values) == list(values)
    first, _, _ = flag.meaning.partition("...")
    meaning = " ".join(defined[flag.name].help.split())
    assert flag.kind == "alias" or first in meaning


def test_full_help_lists_every_flag_and_the_short_one_survives_a_closed_pipe():
  done = source_tree.python("-m", "anysearch_jax.launch", "ask", "--helpfull")
  assert done.returncode == 0
  for flag in command_table.flags_of("ask"):
    assert re.search(rf"--(\[no\])?{flag.name}:", done.stdout), flag
  assert "--config.reward.alpha=" in done.stdout
  closed = source_tree.started(
    *("-m", "anysearch_jax.launch", "ask", "-h"), stderr=subprocess.PIPE
  )
  closed.stdout.close()
  assert closed.stderr.read() == ""
  closed.wait(60)


def test_help_about_a_command_is_its_help():
  texts = {
    source_tree.python("-m", "anysearch_jax.launch", *words).stdout
    for words in (("help", "init"), ("init", "--help"), ("init", "-h"))
  }
  assert len(texts) == 1 and "usage: anysearch init" in texts.pop()


def test_help_as_an_argument_is_an_argument(tmp_path):
  done = source_tree.python("-m", "launch.list", "--", "--help")
  assert done.returncode == 2 and "Found '--help'" in done.stderr
