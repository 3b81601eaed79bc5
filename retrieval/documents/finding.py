"""Finds the files that paths, folders and globs name."""

from __future__ import annotations

import collections
import glob
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

HIDDEN, LINK = "hidden", "linked folder"


class File(NamedTuple):
  """A file to read.

  path: as its user named it, or below the folder that they named.
  name: its path from the folder that all paths have in common, with slashes.
  """

  path: str
  name: str


class Found(NamedTuple):
  """What paths name.

  files: in the order of their names, each file once.
  ignored: how many others there are, by their ending, `hidden`, or `linked
    folder` (a link within a folder, which may lead in a circle).
  refused: path and reason of folders that cannot be listed and of files with
    an unknown ending that are named themselves.
  """

  files: tuple[File, ...]
  ignored: Mapping[str, int]
  refused: tuple[tuple[str, str], ...]


def find(
  paths: Sequence[str], endings: Collection[str], *, without: str = ""
) -> Found:
  """Returns the files with one of some endings.

  Args:
    paths: files, folders (with all that is in them) and globs, where `**`
      stands for folders of any depth.
    endings: in lower case, with their dots.
    without: a folder whose files are left out.

  Raises:
    ValueError: a path is missing, or a glob matches nothing.
  """
  ignored: collections.Counter[str] = collections.Counter()
  refused: list[tuple[str, str]] = []
  found: dict[str, str] = {}
  roots: list[str] = []
  without = os.path.realpath(without) if without else ""

  def take(path: str, *, is_named: bool) -> None:
    ending = os.path.splitext(path)[1].lower()
    if ending in endings:
      real = os.path.realpath(path)
      if not without or os.path.commonpath((real, without)) != without:
        found.setdefault(real, path)
    elif is_named:
      known = ", ".join(sorted(endings))
      refused.append((path, f"found a file {ending!r}, expected {known}"))
    else:
      ignored[ending or "no ending"] += 1

  for given in paths:
    path = os.path.expanduser(given)
    is_glob = glob.has_magic(path) and not os.path.lexists(path)
    each = glob.glob(path, recursive=True) if is_glob else [path]
    if not each or not all(map(os.path.lexists, each)):
      raise ValueError(
        f"documents: found nothing at {given}, expected a file, a folder or a "
        "glob such as 'notes/**/*.md'."
      )
    roots.append(_root(path, is_glob=is_glob))
    for one in each:
      # Of `**`, the folders' files match too.
      if os.path.isdir(one) and not (is_glob and "**" in path):
        for inner in _walk(one, ignored, refused):
          take(inner, is_named=False)
      elif not os.path.isdir(one):
        take(one, is_named=not is_glob)
  root = os.path.commonpath(roots) if roots else ""
  files = (
    File(path, os.path.relpath(os.path.abspath(path), root).replace("\\", "/"))
    for path in found.values()
  )
  return Found(
    tuple(sorted(files, key=lambda file: file.name)), +ignored, tuple(refused)
  )


def _root(path: str, *, is_glob: bool) -> str:
  """Returns the absolute folder below which a path's files are."""
  if is_glob:
    parts = path.split(os.sep)
    magic = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    path = os.sep.join(parts[:magic]) or (os.sep if path[0] == os.sep else "")
  elif not os.path.isdir(path):
    path = os.path.dirname(path)
  return os.path.abspath(path or ".")


def _walk(
  folder: str,
  ignored: collections.Counter[str],
  refused: list[tuple[str, str]],
) -> Iterator[str]:
  """Yields the files of a folder and those below it, links to files too."""

  def refuse(error: OSError) -> None:
    refused.append((str(error.filename), f"cannot be listed: {error.strerror}"))

  for place, folders, names in os.walk(folder, onerror=refuse):
    for name in [*folders, *names]:
      ignored[HIDDEN] += name[0] == "."
    linked = [d for d in folders if os.path.islink(os.path.join(place, d))]
    ignored[LINK] += len(linked)
    folders[:] = [d for d in folders if d[0] != "." and d not in linked]
    yield from (os.path.join(place, n) for n in names if n[0] != ".")
