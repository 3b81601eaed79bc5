"""Disks that take no more: what could not be written, and why."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator

# By the error's number: what helps.
_HELP = {
  errno.ENOSPC: "Free some space",
  errno.EDQUOT: "Free some space, or have the quota raised",
  errno.EFBIG: "Have larger files allowed (ulimit -f)",
  errno.EROFS: "Have it mounted to be written to",
  errno.EIO: "See to the disk",
}


class DiskError(OSError):
  """The disk did not take what was written; a sentence says what helps."""


@contextlib.contextmanager
def writing(path: str | pathlib.Path) -> Iterator[None]:
  """Makes a `DiskError` that names the path of any error of the disk.

  Libraries raise such errors as others of their own, which say it in words.

  Args:
    path: what is written inside.

  Raises:
    DiskError: the disk did not take it.
  """
  try:
    yield
  except DiskError:
    raise
  except Exception as error:
    number = _number(error)
    if number is None:
      raise
    free = _free(pathlib.Path(path))
    raise DiskError(
      f"{path} could not be written: {os.strerror(number)}, {free} are free "
      f"there. {_HELP[number]}, and start the same command again."
    ) from error


def write_whole(path: pathlib.Path, text: str) -> None:
  """Writes a file beside `path` and renames it: whole or not at all.

  Raises:
    DiskError: see `writing`; what was there stays.
  """
  beside = path.with_name(path.name + ".writing")
  with writing(path):
    beside.write_text(text)
    beside.rename(path)


def _number(error: BaseException | None) -> int | None:
  """Of the disk's error that it is or that led to it, if one did."""
  seen = set()
  while error is not None and id(error) not in seen:
    seen.add(id(error))
    if isinstance(error, OSError) and error.errno in _HELP:
      return error.errno
    for number in _HELP:
      if os.strerror(number) in str(error):
        return number
    error = error.__cause__ or error.__context__
  return None


def _free(path: pathlib.Path) -> str:
  """What is free beside a path, in words."""
  there = next(p for p in (path, *path.absolute().parents) if p.exists())
  found = os.statvfs(there)
  return f"{found.f_bavail * found.f_frsize / 1e6:.1f} MB"
