"""A lock that lets one process at a time write to a folder.

The lock is the kernel's (`flock`), which releases it however the process ends.
A lock file that is left behind therefore locks nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import pathlib
import socket
import time
from collections.abc import Iterator
from typing import TextIO

from absl import logging

NAME = "run.lock"
# Errors of file systems that have no locks.
_UNABLE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_POLL = 0.2  # Seconds between attempts.


class HeldError(ValueError):
  """Another process holds the lock; the message names it."""


@contextlib.contextmanager
def hold(path: str | pathlib.Path, *, patience: float = 0.0) -> Iterator[None]:
  """Holds a lock file, which is removed at the end.

  The file is created, with its folder. If the file system has no locks, this
  warns and continues without a lock. Raises HeldError if another process holds
  the lock for `patience` seconds, ValueError if the file cannot be created.
  """
  path, end = pathlib.Path(path), time.monotonic() + patience
  for attempt in itertools.count():
    try:
      file = _take(path)
      break
    except HeldError as error:
      if time.monotonic() > end:
        raise
      if not attempt:
        logging.warning("Waiting: %s", error)
      time.sleep(_POLL)
  try:
    yield
  finally:
    # Unlink before releasing the lock; afterwards the file may belong to
    # another process.
    with contextlib.suppress(OSError):
      path.unlink()
    file.close()


def beside(folder: str | pathlib.Path) -> pathlib.Path:
  """Returns the lock file of a folder that is written aside and then renamed.

  The lock is beside such a folder, because the folder cannot contain it.
  """
  folder = pathlib.Path(folder).absolute()
  return folder.with_name(f"{folder.name}.lock")


def holder(path: str | pathlib.Path) -> str:
  """Describes the process that holds a lock file; "" if no process does."""
  with contextlib.suppress(OSError), pathlib.Path(path).open() as file:
    try:
      fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
      return file.readline().strip() or "a process that did not say which"
  return ""


def _take(path: pathlib.Path) -> TextIO:
  while True:
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      file = path.open("a+")
    except OSError as error:
      raise ValueError(
        f"{path}: {error.strerror}; expected a folder that this process may "
        "write to. Name another --output, or give it the right to."
      ) from error
    try:
      if _lock(file, path):
        return file
    except BaseException:
      file.close()
      raise
    file.close()


def _lock(file: TextIO, path: pathlib.Path) -> bool:
  """Locks an open file; returns False if it is no longer the one at `path`."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    file.seek(0)
    who = file.readline().strip() or "another process"
    raise HeldError(
      f"{path}: found it held by {who}, expected nobody else to write to this "
      "folder. Wait for that one or stop it, or name another place."
    ) from None
  except OSError as error:
    if error.errno not in _UNABLE:
      raise
    logging.warning(
      "%s: this file system has no locks (%s); see to it that nobody else "
      "writes to the folder.",
      path,
      error.strerror,
    )
  try:
    # The last holder may have removed the file after this process opened it.
    # A lock on a removed file would not stop a process that creates a new one.
    if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
      return False
  except FileNotFoundError:
    return False
  since = time.strftime("%Y-%m-%d %H:%M:%S")
  said = f"process {os.getpid()} on {socket.gethostname()} since {since}"
  # The lock holds even if the disk is full and the holder's name is lost.
  # `os.write` is unbuffered; buffered text would make closing fail as well.
  with contextlib.suppress(OSError):
    os.ftruncate(file.fileno(), 0)
    os.write(file.fileno(), said.encode())
  return True
