"""Starts a command by its name: `anysearch train`, `python -m launch train`.

`anysearch X` becomes `python -m launch.X` in the same process, with the same
arguments, so process listings and signals treat the two alike.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import os
import platform
import sys

import anysearch_jax
from anysearch_jax.launch import command_table, shipped, stopping


def usage() -> str:
  """Returns the list of commands, as `anysearch --help` prints it."""
  descriptions = command_table.commands()
  width = max(map(len, descriptions))
  command_lines = (
    f"  {name:{width}}  {line}" for name, line in descriptions.items()
  )
  hint = "`anysearch COMMAND --help` lists a command's flags and configuration."
  return "\n".join(
    ["usage: anysearch COMMAND [flags]", "", *command_lines, "", hint]
  )


def version() -> str:
  """Returns the versions that a report of an error needs, a line each."""
  version_lines = [
    f"anysearch {anysearch_jax.__version__}",
    f"Python {platform.python_version()}",
    platform.platform(),
  ]
  # Importing JAX takes a second.
  with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    version_lines.append(f"JAX {importlib.metadata.version('jax')}")
  return "\n".join(version_lines)


def main() -> None:
  """Replaces this process by the command that `sys.argv` names."""
  stopping.keep_output()
  requested, *arguments = sys.argv[1:] or ["--help"]
  if requested == "help" and arguments:
    requested, arguments = arguments[0], ["--help"]
  if requested in ("--help", "-h", "help"):
    print(usage())
    return
  if requested in ("--version", "version"):
    print(version())
    return
  name = requested.replace("-", "_")
  descriptions = command_table.commands()
  if name not in descriptions:
    suggestions = difflib.get_close_matches(name, descriptions, n=1)
    hint = f"did you mean {suggestions[0]!r}? " if suggestions else ""
    sys.stderr.write(
      f"anysearch: found no command {requested!r}; {hint}"
      "`anysearch --help` lists all.\n"
    )
    sys.exit(2)
  command, *alias_flags = command_table.ALIASES.get(name, (name,))
  os.execv(
    sys.executable,
    [
      *shipped.python(),
      "-m",
      f"anysearch_jax.launch.{command}",
      *alias_flags,
      *arguments,
    ],
  )


if __name__ == "__main__":
  main()
