"""Commands as a user types them, played in the process of the tests."""

from __future__ import annotations

import contextlib
import io

from absl import app, flags

from launch import flags as launch_flags


@contextlib.contextmanager
def defined(command):
  """The flags of a command module; afterwards there are none of them."""
  before = set(flags.FLAGS)
  command.define_flags()
  try:
    yield
  finally:
    for name in set(flags.FLAGS) - before:
      delattr(flags.FLAGS, name)


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
