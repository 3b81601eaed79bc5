"""Decides which files inside a folder nobody wants to read.

These are what `.gitignore` files list, by git's rules: a line of a deeper file
goes before those above it, the last line that matches a path decides, and
nothing inside a listed folder is looked at. pathspec translates the lines. What
package managers and builds write is left out without such a file too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pathspec
import regex

LISTED = "of .gitignore"
LOCK_FILE = "lock file"
# A document that is open in Office has such a file beside it.
_OFFICE_LOCK = "~$"
# Nobody gives these names to a folder of documents.
_PACKAGE_FOLDERS = frozenset(
  ("node_modules", "bower_components", "site-packages", "__pycache__")
)
# A file in a folder that says that a tool can write the folder again: an
# environment of Python, a cache (https://bford.info/cachedir/), as of Cargo.
_TOOL_MARKS = ("pyvenv.cfg", "CACHEDIR.TAG")
# People use these names too, so a file beside the folder must show that a build
# writes it. A `.gitignore` there or above is better evidence, and then decides
# alone: `build` may have scripts.
_BUILDS_BY_FOLDER = {
  "build": (
    "CMakeLists.txt",
    "build.gradle",
    "build.gradle.kts",
    "package.json",
    "pyproject.toml",
    "setup.py",
  ),
  "dist": ("package.json", "pyproject.toml", "setup.py"),
  "target": ("Cargo.toml", "build.sbt", "pom.xml"),
}
_PACKAGE_LOCKS = frozenset(
  (
    "package-lock.json",
    "npm-shrinkwrap.json",
    "packages.lock.json",
    "pnpm-lock.yaml",
    "conda-lock.yml",
  )
)
_IGNORE_FILE = ".gitignore"
_MOST_BYTES = 1 << 18  # Of a .gitignore; the longest known have 30 kB.
# A line with many stars takes hours on a long name: somebody's folder could
# stop a search.
_MATCH_SECONDS = 0.5
# What pathspec writes for the slash after a folder's name, and for lines that
# match everything, everything inside folders, and every folder.
_SLASH = "(?P<ps_d>/)"
_WHOLE = {".": ".+", "/": ".+/.+", _SLASH: ".+/"}

# A folder, and an expression for the lines of its `.gitignore`.
_Lines = tuple[str, Any]


def is_office_lock(name: str) -> bool:
  """Returns whether Office wrote a file of this name beside an open one."""
  return name.startswith(_OFFICE_LOCK)


class Exclusions:
  """Says why files and folders inside a folder are left out.

  Args:
    root: the folder, an absolute path. If it is in a repository, the
      `.gitignore` files above it count too, up to the repository's root.

  Attributes:
    refused: path and reason of `.gitignore` files that exclude nothing.
  """

  def __init__(self, root: str):
    self.refused: list[tuple[str, str]] = []
    self._top = root
    folder = root
    while not os.path.lexists(os.path.join(folder, ".git")):
      if folder == os.path.dirname(folder):
        break
      folder = os.path.dirname(folder)
    else:
      self._top = folder
    self._lines_by_folder: dict[str, list[_Lines]] = {}
    self._slow: set[str] = set()

  def reason(self, folder: str, name: str, *, is_folder: bool) -> str:
    """Returns why a file or folder is left out, "" if it is not.

    Args:
      folder: absolute path of the folder that it is in.
      name: its name.
      is_folder: whether it is a folder.
    """
    if is_folder:
      if self._is_tool_folder(folder, name):
        return f"{name}/"
    elif name in _PACKAGE_LOCKS:
      return LOCK_FILE
    if self._is_listed(os.path.join(folder, name), is_folder=is_folder):
      return LISTED
    return ""

  def _is_tool_folder(self, folder: str, name: str) -> bool:
    if name in _PACKAGE_FOLDERS:
      return True
    inside = os.path.join(folder, name)
    if any(os.path.exists(os.path.join(inside, mark)) for mark in _TOOL_MARKS):
      return True
    builds = _BUILDS_BY_FOLDER.get(name, ())
    return not self._lines(folder) and any(
      os.path.exists(os.path.join(folder, build)) for build in builds
    )

  def _is_listed(self, path: str, *, is_folder: bool) -> bool:
    for folder, lines in self._lines(os.path.dirname(path)):
      below = path.removeprefix(folder).lstrip(os.sep) + "/" * is_folder
      # As git, by bytes: `?` stands for one.
      below = os.fsencode(below).decode("latin-1")
      if folder in self._slow:
        continue
      try:
        match = lines.fullmatch(below, timeout=_MATCH_SECONDS)
      except TimeoutError:
        self._slow.add(folder)
        self._refuse(folder, "takes too long to match")
        continue
      if match:
        return match.lastgroup is None
    return False

  def _lines(self, folder: str) -> list[_Lines]:
    """Returns the lines that may list what is in a folder, the deepest first.

    Their expression matches a path that a line lists; if the line takes the
    path back, by `!`, it has a named group.
    """
    if folder not in self._lines_by_folder:
      own_lines = self._read(folder)
      lines = [(folder, own_lines)] if own_lines else []
      outer = os.path.dirname(folder)
      is_top = folder in (self._top, outer)
      if not is_top and not os.path.lexists(os.path.join(folder, ".git")):
        lines += self._lines(outer)
      self._lines_by_folder[folder] = lines
    return self._lines_by_folder[folder]

  def _read(self, folder: str) -> Any:
    path = os.path.join(folder, _IGNORE_FILE)
    # As git: links are not followed. A pipe would wait for its writer.
    if os.path.islink(path) or not os.path.isfile(path):
      return None
    try:
      with open(path, "rb") as file:
        content = file.read(_MOST_BYTES + 1)
    except OSError as error:
      self._refuse(folder, f"{error.strerror}")
      return None
    if len(content) > _MOST_BYTES:
      self._refuse(folder, f"has more than {_MOST_BYTES >> 10} kB")
      return None
    text = content.removeprefix(b"\xef\xbb\xbf").decode("latin-1")
    expressions: list[str] = []
    for line in text.split("\n"):
      expressions += _expressions(line.removesuffix("\r"))
    if not expressions:
      return None
    # The first alternative that matches decides: the last line.
    return regex.compile("|".join(reversed(expressions)), regex.DOTALL)

  def _refuse(self, folder: str, reason: str) -> None:
    path = os.path.join(folder, _IGNORE_FILE)
    self.refused.append((path, f"{reason}, so it excludes nothing"))


def _expressions(line: str) -> Iterator[str]:
  """Yields the expression of a line, which matches paths themselves only.

  Those of pathspec also match what is inside a folder that a line lists; git
  asks for each folder on the way instead.
  """
  trimmed = line.rstrip()
  if trimmed == "!/":  # It matches nothing, but everything for pathspec.
    return
  if trimmed.endswith("/**/"):  # All folders inside, but not itself.
    line = f"{trimmed}*/"
  try:
    patterns = pathspec.GitIgnoreSpec.from_lines([line]).patterns
  except ValueError:  # Git passes over lines that are wrong.
    return
  for pattern in patterns:
    if pattern.include is None:  # A comment.
      continue
    assert pattern.regex is not None  # It is no comment.
    expression = pattern.regex.pattern
    if expression in _WHOLE:
      expression = _WHOLE[expression]
    elif expression.endswith("/"):
      expression += ".+"
    else:
      expression = expression.replace(_SLASH, "/")
    yield f"(?:{expression})" if pattern.include else f"(?P<kept>{expression})"
