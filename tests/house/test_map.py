"""WORKSPACE.md tells the truth: its rooms exist, and imports go up its table.

A room is a row. Modules that a row names in backticks exist in that room.
"""

from __future__ import annotations

import ast
import collections
import re

import source_tree

ROOT = source_tree.ROOT
TREES = (
  *("anysearch_jax", "retrieval", "configs"),
  *("launch", "bench", "examples", "research"),
)
# What every system shares. Whoever removes a system edits none of it.
TRUNK = tuple(
  f"anysearch_jax/{room}"
  for room in (
    "types.py",
    "budgets.py",
    "config/",
    "host/",
    "environment/",
    "algorithms/",
    "data/",
    "policy/",
    "rollout/",
    "training/",
    "evaluation/",
  )
)
# What can be removed without an edit of the trunk.
BRANCHES = (
  "anysearch_jax/demonstrations/",
  "anysearch_jax/methods/",
  "anysearch_jax/generative_retrieval/",
  "anysearch_jax/report/",
  "anysearch_jax/export/",
  "anysearch_jax/world/",
  "anysearch_jax/planning/",
  "anysearch_jax/agent/",
  "anysearch_jax/serving/",
  "retrieval/",
  "configs/",
  "launch/",
  "bench/",
  "research/",
)
# Words in backticks that are not modules.
_OTHER = re.compile(r"[^a-z0-9_/*]|X$")


def rooms() -> dict[str, str]:
  """Returns the rooms of the table in order, with their contents."""
  text = (ROOT / "WORKSPACE.md").read_text()
  rows = re.findall(r"^\| `([\w/.]+?)/?` \| (.*) \|$", text, re.M)
  return dict(rows)


def room_of(path: str, known: list[str]) -> str | None:
  """Returns the room of a file: the longest matching row of the table."""
  found = [r for r in known if path == r or path.startswith(f"{r}/")]
  return max(found, key=len, default=None)


def modules() -> dict[str, str]:
  """Returns every module's path by its dotted name."""
  found = {}
  for path in source_tree.files(*TREES):
    name = path.relative_to(ROOT).as_posix()
    dotted = name.removesuffix(".py").removesuffix("/__init__")
    dotted = dotted.replace("/", ".")
    if dotted.partition(".")[0] in ("configs", "launch", "retrieval"):
      dotted = f"anysearch_jax.{dotted}"
    found[dotted] = name
  return found


def imports(path: str, known: dict[str, str]) -> set[str]:
  """Returns the paths of the project's modules that a file imports."""
  out = set()
  for node in ast.walk(ast.parse((ROOT / path).read_text())):
    names = []
    if isinstance(node, ast.ImportFrom) and node.module:
      for alias in node.names:
        names.append(f"{node.module}.{alias.name}")
      if names[0] not in known:
        names = [node.module]
    elif isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    out |= {known[name] for name in names if name in known}
  return out


def test_every_module_is_in_a_room():
  known = list(rooms())
  lost = [
    path
    for path in modules().values()
    if room_of(path, known) is None and path != "anysearch_jax/__init__.py"
  ]
  assert not lost


def test_every_room_exists():
  missing = [room for room in rooms() if not (ROOT / room).exists()]
  assert len(rooms()) > 15 and not missing


def test_rooms_import_only_rooms_above_them():
  known = list(rooms())
  files = modules()
  wrong = []
  for path in files.values():
    here = room_of(path, known)
    for imported in imports(path, files) if here else ():
      there = room_of(imported, known)
      if there and known.index(there) > known.index(here):
        wrong.append(f"{path} imports {imported}")
  assert not wrong


def test_the_trunk_imports_no_branch():
  files = modules()
  wrong = [
    f"{path} imports {imported}"
    for path in files.values()
    if path.startswith(TRUNK)
    for imported in imports(path, files)
    if imported.startswith(BRANCHES)
  ]
  assert not wrong


def test_modules_that_a_row_names_are_in_its_room():
  missing = []
  for room, said in rooms().items():
    if room == "anysearch_jax/types.py":
      continue
    names = {p.name for p in (ROOT / room).rglob("*")}
    for word in re.findall(r"`([^`]+)`", said):
      word = word.removesuffix("/").rpartition("/")[2]
      if _OTHER.search(word) or "*" in word:
        continue
      if not {word, f"{word}.py"} & names:
        missing.append(f"{room}: {word}")
  assert not missing


def test_files_of_tests_have_names_of_their_own():
  """Folders of tests are no packages: pytest refuses two files of one name."""
  names = collections.Counter(
    path.name for path in (ROOT / "tests").rglob("test_*.py")
  )
  assert [name for name, count in names.items() if count > 1] == []
