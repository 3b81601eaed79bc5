"""One process at a time that writes to a folder.

The kernel holds the lock (`flock`) and frees it however its holder ends, so no
lock is ever left over; a file that is left over locks nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import socket
import time
from collections.abc import Iterator
from typing import TextIO

from absl import logging

NAME = "run.lock"
# A file system without locks says one of these.
_UNABLE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def hold(path: str | pathlib.Path) -> Iterator[None]:
  """Holds a lock file, which is removed at the end.

  Where the file system has no locks a warning says so, and nothing is held.

  Args:
    path: of the file, made with its folder.

  Raises:
    ValueError: another process holds it, or no file can be made there.
  """
  path = pathlib.Path(path)
  file = _take(path)
  try:
    yield
  finally:
    # Before it is free: after that it may be another's.
    with contextlib.suppress(OSError):
      path.unlink()
    file.close()


def beside(folder: str | pathlib.Path) -> pathlib.Path:
  """The lock file of a folder that appears whole, and so holds none."""
  folder = pathlib.Path(folder).absolute()
  return folder.with_name(f"{folder.name}.lock")


def holder(path: str | pathlib.Path) -> str:
  """Who holds a lock file; "" where nobody does."""
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
  """False where the file is no longer the one at `path`."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    file.seek(0)
    who = file.readline().strip() or "another process"
    raise ValueError(
      f"{path}: found it held by {who}, expected nobody else to write to this "
      "folder. Wait for that one or stop it, or name another --output."
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
    # Its last holder may have removed it in between.
    if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
      return False
  except FileNotFoundError:
    return False
  since = time.strftime("%Y-%m-%d %H:%M:%S")
  said = f"process {os.getpid()} on {socket.gethostname()} since {since}"
  # A full disk takes the name only. Nothing stays in a buffer, else closing
  # would fail too.
  with contextlib.suppress(OSError):
    os.ftruncate(file.fileno(), 0)
    os.write(file.fileno(), said.encode())
  return True
