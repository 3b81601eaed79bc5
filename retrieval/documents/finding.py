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

  Attributes:
    path: the path as the user gave it, or below the folder that they gave.
    name: the path relative to the deepest folder that holds all given paths.
  """

  path: str
  name: str


class FoundFiles(NamedTuple):
  """The files that paths name.

  Attributes:
    files: each file once, sorted by name.
    ignored: the number of files that are not read, by their ending, as
      `hidden`, or as `link out of the folder` or `linked folder`.
    refused: path and reason of folders that cannot be listed.
  """

  files: tuple[File, ...]
  ignored: Mapping[str, int]
  refused: tuple[tuple[str, str], ...]


def find_files(
  paths: Sequence[str],
  endings: Collection[str],
  *,
  excluded_folder: str,
  follow_links: bool = False,
) -> FoundFiles:
  """Finds the files whose names have one of the endings.

  Args:
    paths: files, folders (with all that is in them) and globs, where `**`
      stands for folders of any depth.
    endings: in lower case, with their dots.
    excluded_folder: a folder whose files are left out: the index's own.
    follow_links: whether links inside the folders are followed that lead out of
      them, and links to folders. A folder that somebody else filled may link to
      any file of the user's. A path that is itself given is always read.

  Raises:
    ValueError: a path is missing or in `excluded_folder`, or a glob matches
      nothing.
  """
  ignored: collections.Counter[str] = collections.Counter()
  refused: list[tuple[str, str]] = []
  paths_by_file: dict[str, str] = {}
  roots: list[str] = []
  excluded = pathlib.Path(excluded_folder).resolve()

  def add_file(path: str, within: pathlib.Path | None) -> None:
    ending = os.path.splitext(path)[1].lower()
    if ending not in endings:
      ignored[ending or "without ending"] += 1
    elif not os.path.isfile(path):  # Opening a pipe waits for its writer.
      ignored["no regular file"] += 1
    else:
      real = pathlib.Path(path).resolve()
      if within is not None and within not in real.parents:
        ignored["link out of the folder"] += 1
      elif excluded not in real.parents:
        paths_by_file.setdefault(str(real), path)

  for given_path in paths:
    path = os.path.expanduser(given_path)
    matches = [path]
    if not os.path.lexists(path):
      matches = sorted(glob.glob(path, recursive=True))
    if not matches:
      raise ValueError(
        f"documents: found nothing at {given_path}, expected a file, a folder "
        "or a glob such as 'notes/**/*.md'."
      )
    root = os.path.abspath(path)
    while not os.path.isdir(root):
      root = os.path.dirname(root)
    real = pathlib.Path(root).resolve()
    if excluded in (real, *real.parents):
      raise ValueError(
        f"documents: {given_path} is in {excluded_folder}, the folder of the "
        "index; expected an index elsewhere."
      )
    roots.append(root)
    is_given = matches == [path]
    for match in matches:
      if not os.path.isdir(match):
        add_file(match, None if is_given or follow_links else real)
      elif "**" not in path:  # A glob with ** matches files in folders too.
        visited: set[pathlib.Path] = set()  # Links may lead in a circle.
        for folder, folders, names in os.walk(
          match,
          onerror=lambda e: refused.append((e.filename, f"{e.strerror}")),
          followlinks=follow_links,
        ):
          if follow_links:
            real_folder = pathlib.Path(folder).resolve()
            if real_folder in visited:
              folders.clear()
              continue
            visited.add(real_folder)
          links = set()
          if not follow_links:
            links = {d for d in folders if os.path.islink(f"{folder}/{d}")}
          ignored["hidden"] += sum(n[0] == "." for n in (*folders, *names))
          ignored["linked folder"] += len(links)
          folders[:] = sorted({d for d in folders if d[0] != "."} - links)
          within = None if follow_links else pathlib.Path(match).resolve()
          for name in sorted(names):
            if name[0] != ".":
              add_file(os.path.join(folder, name), within)
  root = os.path.commonpath(roots) if roots else ""
  files = [File(p, os.path.relpath(p, root)) for p in paths_by_file.values()]
  files.sort(key=lambda file: file.name)
  return FoundFiles(tuple(files), +ignored, tuple(refused))
