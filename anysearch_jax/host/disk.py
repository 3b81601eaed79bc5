"""Turns errors of the disk into a sentence: what was not written, and why."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from absl import logging as absl_logging

# Ends the name of a file while it is being written.
SUFFIX = ".writing"
# What to do about an error, by its number.
_ADVICE = {
  errno.ENOSPC: "Free some space",
  errno.EDQUOT: "Free some space, or have the quota raised",
  errno.EFBIG: "Have larger files allowed (ulimit -f)",
  errno.EROFS: "Have it mounted to be written to",
  errno.EIO: "See to the disk",
}


class DiskError(OSError):
  """Writing failed because of the disk; the message says what to do."""


@contextlib.contextmanager
def translate_errors(path: str | pathlib.Path) -> Iterator[None]:
  """Raises a `DiskError` in place of any disk error of the `with` block.

  The message names `path`, the file or folder that the block writes to.
  Libraries wrap such errors in classes of their own, so causes, contexts and
  messages are searched.
  """
  try:
    yield
  except DiskError:
    raise
  except Exception as error:
    if sentence := _sentence(error, pathlib.Path(path)):
      raise DiskError(sentence) from error
    raise


def hide_tracebacks() -> None:
  """Hides tracebacks of disk errors, whose sentences remain.

  Orbax's threads log every disk error with its traceback, some of them after
  the command has ended. Threads of tensorstore print one more for every write
  that finishes after its event loop was closed.
  """
  handler = absl_logging.get_absl_handler()
  print_unraisable = sys.unraisablehook

  def is_other(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not any(map(_disk_error_number, _related_errors(error)))

  def show(raised: Any) -> None:
    # Unraisable errors from C++ have no `object`, those from Python have one.
    if raised.object or not isinstance(raised.exc_value, RuntimeError):
      print_unraisable(raised)

  handler.addFilter(is_other)
  sys.unraisablehook = show


def create_private(path: pathlib.Path) -> None:
  """Creates a file that only this user can read, if it is missing.

  Whoever opens the file next reports why it cannot be created.

  Args:
    path: the file, such as one with the questions of a user.
  """
  with contextlib.suppress(OSError):
    os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Replaces a file atomically by the one that the `with` block writes.

  Yields:
    The path to write to. It is renamed to `path` when the block has ended, and
    removed if the block fails; an existing file at `path` is then unchanged.

  Raises:
    DiskError: see `translate_errors`.
  """
  draft = path.with_name(path.name + SUFFIX)
  with translate_errors(path):
    try:
      yield draft
      draft.rename(path)
    finally:
      draft.unlink(missing_ok=True)


def write_whole(path: pathlib.Path, text: str) -> None:
  """Writes a file atomically, see `replacing`."""
  with replacing(path) as draft:
    draft.write_text(text)


def user_cache() -> pathlib.Path:
  """Returns the project's folder in the user's cache."""
  cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
  return cache.expanduser() / "anysearch"


def fingerprint(path: pathlib.Path) -> dict[str, Any]:
  """Returns the size (`bytes`) and the `sha256` of a file."""
  with path.open("rb") as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": file.tell(), "sha256": digest}


def _sentence(error: Exception, path: pathlib.Path) -> str:
  """Returns the sentence for a disk error; "" for any other error."""
  for cause in _related_errors(error):
    if isinstance(cause, DiskError):
      return str(cause)
    if number := _disk_error_number(cause):
      folder = next(p for p in (path, *path.absolute().parents) if p.exists())
      free = shutil.disk_usage(folder).free / 1e6
      return (
        f"{path} could not be written: {os.strerror(number)}, {free:.1f} MB "
        f"are free there. {_ADVICE[number]}, and start the same command again."
      )
  return ""


def _disk_error_number(error: BaseException) -> int | None:
  """Returns the number of a disk error; None for any other error.

  Libraries often keep only the message, so that is searched too.
  """
  for number in _ADVICE:
    has_number = isinstance(error, OSError) and error.errno == number
    if has_number or os.strerror(number) in str(error):
      return number
  return None


def _related_errors(error: BaseException | None) -> Iterator[BaseException]:
  """Yields an error, the errors of its group, its causes and its contexts."""
  pending = [error]
  visited: set[int] = set()
  while pending:
    current = pending.pop(0)
    if current is None or id(current) in visited:
      continue
    visited.add(id(current))
    yield current
    if isinstance(current, BaseExceptionGroup):
      pending += current.exceptions
    pending += [current.__cause__, current.__context__]
