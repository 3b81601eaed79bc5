"""Finds the files that paths, folders and globs name."""

from __future__ import annotations

import collections
import glob
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


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
  ignored: how many others there are: by their ending, `hidden`, or `linked
    folder` (in a folder; it may lead in a circle).
  refused: path and reason of folders that cannot be listed.
  """

  files: tuple[File, ...]
  ignored: Mapping[str, int]
  refused: tuple[tuple[str, str], ...]


def find(
  paths: Sequence[str], endings: Collection[str], *, without: str
) -> Found:
  """Returns the files with one of some endings.

  Args:
    paths: files, folders (with all that is in them) and globs, where `**`
      stands for folders of any depth.
    endings: in lower case, with their dots.
    without: a folder whose files are left out.

  Raises:
    ValueError: a path is missing or below `without`, or a glob matches nothing.
  """
  ignored: collections.Counter[str] = collections.Counter()
  refused: list[tuple[str, str]] = []
  found: dict[str, str] = {}
  roots: list[str] = []
  out = pathlib.Path(without).resolve()

  def take(path: str) -> None:
    ending = os.path.splitext(path)[1].lower()
    if ending not in endings:
      ignored[ending or "without ending"] += 1
    elif not os.path.isfile(path):  # Opening a pipe would wait for its writer.
      ignored["no regular file"] += 1
    elif out not in (real := pathlib.Path(path).resolve()).parents:
      found.setdefault(str(real), path)

  for given in paths:
    path = os.path.expanduser(given)
    matches = [path]
    if not os.path.lexists(path):
      matches = sorted(glob.glob(path, recursive=True))
    if not matches:
      raise ValueError(
        f"documents: found nothing at {given}, expected a file, a folder or a "
        "glob such as 'notes/**/*.md'."
      )
    root = os.path.abspath(path)
    while not os.path.isdir(root):
      root = os.path.dirname(root)
    real = pathlib.Path(root).resolve()
    if out in (real, *real.parents):
      raise ValueError(
        f"documents: {given} is in {without}, the folder of the index; "
        "expected an index elsewhere."
      )
    roots.append(root)
    for match in matches:
      if not os.path.isdir(match):
        take(match)
      elif "**" not in path:  # Which names the files of its folders too.
        for folder, folders, names in os.walk(
          match, onerror=lambda e: refused.append((e.filename, f"{e.strerror}"))
        ):
          links = {d for d in folders if os.path.islink(f"{folder}/{d}")}
          ignored["hidden"] += sum(n[0] == "." for n in (*folders, *names))
          ignored["linked folder"] += len(links)
          folders[:] = sorted({d for d in folders if d[0] != "."} - links)
          for name in sorted(names):
            if name[0] != ".":
              take(os.path.join(folder, name))
  root = os.path.commonpath(roots) if roots else ""
  files = [File(p, os.path.relpath(p, root)) for p in found.values()]
  files.sort(key=lambda file: file.name)
  return Found(tuple(files), +ignored, tuple(refused))
