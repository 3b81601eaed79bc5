"""Small disks: a mounted one, if permitted, and file-size limits."""

from __future__ import annotations

import contextlib
import resource
import shutil
import signal
import subprocess

import pytest

_SIZE = 64 << 20


@contextlib.contextmanager
def mounted(folder):
  """Mounts a small disk in a new folder; skips if mounting is not permitted."""
  folder.mkdir()
  options = ("-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(folder))
  done = (
    shutil.which("mount")
    and not subprocess.run(
      ["mount", *options], capture_output=True, check=False, timeout=120
    ).returncode
  )
  if not done:
    pytest.skip("a full disk needs the right to mount one (root)")
  yield folder
  subprocess.run(["umount", "-l", folder], check=True, timeout=120)


@contextlib.contextmanager
def room(disk, size):
  """Fills the disk until only `size` bytes are free."""
  ballast = disk / "ballast"
  ballast.write_bytes(bytes(shutil.disk_usage(disk).free - size))
  try:
    yield
  finally:
    ballast.unlink()


def needs(folder, disk):
  """Returns the bytes that a copy of a folder takes on the disk."""
  before = shutil.disk_usage(disk).free
  shutil.copytree(folder, disk / "copy")
  after = shutil.disk_usage(disk).free
  shutil.rmtree(disk / "copy")
  return before - after


@contextlib.contextmanager
def files_of_at_most(size):
  """Limits the size of files: acts like a full disk but needs no mount."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)
