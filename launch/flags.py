r"""The `--config` flags that every command shares, over absl.

    anysearch train --config=configs/quickstart.py \
        --config.reward.gamma_mode=off --config.seed=7

`--config=FILE` names a Python file whose `get_config()` returns a
`config.ExperimentConfig`; `--config=FILE:PRESET` names one of its presets.
`--config.<path>=<value>` replaces one value, parsed as the type of its
dataclass field.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import logging as std_logging
import os
import pathlib
import re
import signal
import sys
import textwrap
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import settings as config_settings
from anysearch_jax.host import disk, plugins, terminal
from anysearch_jax.launch import (
  command_table,
  shipped,
  short_help,
  stopping,
  variables,
)

_PREFIX = "config."
# Names of settings in other programs, for suggestions.
_OTHER_NAMES = {
  "lr": "learning_rate",
  "steps": "total_steps",
  "bs": "questions",
}
_BARE_OVERRIDE = re.compile("--set_config=[^=]*")
_HELP = frozenset(("-h", "-help", "-?", "--help", "--helpshort"))
_HELPFULL = ("-helpfull", "--helpfull")


# Errors that end a command with a sentence and no traceback.
_REFUSALS = (OSError, ValueError, types.EngineError, types.RetrievalError)


def run(
  main: Callable[[Sequence[str]], Any],
  *,
  resumes: bool = False,
  arguments: str = "",
  first_flags: Sequence[str] = (),
  plain_log: bool = False,
) -> None:
  """Runs a command: `app.run` with `--config` flags and short error messages.

  `--help` and `--helpfull` exit with 0. A usage error prints one sentence and
  exits with 2; absl would print every flag before it.

  Args:
    main: is called with the arguments that are not flags.
    resumes: whether the same command resumes after a stop; see `stopping`.
    arguments: names of its arguments that are not flags, for `--help`; "": it
      has none.
    first_flags: names of the flags that `--help` lists; (): all.
    plain_log: whether warnings are sentences, for commands that people talk to;
      otherwise they have time and place.
  """

  def short(argv: Sequence[str]) -> Any:
    # Libraries log every file they open; progress lines are what users read.
    logging.set_verbosity(logging.WARNING)
    if plain_log:
      logging.get_absl_handler().setFormatter(_SentenceFormatter())
    disk.hide_tracebacks()
    with stopping.command(resumes=resumes):
      return call_command(main, argv, arguments=bool(arguments))

  def parse(argv: Sequence[str]) -> list[str]:
    if not _HELP.isdisjoint(_flags_of(argv)):
      _print_help(arguments, first_flags)
      sys.exit(0)
    return _parse_argv(argv)

  app.run(short, flags_parser=parse)


def call_command(
  main: Callable[[Sequence[str]], Any],
  argv: Sequence[str],
  *,
  arguments: bool = True,
) -> Any:
  """Calls a command, and exits with a sentence if it refuses its input.

  Args:
    main: the command.
    argv: the name of the program, then the arguments that are not flags.
    arguments: whether the command has such arguments.

  Raises:
    SystemExit: with 2 if `main` raised UsageError, else with a sentence (1).
  """
  module = main.__module__
  name = _command() if module == "__main__" else _command_name(module)
  try:
    if len(argv) > 1 and not arguments:
      raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
    return main(argv)
  except app.UsageError as error:
    _refuse(error, name)
  except _REFUSALS as error:
    sentence = terminal.printable(str(error), keeps_lines=True)
    sys.exit(f"{name}: {sentence}")


class _SentenceFormatter(std_logging.Formatter):
  """Formats a record as `warning: SENTENCE`, without time and place."""

  def format(self, record: std_logging.LogRecord) -> str:
    sentence = terminal.printable(super().format(record), keeps_lines=True)
    return f"{record.levelname.lower()}: {sentence}"


def define_listening() -> None:
  """Defines the flags of the services that listen for HTTP."""
  flags.DEFINE_string(
    "host",
    "127.0.0.1",
    "Address to listen at; the default is reachable from this machine only, "
    "0.0.0.0 from others.",
  )
  flags.DEFINE_list(
    "hosts",
    [],
    "Further names under which clients reach the server, such as a proxy's. "
    "Without keys, requests for other names are refused.",
  )
  flags.DEFINE_float(
    "grace",
    30,
    "Seconds that open requests have to finish when the server stops.",
    0,
  )


def define_process() -> None:
  """Defines `--threads` and `--cache`, for `jax_setup.configure`."""
  flags.DEFINE_integer(
    "threads",
    0,
    "1: compute on one CPU thread, for several commands on one machine; 0: "
    "XLA chooses.",
    0,
  )
  flags.DEFINE_string(
    "cache",
    ".jax_cache",
    "Folder that keeps compiled programs for later runs; --cache= keeps none.",
  )


def define_devices() -> None:
  """Defines `--devices`, for commands that run beside others on a machine."""
  flags.DEFINE_enum(
    "devices",
    "all" if os.environ.get("JAX_PLATFORMS") else "cpu",
    ["all", "cpu"],
    "Accelerators that the command may use: all that it sees, or none.",
  )


def define_allow_cpu() -> None:
  """Defines `--allow_cpu`, for `jax_setup.refuse_cpu`."""
  flags.DEFINE_bool(
    "allow_cpu",
    False,
    "Compute on the CPU, even a large policy, which takes days.",
  )


def define_output() -> None:
  """Defines `--output`, for `run_folder`."""
  flags.DEFINE_string(
    "output", None, "Folder of the run; default: runs/<name>-<seed>."
  )


def define_training() -> None:
  """Defines the flags of a training, for the commands that start one."""
  define_config()
  define_output()
  define_process()
  define_allow_cpu()
  flags.DEFINE_string(
    "reward",
    None,
    "module:function or path/to/file.py:function of a reward of your own; "
    "short for --config.reward.function.",
  )
  define_agents()
  flags.DEFINE_float(
    "grace",
    None,
    "Seconds that a stop may take until its checkpoint is written; default: "
    "calculated from the last save.",
    0,
  )
  flags.DEFINE_bool("dry_run", False, "Print what would run, and end.")
  flags.DEFINE_bool(
    "wandb", False, "Also log to Weights & Biases (WANDB_API_KEY)."
  )
  flags.DEFINE_bool(
    "mlflow", False, "Also log to MLflow (MLFLOW_TRACKING_URI)."
  )
  flags.DEFINE_bool(
    "allow_changes",
    False,
    "Resume although settings of learning (rates, rewards, lengths) differ; "
    "provenance.json notes them.",
  )


def define_agents() -> None:
  """Defines `--agents`, for the commands that play programs."""
  flags.DEFINE_string(
    "agents",
    None,
    "A program that plays the episodes: a command, an address, or "
    "file.py:function; short for --config.agents.program, with "
    "episode.prompts=program unless that is set.",
  )


def define_prices(words: str) -> None:
  """Defines `--prices`, for `apply_prices`; `words` end its help text."""
  flags.DEFINE_list(
    "prices",
    [],
    "Dollars of a million tokens and of a thousand searches, such as "
    f"input=0.15,output=0.60,search=5; {words}",
  )


def apply_prices(
  config: config_lib.ExperimentConfig,
) -> config_lib.ExperimentConfig:
  """Returns a configuration with the prices of `--prices`.

  Raises:
    ValueError: a price has an unknown name or is no number.
  """
  expected = [f"{name}=" for name in ("input", "output", "search")]
  for price_flag in flags.FLAGS.prices:
    name, sign, dollars = price_flag.partition("=")
    config_settings.require("--prices", name + sign, expected)
    config = override(config, [f"evaluation.{name}_price={dollars}"])
  return config


def run_folder(
  config: config_lib.ExperimentConfig, output: str | None
) -> pathlib.Path:
  """Returns the folder of a run: `output`, or a default from name and seed.

  The default is not in `runs/quickstart`, which `make quickstart` fills.
  """
  return pathlib.Path(output or f"runs/{config.name}-{config.seed}")


def define_config(*, required: bool = True) -> None:
  """Defines `--config` and `--method`; call at import, before `run`."""
  flags.DEFINE_string(
    "config",
    None,
    "Python file whose get_config() returns an ExperimentConfig; FILE:PRESET "
    "names one of its presets.",
  )
  flags.DEFINE_multi_string(
    "set_config",
    [],
    "Long form of --config.<path>=<value>, which replaces one setting.",
  )
  flags.DEFINE_string(
    "method",
    None,
    "A system: a shipped one, or module:NAME or path/to/file.py:NAME of one of "
    "your own; sets method.name, episode.prompts and its training's settings.",
  )
  if required:
    sentence = f"{no_config()}."
    flags.register_validator(
      "config", lambda value: value is not None, sentence
    )


def no_config() -> str:
  """Returns what a command that lacks a configuration found and expected."""
  files = sorted((shipped.ROOT / "configs").glob("*.py"))
  names = [f.name for f in files if "def get_config(" in f.read_text()]
  return (
    "found no --config, expected --config=FILE of yours (`anysearch init` "
    "writes one), or one of the project's: "
    f"--config=configs/{{{','.join(names)}}}"
  )


def read_config() -> config_lib.ExperimentConfig:
  """Returns the configuration of the flags, or the defaults without a file.

  Raises:
    app.UsageError: the file or an override is invalid.
  """
  try:
    config = (
      load_config(flags.FLAGS.config)
      if flags.FLAGS.config is not None
      else config_lib.ExperimentConfig()
    )
    if flags.FLAGS.method is not None:
      from anysearch_jax.methods import systems  # Imports JAX.

      config = systems.select(config, flags.FLAGS.method)
    method_before = config.method.name
    config = override(config, flags.FLAGS.set_config)
    if (method := config.method.name) != method_before:
      raise ValueError(
        f"--config.method.name: found {method!r}, which would train with the "
        f"schedule and the settings of {method_before!r}; expected "
        f"--method={method} with a configuration of AnySearch, or "
        f"--config=configs/methods.py:{method} if the system is the project's."
      )
    if "reward" in flags.FLAGS and flags.FLAGS.reward is not None:
      config = override(config, [f"reward.function={flags.FLAGS.reward}"])
    if "agents" in flags.FLAGS and flags.FLAGS.agents is not None:
      config = _with_program(config, flags.FLAGS.agents)
    if "prices" in flags.FLAGS:
      config = apply_prices(config)
    policy = shipped.find_policy(config.policy)
  except ValueError as error:
    raise app.UsageError(str(error)) from error
  return dataclasses.replace(config, policy=policy)


def _with_program(
  config: config_lib.ExperimentConfig, program: str
) -> config_lib.ExperimentConfig:
  """Returns a configuration whose episodes a program plays."""
  prompts = "program"
  is_given = any(
    assignment.startswith("episode.prompts=")
    for assignment in flags.FLAGS.set_config
  )
  if is_given or config.agents.program:
    prompts = config.episode.prompts
  return config_lib.changed(
    config, agents={"program": program}, episode={"prompts": prompts}
  )


def load_config(name: str) -> config_lib.ExperimentConfig:
  """Runs the file's `get_config()`, or `get_config(preset)` for `FILE:preset`.

  A file `configs/...` that is missing here is taken from the project.

  Raises:
    ValueError: the file is missing, fails to run, or has no `get_config()` or
      no presets; a key is unknown or a value has the wrong type.
  """
  path, *preset = name.split(":", 1)
  path = shipped.find(path)
  if not path.endswith(".py") or not pathlib.Path(path).is_file():
    raise ValueError(
      f"--config={path}: found no such file in {os.getcwd()}; expected a "
      "Python file (.py) of yours, or one of the project's in "
      f"{shipped.ROOT / 'configs'}."
    )
  translate_errors = functools.partial(
    plugins.as_sentence, f"--config={path}", path, reraised=(ValueError,)
  )
  if not pathlib.Path(path).resolve().is_relative_to(shipped.ROOT):
    plugins.import_from(os.getcwd())
  with translate_errors():
    module = plugins.run_file(path)
  if not hasattr(module, "get_config"):
    raise ValueError(
      f"--config={path}: no get_config() in it; see configs/ for the form."
    )
  parameters = inspect.signature(module.get_config).parameters
  if preset and not parameters:
    raise ValueError(f"--config={name}: {path} has no presets; leave it out.")
  if not preset and any(p.default is p.empty for p in parameters.values()):
    presets = ", ".join(getattr(module, "PRESETS", ()))
    hint = f", one of {presets}" if presets else ""
    raise ValueError(
      f"--config={name}: found no preset, expected --config={name}:PRESET"
      f"{hint}."
    )
  with translate_errors():
    config = module.get_config(*preset)
  if not isinstance(config, config_lib.ExperimentConfig):
    raise ValueError(
      f"--config={path}: get_config() returned {type(config).__name__}, "
      "expected an ExperimentConfig."
    )
  # Dataclasses do not check the types of their fields; `from_dict` does.
  return config_settings.from_dict(
    type(config), config_settings.to_dict(config)
  )


def override(
  config: config_lib.ExperimentConfig, assignments: Sequence[str]
) -> config_lib.ExperimentConfig:
  """Applies `path=value` strings in order.

  Raises:
    ValueError: a path is unknown or a value has the wrong type.
  """
  for assignment in assignments:
    path, separator, text = assignment.partition("=")
    if not separator:
      raise ValueError(f"--config.{path}: no value; write --config.{path}=...")
    config = _replace(config, path.split("."), text, f"config.{path}")
  return config


def _replace(node: Any, keys: Sequence[str], text: str, path: str) -> Any:
  hints = typing.get_type_hints(type(node))
  key, *remaining_keys = keys
  if key not in hints:
    raise ValueError(
      f"--{path}: unknown key {key!r}; expected one of "
      f"{', '.join(sorted(hints))}.{_suggestion(keys[-1], text)}"
    )
  child = getattr(node, key)
  if dataclasses.is_dataclass(child):
    if not remaining_keys:
      raise ValueError(f"--{path} is a group; name one of its values.")
    value = _replace(child, remaining_keys, text, path)
  elif remaining_keys:
    raise ValueError(f"--{path}: {key!r} is a value and has no keys.")
  else:
    value = config_settings.typed(
      hints[key], config_settings.literal(hints[key], text), path
    )
  changes = {key: value}
  return dataclasses.replace(node, **changes)


def _suggestion(name: str, value: str) -> str:
  """Returns a question: the setting that a wrong name may mean, or ""."""
  defaults = config_settings.to_dict(config_lib.ExperimentConfig())
  paths = reversed([path for path, _ in config_settings.leaves(defaults)])
  paths_by_end = {path.rpartition(".")[2]: path for path in paths}
  matches = difflib.get_close_matches(
    _OTHER_NAMES.get(name, name), paths_by_end, n=1, cutoff=0.7
  )
  return (
    f" Did you mean --config.{paths_by_end[matches[0]]}={value}?"
    if matches
    else ""
  )


def _flags_of(argv: Sequence[str]) -> Sequence[str]:
  """Returns the words of a command line up to `--`, which ends its flags."""
  return argv[: argv.index("--")] if "--" in argv else argv


def _print_help(arguments: str, first_flags: Sequence[str]) -> None:
  """Prints the short help of the command that this process runs."""
  # Keeps `--help | head` from ending in a traceback.
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)
  docstring = sys.modules["__main__"].__doc__ or ""
  command = _command()
  if command.partition(" ")[0] != "anysearch":
    command = f"python -m {command}"
  print(short_help.text(command, docstring, arguments, first_flags))


def _parse_argv(argv: Sequence[str]) -> list[str]:
  """Parses flags with absl; `--config.a.b=v` becomes `--set_config=a.b=v`."""
  # Without this, --helpfull lists only what the command's own file defines.
  for module, defined in flags.FLAGS.flags_by_module_dict().items():
    if module.startswith("anysearch_jax.launch."):
      for flag in defined:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
  try:
    rewritten = [argv[0], *variables.take_arguments(argv[1:])]
  except app.UsageError as error:
    _refuse(error)
  for arg in argv[1:]:
    if arg.startswith("-") and arg.lstrip("-").startswith(_PREFIX):
      rewritten.append(f"--set_config={arg.lstrip('-')[len(_PREFIX) :]}")
    elif _BARE_OVERRIDE.fullmatch(rewritten[-1]) and not arg.startswith("--"):
      rewritten[-1] += f"={arg}"  # As in --config.seed 7.
    else:
      # absl's --helpfull lists flags of libraries too.
      rewritten.append("--help" if arg in _HELPFULL else arg)
  printed = io.StringIO()
  try:
    with contextlib.redirect_stdout(printed):
      return flags.FLAGS(rewritten)
  except flags.UnrecognizedFlagError as error:
    suggestion = _suggestion(error.flagname, error.flagvalue.partition("=")[2])
    has_config = "set_config" in flags.FLAGS
    _refuse(app.UsageError(f"{error}.{suggestion if has_config else ''}"))
  except flags.Error as error:
    _refuse(error)
  except SystemExit:
    # Only a help flag exits during parsing, and absl exits with 1.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(printed.getvalue())
    if "set_config" in flags.FLAGS and "--help" in rewritten:
      _print_config()
    sys.exit(0)


def _print_config() -> None:
  """Prints the values of the configuration that was named before it."""
  flags.FLAGS.mark_as_parsed()
  try:
    config = read_config()
  except app.UsageError as error:
    _refuse(error)
  print(help_text(config, flags.FLAGS.config or "the paper"))


def help_text(config: Any, source: str) -> str:
  """Returns the values of a configuration, from `source`, as flags by group."""
  lines = [f"configuration flags, with the values of {source}:"]
  for path, value, meta, sentence in config_settings.listed(config):
    path = f"--config.{path}".rstrip(".")
    if meta is None:
      text = " ".join(sentence.split())
      lines += ["", textwrap.fill(f"{path}: {text}", short_help.WIDTH)]
      continue
    facts = ", ".join(filter(None, (meta.kind, meta.range.words)))
    text = textwrap.fill(f"{sentence} ({facts})", short_help.WIDTH - 6)
    lines += [f"  {path}={format_value(value)}", textwrap.indent(text, " " * 6)]
  return "\n".join(lines)


def format_value(value: Any) -> str:
  """Returns a value in the form that its flag accepts."""
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, tuple):
    return ",".join(map(str, value)) or "()"
  return str(value)


def _command() -> str:
  """Returns the name of the command that this process runs."""
  spec = sys.modules["__main__"].__spec__
  return _command_name(spec.name) if spec else sys.argv[0]


def _command_name(module: str) -> str:
  """Returns `anysearch train` for `anysearch_jax.launch.train`."""
  name = module.removeprefix("anysearch_jax.").removesuffix(".__main__")
  folder, _, command = name.rpartition(".")
  if folder != "launch":
    return name
  for alias, (aliased, *flags_of_alias) in command_table.ALIASES.items():
    if command == aliased and set(flags_of_alias) <= set(sys.argv):
      command = alias
  return f"anysearch {command}"


def _refuse(error: Exception, command: str = "") -> NoReturn:
  """Exits with 2 and a message about the flags."""
  sentence = str(error).removeprefix("flag --config=None: ")
  text = terminal.printable(sentence, keeps_lines=True)
  sys.stderr.write(
    f"{command or _command()}: {text}\nPass --help to see the flags.\n"
  )
  sys.exit(2)
