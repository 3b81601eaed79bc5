"""The commands and their flags, read from the sources without importing them.

Importing all commands takes seconds, and needs the packages of extras.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from anysearch_jax.launch import shipped

# A command's other name, with the flags that it stands for.
ALIASES = {"chat": ("ask", "--chat"), "cluster": ("node", "--target=slurm")}
_START = re.compile(r"^  launch_flags\.run\(", re.M)  # Of a command.
_DEFINITION = "DEFINE_"
_PACKAGE = "anysearch_jax."


class Flag(NamedTuple):
  """A flag of a command.

  Attributes:
    name: its name.
    kind: as in absl's `DEFINE_<kind>`.
    meaning: its help text.
    values: the values of an enum; () for other kinds.
  """

  name: str
  kind: str
  meaning: str
  values: tuple[str, ...] = ()


def commands() -> dict[str, str]:
  """Returns the commands of `launch/`, each with its docstring's first line."""
  descriptions = {}
  for file in sorted((shipped.ROOT / "launch").glob("[!_]*.py")):
    if _START.search(file.read_text()):
      text = ast.get_docstring(_tree(file)) or ""
      descriptions[file.stem] = text.partition("\n")[0]
  for name, alias_words in ALIASES.items():
    descriptions[name] = f"The same as `{' '.join(alias_words)}`."
  return dict(sorted(descriptions.items()))


def flags_of(command: str) -> list[Flag]:
  """Returns the flags of a command, sorted by name.

  Args:
    command: the name of a command, or another name of it.
  """
  command, *_ = ALIASES.get(command, (command,))
  file = shipped.ROOT / "launch" / f"{command}.py"
  flags_by_name = {flag.name: flag for flag in _defined(file, "define_flags")}
  return [flags_by_name[name] for name in sorted(flags_by_name)]


@functools.cache
def _tree(file: pathlib.Path) -> ast.Module:
  return ast.parse(file.read_text())


def _defined(file: pathlib.Path, function: str) -> Iterator[Flag]:
  """Yields the flags that a function of a file defines, also by others."""
  tree = _tree(file)
  (body,) = (
    node
    for node in tree.body
    if isinstance(node, ast.FunctionDef) and node.name == function
  )
  for call in ast.walk(body):
    match call:
      case ast.Call(ast.Attribute(ast.Name("flags"), name)) if name.startswith(
        _DEFINITION
      ):
        yield _flag(call, name.removeprefix(_DEFINITION), tree)
      case ast.Call(ast.Attribute(ast.Name("dataclasses"), "fields")):
        yield from _fields(file, call.args[0])
      case ast.Call(ast.Attribute(ast.Name(module), name)) if name.startswith(
        "define_"
      ):
        yield from _defined(_imported(tree, module), name)
      case ast.Call(ast.Name(name)) if name.startswith("define_"):
        yield from _defined(file, name)


def _flag(call: ast.Call, kind: str, tree: ast.Module) -> Flag:
  name, *others = call.args
  if kind == "alias":
    return Flag(_text(name), kind, f"The same as --{_text(others[0])}.")
  values: tuple[str, ...] = ()
  if kind == "enum":
    values = tuple(_constant(others[1], tree))
  meaning = _text(others[2] if kind == "enum" else others[1])
  return Flag(_text(name), kind, meaning, values)


def _fields(file: pathlib.Path, dataclass: ast.expr) -> Iterator[Flag]:
  """Yields a flag for each field of a dataclass whose help is in its source."""
  assert isinstance(dataclass, ast.Attribute)
  assert isinstance(dataclass.value, ast.Name)
  tree = _tree(_imported(_tree(file), dataclass.value.id))
  for definition in tree.body:
    match definition:
      case ast.ClassDef(name, body=body) if name == dataclass.attr:
        for field in body:
          match field:
            case ast.AnnAssign(
              ast.Name(name), ast.Name(kind), ast.Call(args=[*_, meaning])
            ):
              yield Flag(name, kind, _text(meaning))


def _imported(tree: ast.Module, name: str) -> pathlib.Path:
  """Returns the file of a module of the project that a file imports."""
  for statement in tree.body:
    match statement:
      case ast.ImportFrom(module=str(package), names=names):
        for alias in names:
          if name == (alias.asname or alias.name):
            folders = package.removeprefix(_PACKAGE).split(".")
            return shipped.ROOT.joinpath(*folders, f"{alias.name}.py")
  raise LookupError(f"Found no import of {name}.")


def _constant(node: ast.expr, tree: ast.Module) -> list[str]:
  """Returns the texts of a literal, or of the constant that it names."""
  match node:
    case ast.Call(ast.Name("list"), [ast.Name(constant)]):
      for statement in tree.body:
        match statement:
          case ast.Assign([ast.Name(name)], value) if name == constant:
            node = value
  return list(ast.literal_eval(node))


def _text(node: ast.expr) -> str:
  """Returns a text; what a program fills in is left out as `...`."""
  match node:
    case ast.Constant(value):
      return str(value)
    case ast.JoinedStr(parts):
      return "".join(map(_text, parts))
  return "..."
