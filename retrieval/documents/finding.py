"""Finds the files that paths, folders and globs name."""

from __future__ import annotations

import collections
import glob
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from anysearch_jax.retrieval.documents import exclusions as exclusions_lib


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
    ignored: the number of files and folders that are not read, by the ending
      of a file or by another reason, such as `hidden`.
    refused: path and reason of folders that cannot be listed,
      and of `.gitignore` files that are not followed.
  """

  files: tuple[File, ...]
  ignored: Mapping[str, int]
  refused: tuple[tuple[str, str], ...]


def matching_paths(given_path: str) -> list[str]:
  """Returns the paths that a path or a glob names.

  Raises:
    ValueError: there is none.
  """
  path = os.path.expanduser(given_path)
  if os.path.lexists(path):
    return [path]
  matches = sorted(glob.glob(path, recursive=True))
  if not matches:
    raise ValueError(
      f"documents: found nothing at {given_path}, expected a file, a folder "
      "or a glob such as 'notes/**/*.md'."
    )
  return matches


def find_files(
  paths: Sequence[str],
  endings: Collection[str],
  *,
  excluded_folder: str,
  follow_links: bool = False,
  ignored_files: bool = False,
) -> FoundFiles:
  """Finds the files whose names have one of the endings.

  Args:
    paths: files, folders (with all that is in them) and globs, where `**`
      stands for folders of any depth. A path that is itself given is always
      read.
    endings: in lower case, with their dots.
    excluded_folder: a folder whose files are left out: the index's own.
    follow_links: whether links inside the folders are followed that lead out of
      them, and links to folders. A folder that somebody else filled may link to
      any file of the user's.
    ignored_files: whether to read what `exclusions` leaves out.

  Raises:
    ValueError: a path is missing or in `excluded_folder`, or a glob matches
      nothing.
  """
  finder = _Finder(
    endings,
    pathlib.Path(excluded_folder).resolve(),
    follow_links=follow_links,
    ignored_files=ignored_files,
  )
  roots = [finder.add(path) for path in paths]
  root = os.path.commonpath(roots) if roots else ""
  files = [
    File(path, os.path.relpath(path, root))
    for path in finder.paths_by_file.values()
  ]
  files.sort(key=lambda file: file.name)
  return FoundFiles(tuple(files), +finder.ignored, tuple(finder.refused))


class _Finder:
  """Collects the files of paths; see `find_files` for the arguments."""

  def __init__(
    self,
    endings: Collection[str],
    excluded: pathlib.Path,
    *,
    follow_links: bool,
    ignored_files: bool,
  ):
    self.paths_by_file: dict[str, str] = {}
    self.ignored: collections.Counter[str] = collections.Counter()
    self.refused: list[tuple[str, str]] = []
    self._endings = endings
    self._excluded = excluded
    self._follow_links = follow_links
    self._ignored_files = ignored_files

  def add(self, given_path: str) -> str:
    """Adds the files of a path, and returns the folder that it is in."""
    path = os.path.expanduser(given_path)
    matches = matching_paths(given_path)
    root = os.path.abspath(path)
    while not os.path.isdir(root):
      root = os.path.dirname(root)
    real_root = pathlib.Path(root).resolve()
    if self._excluded in (real_root, *real_root.parents):
      raise ValueError(
        f"documents: {given_path} is in {self._excluded}, the folder of the "
        "index; expected an index elsewhere."
      )
    exclusions = exclusions_lib.Exclusions(root)
    if matches == [path]:
      if os.path.isdir(path):
        self._add_folder(path, exclusions)
      else:
        self._add_file(path, None)
    else:
      # With ** a glob matches the files in folders too.
      self._add_matches(matches, root, exclusions, descend="**" not in path)
    self.refused += exclusions.refused
    return root

  def _add_matches(
    self,
    matches: Sequence[str],
    root: str,
    exclusions: exclusions_lib.Exclusions,
    *,
    descend: bool,
  ) -> None:
    """Adds what a glob matches, but for what is left out below its root."""
    left_out = {root: False, os.sep: False}

    def is_left_out(path: str) -> bool:
      if path not in left_out:
        folder, name = os.path.split(path)
        left_out[path] = is_left_out(folder) or self._is_left_out(
          folder, name, exclusions, is_folder=os.path.isdir(path)
        )
      return left_out[path]

    within = None if self._follow_links else pathlib.Path(root).resolve()
    for match in matches:
      if is_left_out(os.path.abspath(match)):
        continue
      if not os.path.isdir(match):
        self._add_file(match, within)
      elif descend:
        self._add_folder(match, exclusions)

  def _add_folder(
    self, match: str, exclusions: exclusions_lib.Exclusions
  ) -> None:
    """Adds the files in a folder and in those inside it."""
    within = None if self._follow_links else pathlib.Path(match).resolve()
    visited: set[pathlib.Path] = set()  # Links may lead in a circle.
    for folder, folders, names in os.walk(
      match,
      onerror=lambda e: self.refused.append((e.filename, f"{e.strerror}")),
      followlinks=self._follow_links,
    ):
      if self._follow_links:
        real_folder = pathlib.Path(folder).resolve()
        if real_folder in visited:
          folders.clear()
          continue
        visited.add(real_folder)
      links = set()
      if not self._follow_links:
        links = {d for d in folders if os.path.islink(f"{folder}/{d}")}
      self.ignored["hidden"] += sum(n[0] == "." for n in (*folders, *names))
      self.ignored["linked folder"] += len(links)
      absolute = os.path.abspath(folder)
      folders[:] = [
        name
        for name in sorted({d for d in folders if d[0] != "."} - links)
        if not self._is_left_out(absolute, name, exclusions, is_folder=True)
      ]
      for name in sorted(n for n in names if n[0] != "."):
        if not self._is_left_out(absolute, name, exclusions, is_folder=False):
          self._add_file(os.path.join(folder, name), within)

  def _is_left_out(
    self,
    folder: str,
    name: str,
    exclusions: exclusions_lib.Exclusions,
    *,
    is_folder: bool,
  ) -> bool:
    """Returns whether nobody wants a file or folder, and counts it if so."""
    reason = ""
    if not is_folder and exclusions_lib.is_office_lock(name):
      reason = exclusions_lib.LOCK_FILE
    elif not self._ignored_files:
      reason = exclusions.reason(folder, name, is_folder=is_folder)
    self.ignored[reason] += bool(reason)
    return bool(reason)

  def _add_file(self, path: str, within: pathlib.Path | None) -> None:
    """Adds a file if its kind is read and it is in a folder."""
    ending = os.path.splitext(path)[1].lower()
    if ending not in self._endings:
      self.ignored[ending or "without ending"] += 1
    elif not os.path.isfile(path):  # Opening a pipe waits for its writer.
      self.ignored["no regular file"] += 1
    else:
      real = pathlib.Path(path).resolve()
      if within is not None and within not in real.parents:
        self.ignored["link out of the folder"] += 1
      elif self._excluded not in real.parents:
        self.paths_by_file.setdefault(str(real), path)
