"""Runs the commands of a page and compares what they print with what it shows.

A page shows output so:

        anysearch list

    <!-- prints -->
    ```text
    systems:
      anysearch  trained
    ...
    ```

The command is the last one of the indented block before the comment. A comment
`<!-- prints, with --budgets=0 -->` adds flags that make it quick, and
`<!-- prints slowly -->` leaves it to `make test-all`. Numbers and spaces may
differ; a line `...` stands for any number of lines.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import re
import shlex
import sys
from unittest import mock

import commands
import source_tree

from anysearch_jax.launch import __main__ as by_name
from anysearch_jax.launch import command_table

LINES_SHOWN = 15
_BLOCK = re.compile(
  r"(?P<commands>(?:^    [^\n]*\n)+)\n"
  r"<!-- prints(?P<slowly> slowly)?(?:, with (?P<flags>[^\n]*?))? -->\n"
  r"```text\n(?P<output>(?:[^\n]*\n)*?)```",
  re.MULTILINE,
)
_COMMAND = re.compile(r"(?:anysearch|python -m launch\.)\s*(.*)")
_FILE = re.compile(r"```\w+ title=\"(\S+)\"\n(.*?)```", re.DOTALL)
# How many of these a command prints depends on the machine's speed.
_PROGRESS = re.compile(
  r"^(?:(?:episode|file|MB read) \d+|rollout [01])/\d+.*\n", re.MULTILINE
)
_NUMBER = re.compile(r"(?<![A-Za-z])\d[\d,.]*\d|(?<![A-Za-z])\.?\d")


@dataclasses.dataclass(frozen=True)
class Shown:
  """A command of a page, and what the page says that it prints.

  Attributes:
    page: the file.
    arguments: the command's name and its flags, those of the comment last.
    output: the lines of the block.
    span: where the block's text begins and ends in the page.
    slow: whether only `make test-all` runs it.
  """

  page: pathlib.Path
  arguments: tuple[str, ...]
  output: str
  span: tuple[int, int]
  slow: bool


def shown(page: pathlib.Path) -> list[Shown]:
  """Returns the outputs that a page shows, in its order."""
  blocks = []
  for match in _BLOCK.finditer(page.read_text()):
    lines = match["commands"].replace("\\\n", " ").splitlines()
    command = _COMMAND.search(lines[-1])
    assert command is not None, (
      f"{page.name}: found no command in {lines[-1]!r}"
    )
    arguments = shlex.split(command[1], comments=True)
    arguments += shlex.split(match["flags"] or "")
    block = Shown(
      page=page,
      arguments=tuple(arguments),
      output=match["output"],
      span=match.span("output"),
      slow=bool(match["slowly"]),
    )
    blocks.append(block)
  return blocks


def printed(block: Shown, replaced: dict[str, str]) -> str:
  """Runs the command of a block in this process; returns what it prints.

  Args:
    block: the command; it must end with a status of 0.
    replaced: texts of its arguments and what to write instead, as an address
      that only a test knows; in the output they are turned back.
  """
  if not block.arguments:
    return by_name.usage()
  name, *flags = block.arguments
  module, *implied = command_table.ALIASES.get(name, (name,))
  command = importlib.import_module(f"anysearch_jax.launch.{module}")
  for text, instead in replaced.items():
    flags = [flag.replace(text, instead) for flag in flags]
  # The doctor leaves checks that hang behind.
  with mock.patch("os._exit", side_effect=sys.exit):
    status, output = commands.printed(command, *implied, *flags)
  assert not status, (status, output)
  for text, instead in replaced.items():
    output = output.replace(instead, text)
  output = output.replace(sys.executable, ".venv/bin/python")
  output = output.replace(f"{source_tree.ROOT}/", "")
  return _PROGRESS.sub("", output)


def write_files(page: pathlib.Path, folder: pathlib.Path) -> None:
  """Writes the files whose text a page shows into a folder."""
  for name, text in _FILE.findall(page.read_text()):
    (folder / name).write_text(text)


def shortened(output: str) -> str:
  """Returns the first lines of an output, as a page shows them."""
  lines = [line.rstrip() for line in output.strip("\n").splitlines()]
  if len(lines) > LINES_SHOWN:
    lines = [*lines[: LINES_SHOWN - 1], "..."]
  return "\n".join(lines) + "\n"


def agrees(shown_lines: str, output: str) -> bool:
  """Whether an output is what a page shows, but for numbers and spaces."""
  pattern = ""
  for line in shown_lines.strip("\n").splitlines():
    if line.strip() == "...":
      pattern += r"(?:.*\n)*"
    else:
      pattern += re.escape(_masked(line)) + r"\n"
  text = "".join(
    _masked(line) + "\n" for line in output.strip("\n").splitlines()
  )
  return re.fullmatch(pattern, text) is not None


def _masked(line: str) -> str:
  return " ".join(_NUMBER.sub("#", line).split())
