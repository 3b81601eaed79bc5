"""What `--help` prints: usage, two examples and the flags needed first."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

from absl import flags

WIDTH = 80
_INDENT = 24  # Columns before the meaning of a flag.
_EXAMPLES = 2
# A command in a docstring, with the lines that continue it.
_EXAMPLE = r"^    {command}\b.*(?:(?<=\\)\n.*)*"
# The long form of --config.<path>=<value>, which nobody types.
_HIDDEN = "set_config"
# What absl adds to the meaning of a flag that may be repeated.
_REPEATED = "; repeat this option to specify a list of values"


def text(
  command: str, docstring: str, arguments: str, first_flags: Sequence[str]
) -> str:
  """Returns the short help of a command.

  Args:
    command: what the user types, such as `anysearch ask`.
    docstring: that of its module: a line, then examples among other lines.
    arguments: names of its arguments that are not flags; "": it has none.
    first_flags: names of the flags to list; (): all of the command.
  """
  all_flags = _command_flags()
  lines = [
    f"usage: {command} [flags] {arguments}".rstrip(),
    "",
    docstring.partition("\n")[0],
    "",
    *examples(command, docstring),
  ]
  if all_flags:
    lines.append("")
  for name in first_flags or all_flags:
    lines += _flag_lines(flags.FLAGS[name])
  full_help = "says more"
  if len(all_flags) > len(first_flags) > 0:
    full_help = f"lists all {len(all_flags)} flags"
  if _HIDDEN in flags.FLAGS:
    full_help += " and every --config.<path>=<value>"
  return "\n".join([*lines, "", f"`{command} --helpfull` {full_help}."])


def examples(command: str, docstring: str) -> list[str]:
  """Returns the first examples of a command in a docstring.

  Args:
    command: what the user types.
    docstring: that of its module.
  """
  pattern = _EXAMPLE.format(command=re.escape(command))
  return re.findall(pattern, docstring, re.MULTILINE)[:_EXAMPLES]


def _command_flags() -> list[str]:
  """Returns the names of the flags that are not absl's."""
  return [
    name
    for name in flags.FLAGS
    if name != _HIDDEN
    and not str(flags.FLAGS.find_module_defining_flag(name)).startswith("absl.")
  ]


def _flag_lines(flag: flags.Flag) -> list[str]:
  """Returns the lines about a flag: its form, and its meaning beside it."""
  form = f"  --{flag.name}"
  meaning = " ".join(flag.help.split()).removesuffix(_REPEATED)
  if not flag.boolean:
    values: Any = getattr(flag.parser, "enum_values", ())
    form += f"={'|'.join(values) or '...'}"
    meaning = meaning.removeprefix(f"<{'|'.join(values)}>: ")
  if flag.default not in (None, "", [], False) and "efault" not in meaning:
    meaning += f" Default: {flag.default}."
  wrapped = textwrap.wrap(meaning, WIDTH - _INDENT)
  if len(form) + 2 > _INDENT:
    wrapped.insert(0, "")
  return [
    f"{head:{_INDENT}}{line}".rstrip()
    for head, line in zip([form, *[""] * len(wrapped)], wrapped)
  ]
