"""Tests of what signals do to supervised commands."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys

import pytest
from process_trees import PARENT, assert_ended, pids

from launch import stopping

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Saves on SIGTERM, asks for time, and checks that the service still runs.
SAVES = """
import pathlib, signal, sys, time
folder, asks = pathlib.Path(sys.argv[1]), sys.argv[2]
def alive(pid):
  text = pathlib.Path(f"/proc/{pid}/stat").read_text()
  return text.rpartition(")")[2].split()[0] not in "ZX"
def save(number, frame):
  print(f"stopping on SIGTERM; it may take up to {asks} s", flush=True)
  time.sleep(2.5)
  served = map(int, (folder / "pids").read_text().split())
  (folder / "saved").write_text(str(all(map(alive, served))))
  sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("trains", flush=True)
while True: time.sleep(1)
"""
SLEEPS = "import time; time.sleep(1000)"


def supervise(tmp_path, *, grace, stubborn=(), main=SLEEPS):
  """Starts a supervisor process with a service, its child and a command."""
  script = f"""
import pathlib, signal, sys
from launch import supervisor
# As in a terminal, whatever the tests run in.
signal.signal(signal.SIGINT, signal.default_int_handler)
def python(name, *arguments):
  return supervisor.Part(name, (sys.executable, "-c", *arguments))
sys.exit(supervisor.run(
  [python("service", {PARENT!r}, {str(tmp_path)!r}, *{stubborn!r})],
  python("main", {main!r}, {str(tmp_path)!r}, "60"),
  logs=pathlib.Path({str(tmp_path)!r}), deadline=30, grace={grace},
))
"""
  return subprocess.Popen(
    [sys.executable, "-c", script],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )


def until_started(process, name):
  for line in process.stdout:
    if line.startswith(f"[{name}] starts"):
      return
  raise AssertionError(f"{name} never started")


@pytest.mark.parametrize(
  "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
)
def test_a_signal_stops_everything(tmp_path, number):
  process = supervise(tmp_path, grace=60)
  until_started(process, "main")
  pids(tmp_path)
  process.send_signal(number)
  rest, _ = process.communicate(timeout=120)
  # The main command was told by SIGTERM, and ended so.
  assert process.returncode == 128 + signal.SIGTERM
  assert f"stopping everything on {number.name}" in rest
  assert_ended(tmp_path)


def test_second_signal_kills_remaining_processes(tmp_path):
  process = supervise(tmp_path, grace=600, stubborn=("parent", "child"))
  until_started(process, "main")
  pids(tmp_path)
  process.send_signal(signal.SIGINT)
  for line in process.stdout:
    if "stopping everything" in line:
      break
  with pytest.raises(subprocess.TimeoutExpired):
    process.wait(1.2 * stopping._SAME)
  process.send_signal(signal.SIGINT)
  process.communicate(timeout=120)
  assert process.returncode == 128 + signal.SIGTERM
  assert_ended(tmp_path)


def test_the_main_command_saves_as_long_as_it_says_before_services_end(
  tmp_path,
):
  process = supervise(tmp_path, grace=0.1, main=SAVES)
  until_started(process, "main")
  pids(tmp_path)
  for line in process.stdout:
    if line == "[main] trains\n":
      break
  process.send_signal(signal.SIGINT)
  rest, _ = process.communicate(timeout=120)
  assert process.returncode == stopping.RESUME, rest
  assert "[main] stopping on SIGTERM; it may take up to 60 s" in rest
  assert "[main] ended with code 75" in rest
  assert (tmp_path / "saved").read_text() == "True"
  assert_ended(tmp_path)
