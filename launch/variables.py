"""`ANYSEARCH_<FLAG>`: environment variables that set flags."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence

from absl import app, flags

from anysearch_jax.launch import command_table, stopping

PREFIX = "ANYSEARCH_"
# What other programs read: the jobs that `cluster` writes, the notebook of the
# examples, the tests.
_OTHERS = frozenset(
  f"{PREFIX}{name}"
  for name in (
    "CONFIG_CASES",
    "DATA",
    "KEYS",
    "MAY_SKIP",
    "MCP_URL",
    "OPENAI_URL",
    "ORIGINALS",
    "SESSION_KEY",
    "SESSION_URL",
    "SGLANG_COMMAND",
    "SGLANG_RECORD",
    "SGLANG_URL",
    "TEST_ALL",
    "TOKENIZERS",
    "URL",
    "VLLM_PYTHON",
    "WRITE_PAGES",
  )
)


def take_arguments(typed: Sequence[str]) -> list[str]:
  """Returns the flags that variables set, and removes the variables.

  Commands that this one starts thus get the flags that it passes, no others.
  Flags that are typed win. An empty variable counts as absent. Names of
  variables that set no flag of any command are said, never their values.

  Args:
    typed: the words of the command line.

  Raises:
    app.UsageError: a value has the wrong form for its flag.
  """
  typed_names = {
    word.lstrip("-").partition("=")[0] for word in typed if word[:1] == "-"
  }
  arguments = []
  unknown = []
  names = [name for name in os.environ if name.startswith(PREFIX)]
  for variable in sorted({*names} - _OTHERS):
    flag = variable.removeprefix(PREFIX).lower()
    if flag not in flags.FLAGS:
      unknown.append(variable)
      continue
    value = os.environ.pop(variable)
    if value and typed_names.isdisjoint((flag, f"no{flag}")):
      try:
        flags.FLAGS[flag].parser.parse(value)
      except (ValueError, TypeError) as error:
        raise app.UsageError(f"{variable}: {error}") from error
      arguments.append(f"--{flag}={value}")
  if unknown:
    _take_others(unknown)
  return arguments


def _take_others(names: Sequence[str]) -> None:
  """Removes the variables of other commands, and says which are for none."""
  expected = {
    PREFIX + flag.name.upper()
    for command in command_table.commands()
    for flag in command_table.flags_of(command)
  }
  for variable in names:
    if variable in expected:
      del os.environ[variable]
    else:
      nearest = difflib.get_close_matches(variable, expected, n=1)
      hint = f" Did you mean {nearest[0]}?" if nearest else ""
      stopping.say(
        f"warning: {variable}: found a variable that sets no flag of any "
        f"command, expected {PREFIX}<FLAG>.{hint}"
      )
