"""A lock that lets one process at a time write to a folder.

The lock is the kernel's (`flock`, by filelock), which releases it however the
process ends. A lock file that is left behind therefore locks nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import socket
import time
from collections.abc import Iterator

import filelock
from absl import logging

NAME = "run.lock"
# Errors of file systems that have no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_POLL_SECONDS = 0.2


class HeldError(ValueError):
  """Another process holds the lock; the message names it."""


@contextlib.contextmanager
def hold(path: str | pathlib.Path, *, patience: float = 0.0) -> Iterator[None]:
  """Holds a lock file, which is removed at the end.

  The file is created, with its folder. If the file system has no locks, this
  warns and continues without a lock.

  Args:
    path: path of the lock file.
    patience: seconds to wait for another process that holds the lock.

  Raises:
    HeldError: another process holds the lock for that long.
    ValueError: the file cannot be created.
  """
  path = pathlib.Path(path)
  lock = _lock_of(path)
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    _acquire(lock, path, patience)
  except OSError as error:
    if error.errno not in _NO_LOCKS:
      raise ValueError(
        f"{path}: {error.strerror}; expected a folder that this process may "
        "write to. Name another --output, or give it the right to."
      ) from error
    logging.warning(
      "%s: this file system has no locks (%s); see to it that nobody else "
      "writes to the folder.",
      path,
      error.strerror,
    )
  since = time.strftime("%Y-%m-%d %H:%M:%S")
  # The lock holds even if the disk is full and the holder's name is lost.
  with contextlib.suppress(OSError):
    path.write_text(
      f"process {os.getpid()} on {socket.gethostname()} since {since}"
    )
  try:
    yield
  finally:
    # Unlink before releasing the lock; afterwards the file may belong to
    # another process.
    with contextlib.suppress(OSError):
      path.unlink()
    lock.release()


def path_beside(folder: str | pathlib.Path) -> pathlib.Path:
  """Returns the lock file of a folder that is written aside and then renamed.

  The lock is beside such a folder, because the folder cannot contain it.
  """
  folder = pathlib.Path(folder).absolute()
  return folder.with_name(f"{folder.name}.lock")


def holder(path: str | pathlib.Path) -> str:
  """Describes the process that holds a lock file; "" if no process does."""
  path = pathlib.Path(path)
  with contextlib.suppress(OSError):
    if path.is_file():
      try:
        with _lock_of(path).acquire(timeout=0):
          return ""
      except filelock.Timeout:
        return _holder_name(path) or "a process that did not say which"
  return ""


def _lock_of(path: pathlib.Path) -> filelock.BaseFileLock:
  return filelock.FileLock(
    path,
    poll_interval=_POLL_SECONDS,
    thread_local=False,
    fallback_to_soft=False,
  )


def _acquire(
  lock: filelock.BaseFileLock, path: pathlib.Path, patience: float
) -> None:
  """Takes the lock; if it has to wait, logs once for whom."""

  def held_error() -> HeldError:
    return HeldError(
      f"{path}: found it held by {_holder_name(path) or 'another process'}, "
      "expected nobody else to write to this folder. Wait for that one or stop "
      "it, or name another place."
    )

  try:
    lock.acquire(timeout=0)
  except filelock.Timeout:
    if not patience:
      raise held_error() from None
    logging.warning("Waiting: %s", held_error())
    try:
      lock.acquire(timeout=patience)
    except filelock.Timeout:
      raise held_error() from None


def _holder_name(path: pathlib.Path) -> str:
  """Returns what the holder of a lock file wrote into it; "" if nothing."""
  with contextlib.suppress(OSError):
    return path.read_text().strip()
  return ""
