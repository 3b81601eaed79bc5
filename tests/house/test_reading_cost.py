"""Holds what a reader pays for at what was reached, and lets none of it grow.

    PYTHONPATH=.:tests/support python tests/house/test_reading_cost.py

prints the numbers.

Nodes have 2 % of room. Dense forms, empty names and missing arguments may fall,
never rise; whoever lowers one lowers its limit. No rule counts lines or words,
but for README.md, which stays a page.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import sys
from collections.abc import Callable

import httpx2
import pytest
import reading_cost
import scripted
import served_agent
import source_tree
from scripted import answer, search

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.config import settings
from anysearch_jax.methods import systems

LIMITS = {
  "nodes": 281_500,
  "dense forms": 0,
  "functions that bind an empty name": 35,
  "public functions without Args": 0,
  "circles of files": 0,
  "files that take the whole configuration": 47,
  "settings": 231,
  "flags": 157,
  "commands": 19,
  "words in README.md": 700,
}
# Files that a question enters, in a run and in a service.
PLAYED_FILES = 8
SERVED_FILES = 17
_WALKS = {"play_question": PLAYED_FILES, "serve_question": SERVED_FILES}
_ENVIRONMENT = os.environ | {
  "PYTHONPATH": f"{source_tree.ROOT}:{source_tree.ROOT / 'tests/support'}",
  "JAX_PLATFORMS": "cpu",
}


def commands() -> list[str]:
  """Returns the modules of launch/ that `python -m` runs."""
  return [
    path.stem
    for path in sorted((source_tree.ROOT / "launch").glob("[!_]*.py"))
    if '__name__ == "__main__"' in path.read_text()
  ]


def flags() -> int:
  """Counts the flags that launch/ defines."""
  return sum(
    isinstance(node, ast.Call)
    and isinstance(node.func, ast.Attribute)
    and node.func.attr.startswith("DEFINE_")
    for _, tree in reading_cost.trees("launch")
    for node in ast.walk(tree)
  )


def leaves() -> int:
  """Counts the settings of the configuration."""
  listed = settings.listed(config_lib.ExperimentConfig())
  return sum(meta is not None for _, _, meta, _ in listed)


def numbers() -> dict[str, int]:
  trees = [tree for _, tree in reading_cost.trees(*reading_cost.SOURCE)]
  functions = [f for tree in trees for f in reading_cost.functions(tree)]
  readme = (source_tree.ROOT / "README.md").read_text()
  return {
    "nodes": sum(map(reading_cost.nodes, trees)),
    "dense forms": sum(map(reading_cost.golf, trees)),
    "functions that bind an empty name": sum(
      map(reading_cost.binds_an_empty_name, functions)
    ),
    "public functions without Args": sum(
      len(reading_cost.lacks_args(tree)) for tree in trees
    ),
    "circles of files": len(reading_cost.circles()),
    "files that take the whole configuration": len(
      reading_cost.takes_whole_config()
    ),
    "settings": leaves(),
    "flags": flags(),
    "commands": len(commands()),
    "words in README.md": len(readme.split()),
  }


@pytest.fixture(scope="module")
def counted():
  return numbers()


@pytest.mark.parametrize("name", LIMITS)
def test_number_is_below_its_limit(counted, name):
  assert counted[name] <= LIMITS[name]


def play_question(begin: Callable[[], None]) -> None:
  config = config_lib.EpisodeConfig(prompts="world", max_generated=500)
  engine = scripted.Engine([search("q"), answer("yes")])
  retriever = scripted.Retriever({"q": [types.Passage("1", "T", "text")]})
  environment = systems.of_episode(config)
  begin()
  trajectory = scripted.play(
    engine, retriever, config, budget=1, environment=environment
  )
  assert trajectory.outcome is types.Outcome.ANSWERED


def entered(walk: str) -> list[str]:
  """Returns the files of a walk in a process whose threads it all starts."""
  done = source_tree.python(__file__, walk, env=_ENVIRONMENT, check=True)
  return done.stdout.split()


def test_a_question_enters_few_files():
  files = entered("play_question")
  assert len(files) <= PLAYED_FILES, files
  assert "anysearch_jax/rollout/driver.py" in files


def serve_question(begin: Callable[[], None]) -> None:
  body = {"messages": [{"role": "user", "content": "Who wrote Emma?"}]}
  with served_agent.served() as (url, _):
    for _ in range(2):  # The first one finishes what a service starts with.
      begin()
      reply = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
      assert reply.status_code == 200, reply.text


def test_a_served_question_enters_few_files():
  files = entered("serve_question")
  assert len(files) <= SERVED_FILES, files
  assert "anysearch_jax/serving/service.py" in files


@pytest.mark.parametrize(
  ("text", "count"),
  [
    # By hand: the form that is named, and no other.
    ("f(*(1, 2))", 1),
    ("def g():\n  x = (1, 2)\n  return f(*x)", 1),
    ("{**{'a': 1}, 'b': 2}", 1),
    ("f(**{'a': 1})", 1),
    ("def g():\n  a, b = 1, 2", 1),
    ("def g(a, b):\n  a, b = b, a", 0),
    ("A, B = 1, 2", 1),
    ("x = 1 if a else 2 if b else 3", 1),
    ("x = a and b or 'c'", 1),
    ("x = a or b", 0),
    ("f((y := 1))", 1),
    ("if (y := 1):\n  pass", 0),
    ("x = 1 + (a > b)", 1),
    ("for x in [y]:\n  pass", 1),
    ("x = 'a b c'.split()", 1),
    ("x = text.split()", 0),
  ],
)
def test_dense_forms_are_counted(text, count):
  assert reading_cost.golf(ast.parse(text)) == count


@dataclasses.dataclass
class _Case:
  text: str
  empty: bool
  lacks: list[str]


@pytest.mark.parametrize(
  "case",
  [
    _Case("def f(a, b, c):\n  found = a", True, ["f"]),
    _Case("def f(a, each):\n  x = a", True, []),
    _Case(
      'def f(a, b, c):\n  """Does.\n\n  Args:\n    a: x.\n  """', False, []
    ),
    _Case("def _f(a, b, c):\n  pages = a", False, []),
  ],
)
def test_empty_names_and_missing_arguments_are_counted(case):
  tree = ast.parse(case.text)
  (function,) = reading_cost.functions(tree)
  assert reading_cost.binds_an_empty_name(function) == case.empty
  assert reading_cost.lacks_args(tree) == case.lacks


def main(walk: str = "") -> None:
  """Prints the files of a walk, or all numbers."""
  if walk:
    play = {"play_question": play_question, "serve_question": serve_question}
    print(*sorted(reading_cost.files_entered(play[walk])), sep="\n")
    return
  for name, number in numbers().items():
    print(f"{name:42}{number:>9,}{LIMITS[name]:>9,}")
  for name, limit in _WALKS.items():
    print(f"files of {name:33}{len(entered(name)):>9,}{limit:>9,}")


if __name__ == "__main__":
  main(*sys.argv[1:])
