r"""Prints a script that completes commands, flags and values in a shell.

    anysearch completion bash \
        > ~/.local/share/bash-completion/completions/anysearch
    anysearch completion zsh > ~/.zfunc/_anysearch

For fish, write it to ~/.config/fish/completions/anysearch.fish. A shell that is
open reads the script by `source <(anysearch completion bash)`. Each flag has a
line about its meaning.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence

from absl import app

from anysearch_jax.launch import command_table
from anysearch_jax.launch import flags as launch_flags

_CHARACTERS = 72  # Limit on the line about a flag.
_BASH = r"""
_anysearch_commands() {
  cat <<'END'
@COMMANDS@
END
}
_anysearch_flags() {
  case $1 in
@FLAGS@
  esac
}
_anysearch_values() {
  case $1 in
@VALUES@
  esac
}
# Offers the lines of the input that begin with a word. Their meanings are shown
# in lists; a line that is inserted, alone or by turns (% and *), has none.
_anysearch_offer() {
  local line names=() lines=()
  while IFS= read -r line; do
    if [[ $line == "$1"* ]]; then
      names+=("${line%% *}")
      lines+=("${line:0:${COLUMNS:-80}-2}")
    fi
  done
  if ((${#names[@]} == 1)) || [[ ${COMP_TYPE-} == @(37|42) ]]; then
    COMPREPLY=("${names[@]}")
    [[ ${names[0]-} != *= ]] || compopt -o nospace 2> /dev/null
  else
    COMPREPLY=("${lines[@]}")
  fi
}
_anysearch() {
  local word=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]//-/_}
  local before=${COMP_WORDS[COMP_CWORD - 1]} flag=
  COMPREPLY=()
  # Bash takes "=" for a word of its own.
  if [[ $word == "=" ]]; then
    flag=$before
    word=
  elif [[ $before == "=" ]]; then
    flag=${COMP_WORDS[COMP_CWORD - 2]}
  fi
  if ((COMP_CWORD == 1)); then
    _anysearch_offer "$word" < <(_anysearch_commands)
  elif [[ $flag ]]; then
    _anysearch_offer "$word" < <(_anysearch_values "$command$flag")
  elif [[ $word == -* ]]; then
    _anysearch_offer "$word" < <(_anysearch_flags "$command")
  fi
}
# Without an offer of ours, bash completes the names of files.
complete -o default -o nosort -F _anysearch anysearch
"""
_ZSH = """#compdef anysearch
_anysearch() {
  local -a commands
  if ((CURRENT == 2)); then
    commands=(
@COMMANDS@
    )
    _describe command commands
    return
  fi
  shift words
  ((CURRENT--))
  case ${words[1]//-/_} in
@FLAGS@
  esac
}
if [[ $funcstack[1] == _anysearch ]]; then
  _anysearch "$@"
else
  compdef _anysearch anysearch
fi
"""


def define_flags() -> None:
  """Defines no flag: the command has none."""


def main(argv: Sequence[str]) -> None:
  scripts = {"bash": bash, "zsh": zsh, "fish": fish}
  if len(argv) != 2 or argv[1] not in scripts:
    raise app.UsageError(
      f"Found {' '.join(argv[1:]) or 'no shell'}, expected one of "
      f"{', '.join(scripts)}."
    )
  print(scripts[argv[1]](), end="")


def bash() -> str:
  """Returns the script for bash."""
  flag_cases: list[str] = []
  value_cases: list[str] = []
  commands = command_table.commands()
  for command in commands:
    flags = command_table.flags_of(command)
    flag_lines = [f"{_form(flag)}  ({_short(flag.meaning)})" for flag in flags]
    flag_lines.append("--helpfull  (All flags.)")
    flag_cases += _here_document(command, flag_lines)
    for flag in flags:
      if flag.values:
        value_cases += _here_document(f"{command}--{flag.name}", flag.values)
  return (
    _BASH.lstrip()
    .replace("@COMMANDS@", "\n".join(f"{c}  ({commands[c]})" for c in commands))
    .replace("@FLAGS@", "\n".join(flag_cases))
    .replace("@VALUES@", "\n".join(value_cases))
  )


def _here_document(case: str, lines: Sequence[str]) -> list[str]:
  """Returns a case of bash that prints lines."""
  return [f"    {case}) cat <<'END'", *lines, "END", "      ;;"]


def zsh() -> str:
  """Returns the script for zsh."""
  cases: list[str] = []
  for command in command_table.commands():
    arguments = [
      f"{_form(flag)}[{_escaped(_short(flag.meaning))}]"
      + ("" if flag.kind == "bool" else f":value:{_zsh_values(flag)}")
      for flag in command_table.flags_of(command)
    ]
    arguments += ["--helpfull[All flags.]", "*:file:_files"]
    quoted = " \\\n        ".join(map(shlex.quote, arguments))
    cases.append(f"    {command}) _arguments \\\n        {quoted} ;;")
  commands = (
    f"      {shlex.quote(f'{name}:{_escaped(line)}')}"
    for name, line in command_table.commands().items()
  )
  return _ZSH.replace("@COMMANDS@", "\n".join(commands)).replace(
    "@FLAGS@", "\n".join(cases)
  )


def _zsh_values(flag: command_table.Flag) -> str:
  return f"({' '.join(flag.values)})" if flag.values else "_files"


def _escaped(text: str) -> str:
  """Returns a text in which zsh finds no mark of its own."""
  for mark in ("\\", "[", "]", ":", "`", "$"):
    text = text.replace(mark, f"\\{mark}")
  return text


def fish() -> str:
  """Returns the script for fish."""
  return "".join(f"complete -c anysearch {line}\n" for line in _fish_lines())


def _fish_lines() -> Iterator[str]:
  for name, line in command_table.commands().items():
    yield f"-f -n __fish_use_subcommand -a {name} -d {shlex.quote(line)}"
    condition = shlex.quote(f"__fish_seen_subcommand_from {name}")
    for flag in command_table.flags_of(name):
      takes = "" if flag.kind == "bool" else " -r"
      if flag.values:
        takes = f" -x -a {shlex.quote(' '.join(flag.values))}"
      meaning = shlex.quote(_short(flag.meaning))
      yield f"-n {condition} -l {flag.name}{takes} -d {meaning}"


def _form(flag: command_table.Flag) -> str:
  return f"--{flag.name}" + ("" if flag.kind == "bool" else "=")


def _short(meaning: str) -> str:
  """Returns the first sentence of a meaning, cut to a line."""
  first, _, _ = " ".join(meaning.split()).partition(". ")
  return textwrap.shorten(first, _CHARACTERS, placeholder=" ...")


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, arguments="bash|zsh|fish")
