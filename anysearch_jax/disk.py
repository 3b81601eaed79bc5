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
    if said := _said(error, pathlib.Path(path)):
      raise DiskError(said) from error
    raise


def write_whole(path: pathlib.Path, text: str) -> None:
  """Writes a file beside `path` and renames it: whole or not at all.

  Raises:
    DiskError: see `writing`; what was there stays.
  """
  beside = path.with_name(path.name + ".writing")
  with writing(path):
    try:
      beside.write_text(text)
      beside.rename(path)
    finally:
      beside.unlink(missing_ok=True)


def _said(error: Exception, path: pathlib.Path) -> str:
  """What an error says that is the disk's, or that one led to; else ""."""
  for each in _all(error):
    if isinstance(each, DiskError):
      return str(each)
    for number, helps in _HELP.items():
      reason = os.strerror(number)
      ours = isinstance(each, OSError) and each.errno == number
      if ours or reason in str(each):
        return (
          f"{path} could not be written: {reason}, {_free(path)} are free "
          f"there. {helps}, and start the same command again."
        )
  return ""


def _all(error: BaseException) -> Iterator[BaseException]:
  """An error, those of its group, and those that led to it."""
  waiting, seen = [error], set()
  while waiting:
    each = waiting.pop(0)
    if each is None or id(each) in seen:
      continue
    seen.add(id(each))
    yield each
    waiting += getattr(each, "exceptions", ())
    waiting += [each.__cause__, each.__context__]


def _free(path: pathlib.Path) -> str:
  """What is free beside a path, in words."""
  there = next(p for p in (path, *path.absolute().parents) if p.exists())
  found = os.statvfs(there)
  return f"{found.f_bavail * found.f_frsize / 1e6:.1f} MB"
