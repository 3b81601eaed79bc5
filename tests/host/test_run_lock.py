"""Tests that one process at a time writes to a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import threading

import commands
import pytest
import source_tree

from anysearch_jax.host import run_lock
from anysearch_jax.launch import evaluate, export_hf, train

_HOLDS = """
import sys, time
from anysearch_jax.host import run_lock
from anysearch_jax.launch import evaluate, export_hf, train
with run_lock.hold(sys.argv[1]):
  print("held", flush=True)
  time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
  """Yields the path of a lock and another process that holds it."""
  path = tmp_path / "run" / run_lock.NAME
  process = source_tree.started("-c", _HOLDS, path)
  assert process.stdout.readline() == "held\n"
  yield path, process
  process.kill()
  process.wait(120)


def test_the_error_names_the_process_that_holds_the_lock(other):
  path, process = other
  who = f"process {process.pid} on {socket.gethostname()} since 20"
  held = re.escape(f"{path}: found it held by")
  with pytest.raises(ValueError, match=f"{held}.*{re.escape(who)}"):
    with run_lock.hold(path):
      pytest.fail("two hold it")
  assert run_lock.holder(path).startswith(who)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_releases_the_lock(other, number):
  path, process = other
  process.send_signal(number)
  process.wait(120)
  assert run_lock.holder(path) == ""
  with run_lock.hold(path):
    assert run_lock.holder(path).startswith(f"process {os.getpid()} on")


def test_the_lock_file_is_removed_at_the_end(tmp_path):
  path = tmp_path / "run" / run_lock.NAME
  with pytest.raises(KeyError), run_lock.hold(path):
    assert path.is_file()
    raise KeyError
  assert list(path.parent.iterdir()) == []
  assert run_lock.holder(path) == ""


def test_a_child_process_does_not_keep_the_lock(tmp_path):
  path = tmp_path / run_lock.NAME
  with run_lock.hold(path):
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
  try:
    with run_lock.hold(path):
      pass
  finally:
    child.kill()
    child.wait(120)


def test_many_threads_hold_the_lock_one_at_a_time(tmp_path):
  path, inside, most, taken = tmp_path / run_lock.NAME, [], [], []

  def work():
    while len(taken) < 50:
      try:
        with run_lock.hold(path):
          inside.append(None)
          most.append(len(inside))
          taken.append(None)
          inside.pop()
      except ValueError:
        continue

  threads = [threading.Thread(target=work) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert len(taken) >= 50
  assert max(most) == 1


def test_a_folder_that_cannot_be_created_is_refused_by_name(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(ValueError, match="file/run/run.lock: .*--output"):
    with run_lock.hold(tmp_path / "file" / "run" / run_lock.NAME):
      pytest.fail("it is held")


def test_a_file_system_without_locks_gives_a_warning(
  tmp_path, monkeypatch, caplog
):
  def unable(*_):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", unable)
  with run_lock.hold(tmp_path / run_lock.NAME):
    assert "has no locks (No locks available)" in caplog.text


@pytest.mark.parametrize(
  ("command", "arguments", "lock"),
  [
    (train, ["--config=configs/quickstart.py"], "out/run.lock"),
    (
      evaluate,
      ["--config=configs/quickstart.py", "--scripted=unknown_only"],
      "out/run.lock",
    ),
    (export_hf, ["--checkpoint=runs/none"], "out.lock"),
  ],
)
def test_a_command_refuses_a_folder_that_another_process_writes_to(
  tmp_path, command, arguments, lock
):
  with run_lock.hold(tmp_path / lock):
    before = {path.name for path in tmp_path.rglob("*")}
    refused = commands.run(
      command, "--cache=", *arguments, f"--output={tmp_path / 'out'}"
    )
    assert f"{tmp_path / lock}: found it held by process" in refused
    added = {path.name for path in tmp_path.rglob("*")} - before
    # An evaluation writes its configuration first, which is harmless.
    assert added <= {"config.json", "provenance.json"}
