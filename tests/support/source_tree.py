"""The package's own source as syntax trees, for the tests that read it."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ("anysearch_jax", "retrieval", "launch")


class Place(NamedTuple):
  """A piece of source: its file, the function around it, its text."""

  file: str
  function: str
  text: str

  def __str__(self) -> str:
    return f"{self.file}: {self.function}: {self.text}"


def files(*packages: str) -> list[pathlib.Path]:
  """Returns every module of the packages, by default of all."""
  return [
    path
    for package in packages or PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
  ]


def nodes(
  source: str, file: str = "module.py"
) -> Iterator[tuple[Place, ast.AST, tuple[ast.AST, ...]]]:
  """Yields every node with its place and its ancestors, outermost first."""

  def walk(node, around):
    names = [
      each.name
      for each in around
      if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    if isinstance(node, ast.expr):
      text = ast.unparse(node)
      yield Place(file, ".".join(names) or "<module>", text), node, around
    elif isinstance(node, ast.Import | ast.ImportFrom):
      text = ast.unparse(node)
      yield Place(file, ".".join(names) or "<module>", text), node, around
    for child in ast.iter_child_nodes(node):
      yield from walk(child, (*around, node))

  yield from walk(ast.parse(source), ())


def all_nodes(*packages: str):
  """Yields `nodes` of every module of the packages."""
  for path in files(*packages):
    yield from nodes(path.read_text(), str(path.relative_to(ROOT)))
