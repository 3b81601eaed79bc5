"""Holds the size of the project below its ceilings.

    python tests/house/test_size.py     prints the numbers

Whoever adds something says what goes: a change that makes the project smaller
lowers the ceilings, and none raises them.
"""

from __future__ import annotations

import ast
import io
import pathlib
import tokenize

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = (
  *("anysearch_jax", "retrieval", "launch"),
  *("configs", "bench", "examples"),
)
CEILINGS = {
  "source: lines": 67_887,
  "source: code lines": 41_735,
  "source: modules": 307,
  "source: lines of the longest module": 600,
  "research: lines": 8_000,
  "tests: lines": 54_950,
  "docs and README: words": 22_049,
  "README: words": 700,
  "commands": 16,
}


def modules(*folders: str) -> list[pathlib.Path]:
  return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def lines(path: pathlib.Path) -> int:
  return path.read_text().count("\n")


def code_lines(path: pathlib.Path) -> int:
  """Counts lines with code: no docstring, blank line, comment or import."""
  text = path.read_text()
  skipped = {
    tokenize.NL,
    tokenize.COMMENT,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
  }
  code = {
    line
    for token in tokenize.generate_tokens(io.StringIO(text).readline)
    if token.type not in skipped
    for line in range(token.start[0], token.end[0] + 1)
  }
  for node in ast.walk(ast.parse(text)):
    string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if string or isinstance(node, ast.Import | ast.ImportFrom):
      code -= set(range(node.lineno, node.end_lineno + 1))
  return len(code)


def words(*paths: pathlib.Path) -> int:
  return sum(len(path.read_text().split()) for path in paths)


def commands() -> list[str]:
  """Returns the modules of launch/ that `python -m` runs."""
  return [
    path.stem
    for path in sorted((ROOT / "launch").glob("[!_]*.py"))
    if '__name__ == "__main__"' in path.read_text()
  ]


def sizes() -> dict[str, int]:
  source = modules(*SOURCE)
  readme = ROOT / "README.md"
  return {
    "source: lines": sum(map(lines, source)),
    "source: code lines": sum(map(code_lines, source)),
    "source: modules": len(source),
    "source: lines of the longest module": max(map(lines, source)),
    "research: lines": sum(map(lines, modules("research"))),
    "tests: lines": sum(map(lines, modules("tests"))),
    "docs and README: words": words(readme, *(ROOT / "docs").glob("*.md")),
    "README: words": words(readme),
    "commands": len(commands()),
  }


@pytest.fixture(scope="module")
def found():
  return sizes()


@pytest.mark.parametrize("name", CEILINGS)
def test_size_is_below_its_ceiling(found, name):
  assert found[name] <= CEILINGS[name], f"{name}: whoever adds says what goes"


if __name__ == "__main__":
  for name, number in sizes().items():
    print(f"{name:40}{number:>8,}{CEILINGS[name]:>10,}")
