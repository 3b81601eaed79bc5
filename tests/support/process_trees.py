"""A process with a child, and whether both have ended."""

from __future__ import annotations

import pathlib
import time

# Starts a child, prints both process ids, then does not end.
PARENT = """
import os, pathlib, signal, subprocess, sys, time
folder, stubborn = pathlib.Path(sys.argv[1]), sys.argv[2:]
if "parent" in stubborn:
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
ignore = "trap '' TERM; " if "child" in stubborn else ""
code = ignore + "echo up; while :; do sleep 0.1; done"
child = subprocess.Popen(["sh", "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
(folder / "new").write_text(f"{os.getpid()} {child.pid}")
(folder / "new").rename(folder / "pids")
time.sleep(1000)
"""


def state(pid):
  """Returns the state of a process; Z is a zombie."""
  try:
    text = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return "gone"
  return text.rpartition(")")[2].split()[0]


def pids(folder, seconds=60.0):
  """Returns the process ids that `PARENT` prints."""
  end = time.monotonic() + seconds
  while not (folder / "pids").is_file():
    assert time.monotonic() < end
    time.sleep(0.02)
  return [int(pid) for pid in (folder / "pids").read_text().split()]


def assert_ended(folder):
  """Asserts that the processes end soon; a kill takes a moment."""
  end = time.monotonic() + 60
  for pid in pids(folder):
    while state(pid) not in ("gone", "Z", "X"):
      assert time.monotonic() < end, f"{pid} still runs"
      time.sleep(0.02)
