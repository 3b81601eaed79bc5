"""The stop protocol of all commands, tested on real, short processes."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from anysearch_jax.launch import stopping

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE = 120
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Prints that it runs, then executes the code of a test.
COMMAND = r"""
import asyncio, atexit, hashlib, os, sys, threading, time
from anysearch_jax.launch import flags, stopping

def prints():
  for i in range(10**6):
    print("line", i, flush=True)

def prints_little():
  for i in range(3):
    print("line", i, flush=True)

def computes():
  # In C, where no handler of Python's runs.
  hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

def plays():
  async def play():
    time.sleep(100)

  async def play_all():
    async with asyncio.TaskGroup() as tasks:
      tasks.create_task(play())

  asyncio.run(play_all())

def saves(seconds=0.3, grace=60.0):
  stop = threading.Event()
  with stopping.saving(stop.set, lambda: grace):
    os.write(2, b"runs\n")
    stop.wait(100)
    time.sleep(seconds)
  stopping.say("saved")
  sys.exit(stopping.RESUME)

class Slow:
  def __del__(self, sleep=time.sleep):
    sleep(0.5)  # As the teardown of a device does.

def collects():
  Slow()
  time.sleep(100)

def saves_and_ends_slowly():
  sys.slow = Slow()
  atexit.register(time.sleep, 0.5)
  saves()

def main(argv):
  if "saves" not in argv[1]:
    os.write(2, b"runs\n")
  exec(argv[1])

flags.run(main, resumes="fresh" not in sys.argv, arguments=True)
"""


def start(code, *arguments, ignore=(), stdout=subprocess.DEVNULL):
  # Signals as in a terminal, whatever the tests run in.
  fates = [
    f"--{'ignore' if number in ignore else 'default'}-signal={number.name[3:]}"
    for number in SIGNALS
  ]
  process = subprocess.Popen(
    ["env", *fates, sys.executable, "-c", COMMAND, code, *arguments],
    cwd=ROOT,
    stdout=stdout,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert process.stderr.readline() == "runs\n"
  return process


def end(process):
  late = threading.Timer(DEADLINE, process.kill)
  late.start()
  said = process.stderr.read()
  late.cancel()
  assert "Traceback" not in said
  return process.wait(DEADLINE), said.splitlines()


@pytest.mark.parametrize(
  ("body", "number"),
  [
    *(("time.sleep(100)", number) for number in SIGNALS),
    ("plays()", signal.SIGINT),  # Tasks are stopped.
    # A callback of the interpreter drops what is raised.
    ("collects()", signal.SIGINT),
  ],
)
def test_a_signal_ends_a_command_that_resumes_with_75(body, number):
  process = start(body)
  time.sleep(0.3)
  process.send_signal(number)
  said = [f"stopping on {number.name}", "stopped; the same command resumes"]
  assert end(process) == (75, said)


def test_a_command_that_does_not_resume_ends_as_a_shell_says():
  process = start("time.sleep(100)", "fresh")
  process.send_signal(signal.SIGTERM)
  assert end(process) == (143, ["stopping on SIGTERM", "stopped"])


def test_ignored_signals_stay_ignored():
  process = start("time.sleep(0.5)", ignore=SIGNALS)
  for number in SIGNALS:
    process.send_signal(number)
  assert end(process) == (0, [])


def test_signals_are_handled_while_c_code_runs():
  process = start("computes()")
  time.sleep(0.5)
  process.send_signal(signal.SIGINT)
  assert process.stderr.readline() == "stopping on SIGINT\n"
  time.sleep(1.2 * stopping._SAME_REQUEST_SECONDS)
  process.send_signal(signal.SIGINT)
  assert end(process) == (75, ["ended at once on a second SIGINT"])


def test_two_signals_at_once_are_one_request():
  process = start("saves()")
  process.send_signal(signal.SIGTERM)
  process.stderr.readline()
  process.send_signal(signal.SIGTERM)
  process.send_signal(signal.SIGHUP)
  assert end(process) == (75, ["saved"])


def test_command_that_saves_announces_how_long_it_takes():
  process = start("saves()")
  process.send_signal(signal.SIGHUP)
  code, said = end(process)
  assert (code, said[1:]) == (75, ["saved"])
  assert said[0] == "stopping on SIGHUP; it may take up to 60 s"


def test_signals_after_the_save_keep_the_exit_code():
  process = start("saves_and_ends_slowly()")
  process.send_signal(signal.SIGTERM)
  process.stderr.readline()
  assert process.stderr.readline() == "saved\n"
  while process.poll() is None:
    process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
  code, said = end(process)
  assert code == 75


def test_save_beyond_its_deadline_is_abandoned():
  process = start("saves(seconds=1000, grace=0.2)")
  process.send_signal(signal.SIGTERM)
  code, said = end(process)
  assert code == 75
  assert said[1].startswith("no checkpoint within 0 s (--grace). The same")


def test_closed_output_stops_a_command_without_a_traceback():
  reading, writing = os.pipe()
  process = start("prints()", stdout=writing)
  os.close(writing)
  os.close(reading)
  code, said = end(process)
  assert code == 75
  assert said == [
    "standard output: Broken pipe; nobody reads it any more",
    "stopping on SIGHUP",
    "stopped; the same command resumes",
  ]


@pytest.mark.parametrize(("more", "code"), [((), 0), (("fresh",), 74)])
def test_a_full_disk_behind_the_output_stops_nothing(more, code):
  """It fails a command that does not resume, whose output is its result."""
  with open("/dev/full", "w") as full:
    process = start("prints_little(); stopping.say('done')", *more, stdout=full)
  assert end(process) == (
    code,
    ["standard output: No space left on device; its lines are dropped", "done"],
  )


def test_closed_streams_and_pipes_are_no_traceback():
  python = f"{sys.executable} -m launch"
  for line in (f"{python}.list <&- >&-", f"{python} --help | true"):
    done = subprocess.run(
      ["sh", "-c", line], stderr=-1, cwd=ROOT, timeout=DEADLINE
    )
    assert done.returncode == 0 and b"Traceback" not in done.stderr
