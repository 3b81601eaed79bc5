"""Disks that take no more: what could not be written, and why."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from absl import logging as absl_logging

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


def hide_tracebacks() -> None:
  """Leaves errors of the disk to the sentence of `writing`, in this process.

  Threads of Orbax log each of them with its traceback, some when the command
  has ended; those of tensorstore print one for every write whose event loop,
  which waits for it, has been closed.
  """
  handler, printed = absl_logging.get_absl_handler(), sys.unraisablehook

  def is_other(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not any(map(_number, _all(error)))

  def show(raised: Any) -> None:
    # C++ names no object that it is raised in, Python does.
    if raised.object or not isinstance(raised.exc_value, RuntimeError):
      printed(raised)

  handler.addFilter(is_other)
  sys.unraisablehook = show


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
  """The sentence for an error of the disk; "" for another error."""
  for each in _all(error):
    if isinstance(each, DiskError):
      return str(each)
    if number := _number(each):
      return (
        f"{path} could not be written: {os.strerror(number)}, {_free(path)} "
        f"are free there. {_HELP[number]}, and start the same command again."
      )
  return ""


def _number(error: BaseException) -> int | None:
  """The number of an error of the disk; libraries have it in words only."""
  for number in _HELP:
    ours = isinstance(error, OSError) and error.errno == number
    if ours or os.strerror(number) in str(error):
      return number
  return None


def _all(error: BaseException | None) -> Iterator[BaseException]:
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
