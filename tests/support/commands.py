"""Runs commands as a user types them, in the process of the tests."""

from __future__ import annotations

import contextlib
import io

from absl import flags

from anysearch_jax.config import settings
from anysearch_jax.launch import flags as launch_flags


@contextlib.contextmanager
def defined(command):
  """Defines the flags of one command module, and no other's."""
  values = flags.FLAGS
  # Those that were put back are of no module any more.
  launch = "anysearch_jax.launch"
  others = {
    name: values[name]
    for name in values
    if values.find_module_defining_flag(name, launch).startswith(launch)
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
  """Runs a command; returns its exit message, or "" if it finished."""
  ended, _ = printed(command, *arguments)
  return "" if ended == 0 else str(ended)


def printed(command, *arguments):
  """Runs a command; returns its exit message or code, and what it printed."""
  with (
    defined(command),
    contextlib.redirect_stdout(io.StringIO()) as out,
    contextlib.redirect_stderr(io.StringIO()) as said,
  ):
    try:
      argv = launch_flags._parse_argv(["command", *arguments])
      ended = launch_flags.call_command(command.main, argv) or 0
    except SystemExit as error:
      ended = error.code
      if ended == 2:
        text = said.getvalue().partition("\nPass --help to see the flags.")[0]
        name = launch_flags._command_name(command.main.__module__)
        ended = text.removeprefix(f"{name}: ")
  return ended, out.getvalue()


def config_file(path, config):
  """Writes a file of a configuration; returns the flag that names it."""
  path.write_text(
    "from anysearch_jax import config\n"
    "from anysearch_jax.config import settings\n\n\n"
    "def get_config():\n"
    "  return settings.from_dict(\n"
    f"    config.ExperimentConfig, {settings.to_dict(config)!r}\n"
    "  )\n"
  )
  return f"--config={path}"
