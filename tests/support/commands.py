"""Commands as a user types them, played in the process of the tests."""

from __future__ import annotations

import contextlib
import io

from absl import app, flags

from launch import flags as launch_flags


@contextlib.contextmanager
def defined(command):
  """The flags of a command module, and none that another one has defined."""
  values = flags.FLAGS
  # Those that were put back are of no module any more.
  others = {
    name: values[name]
    for name in values
    if values.find_module_defining_flag(name, "launch").startswith("launch")
  }
  for name in others:
    delattr(values, name)
  before = set(values)
  command.define_flags()
  try:
    yield
  finally:
    for name in set(values) - before:
      delattr(values, name)
    for name, flag in others.items():
      values[name] = flag


def run(command, *arguments):
  """Runs a command: what it ended with, "" where it came to its end."""
  with (
    defined(command),
    contextlib.redirect_stdout(io.StringIO()),
    contextlib.redirect_stderr(io.StringIO()) as said,
  ):
    try:
      command.main(launch_flags._parse_argv(["command", *arguments]))
    except SystemExit as ended:
      return said.getvalue() if isinstance(ended.code, int) else ended.code
    except app.UsageError as error:
      return str(error)
  return ""
