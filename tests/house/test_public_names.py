"""Files of research/ use the public API only."""

from __future__ import annotations

import ast

import pytest
import source_tree

import anysearch_jax as aj

FILES = source_tree.files("research")
# Of a command: its flags, and the command itself.
_COMMAND = {"define_flags", "main"}
# Folders of the top level that are installed inside `anysearch_jax`.
_FOLDERS = ("configs", "launch", "retrieval")


def _private(tree: ast.AST) -> list[str]:
  """Returns the imports and attributes that are not public."""
  commands, wrong = set(), []
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom):
      package, _, inside = (node.module or "").partition(".")
      folder = inside.partition(".")[0]
      room = folder if folder in _FOLDERS else package
      names = {alias.name for alias in node.names}
      bad = {name for name in names if name.startswith("_")}
      if room == "anysearch_jax":
        bad = names - {*aj.__all__} if node.module == room else names
      elif room == "launch":
        bad = names if inside != room else set()
        commands |= {alias.asname or alias.name for alias in node.names}
      elif room in ("bench", "examples"):
        bad = names
      elif room not in ("retrieval", "configs"):
        bad = set()
      wrong += [f"{node.module}.{name}" for name in sorted(bad)]
    elif isinstance(node, ast.Import):
      wrong += [
        alias.name
        for alias in node.names
        if alias.name.startswith(("anysearch_jax.", "bench"))
      ]
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      name, attribute = node.value.id, node.attr
      if name == "aj" and attribute not in aj.__all__:
        wrong.append(f"aj.{attribute}")
      if name in commands and attribute not in _COMMAND:
        wrong.append(f"{name}.{attribute}")
  return wrong


@pytest.mark.parametrize(
  "path", FILES, ids=lambda path: path.relative_to(source_tree.ROOT).as_posix()
)
def test_research_uses_public_names_only(path):
  assert not _private(ast.parse(path.read_text()))


@pytest.mark.parametrize(
  "source",
  [
    "from anysearch_jax.world import world",
    "from anysearch_jax import no_such_name",
    "import anysearch_jax.world.world",
    "import anysearch_jax as aj\naj.no_such_name",
    "from anysearch_jax.launch import train\ntrain.helper()",
    "from anysearch_jax.retrieval import _private",
    "from bench import harness",
  ],
)
def test_private_names_are_found(source):
  assert _private(ast.parse(source))


def test_type_checkers_see_the_names_that_are_imported():
  path = source_tree.ROOT / "anysearch_jax" / "__init__.pyi"
  stub = ast.parse(path.read_text())
  (listed,) = (
    ast.literal_eval(statement.value)
    for statement in stub.body
    if isinstance(statement, ast.Assign)
  )
  assert listed == aj.__all__
  assert all(hasattr(aj, name) for name in listed)
