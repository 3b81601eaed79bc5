"""Refuses files that git-lfs left as pointers, 130 bytes in place of contents.

A clone without git-lfs has them, and so has a download of a repository as zip.
"""

from __future__ import annotations

import pathlib

START = b"version https://git-lfs.github.com/spec/"
REASON = "is a pointer of git-lfs, not the file; type `git lfs pull` beside it"


def refuse_pointer(
  path: pathlib.Path, error_class: type[ValueError] = ValueError
) -> None:
  """Checks that an existing file has its contents.

  Args:
    path: path of the file.
    error_class: class of the error.

  Raises:
    ValueError: the file is a pointer, of any kind of file.
  """
  with path.open("rb") as file:
    start = file.read(len(START))
  if start == START:
    raise error_class(f"{path}: {REASON}.")
