"""The supervisor: readiness, failures, signals, and leftover processes."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest
from process_trees import PARENT, assert_ended

from launch import stopping, supervisor

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A service: after `late` seconds it listens, after `late` more it is healthy.
SERVICE = """
import http.server, sys, time
port, late = int(sys.argv[1]), float(sys.argv[2])
class Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    ready = self.path == "/health" and time.time() > started + late
    self.send_response(200 if ready else 503)
    self.end_headers()
  def log_message(self, *args):
    pass
print("loading")
time.sleep(late)
started = time.time()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def python(name, code, *arguments, **settings):
  command = (sys.executable, "-c", code, *map(str, arguments))
  return supervisor.Part(name, command, **settings)


@pytest.fixture
def port():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]


def service(port, late=0.0):
  url = f"http://127.0.0.1:{port}/health"
  return python("service", SERVICE, port, late, health=url)


@pytest.fixture
def run(tmp_path):
  """Runs parts; returns the exit code and the printed lines."""

  def run(services, main, **settings):
    said = []
    settings = {"deadline": 30, "grace": 10, "every": 0.0} | settings
    code = supervisor.run(
      services, main, logs=tmp_path / "logs", say=said.append, **settings
    )
    return code, said

  return run


def wait_for(path):
  """Returns code that waits until a file exists."""
  return (
    "import pathlib, time\n"
    f"while not pathlib.Path({str(path)!r}).is_file(): time.sleep(0.02)\n"
  )


def test_the_main_command_starts_when_the_services_answer(run, port, tmp_path):
  ask = (
    "import urllib.request, os;"
    f"print(urllib.request.urlopen('http://127.0.0.1:{port}/health').status,"
    "os.environ['GPUS'])"
  )
  main = python("main", ask, env={"GPUS": "0,1"})
  code, said = run([service(port, late=0.3)], main)
  logs = tmp_path / "logs"
  assert code == 0
  assert [line.split(" after")[0] for line in said] == [
    f"[service] starts; log: {logs / 'service.log'}",
    "[service] ready",
    f"[main] starts; log: {logs / 'main.log'}",
    "[main] 200 0,1",
    "[main] ended",
  ]
  assert (logs / "service.log").read_text().startswith("$ ")
  with socket.socket() as free:  # Nothing listens any more.
    assert free.connect_ex(("127.0.0.1", port)) != 0


def test_all_services_are_waited_for(run, port):
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    other = free.getsockname()[1]
  code, said = run(
    [service(port, late=0.4), service(other)], python("main", "")
  )
  assert code == 0
  assert sum("ready" in line for line in said[: said.index(said[-2])]) == 2


def test_the_exit_code_is_that_of_the_main_command(run):
  code, said = run([], python("main", "print('so long'); raise SystemExit(7)"))
  assert code == 7
  assert "[main] failed with code 7" in said[-1]
  assert said[-1].endswith("main.log:\n  so long")


def test_a_main_command_that_is_killed_fails_as_in_a_shell(run):
  code, _ = run([], python("main", "import os; os.kill(os.getpid(), 9)"))
  assert code == 137


def test_a_service_that_dies_at_its_start_ends_all(run, port, tmp_path):
  broken = python(
    "broken",
    "import sys; print('\\n'.join(map(str, range(99)))); sys.exit('no GPU')",
    health=f"http://127.0.0.1:{port}/health",
  )
  main = python("main", "print('never')")
  code, said = run([broken], main)
  assert code == 1
  assert "[broken] ended with code 1" in said[-1]
  # The end of the log tells why.
  assert said[-1].splitlines()[-2:] == ["  98", "  no GPU"]
  assert len(said[-1].splitlines()) == 21
  assert not (tmp_path / "logs" / "main.log").exists()


def test_a_service_that_dies_later_ends_all(run, tmp_path):
  dies = python("dies", wait_for(tmp_path / "pids") + "raise SystemExit(3)")
  code, said = run([dies], python("main", PARENT, tmp_path))
  assert code == 1
  assert "[dies] ended with code 3" in said[-1]
  assert_ended(tmp_path)


def test_service_is_restarted_up_to_its_limit(run, port, tmp_path):
  """The service dies three times while its child still holds the port."""
  dies = f"""
import pathlib, subprocess, sys, time
starts = pathlib.Path({str(tmp_path)!r}, "starts")
count = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (count + 1))
subprocess.Popen([sys.executable, "-c", {SERVICE!r}, "{port}", "0"])
if count < 3:
  while not pathlib.Path({str(tmp_path)!r}, "main").exists():
    time.sleep(0.02)
  sys.exit(9)
time.sleep(1000)
"""
  main = f"""
import pathlib, time, urllib.request
folder = pathlib.Path({str(tmp_path)!r})
(folder / "main").touch()
while len((folder / "starts").read_text()) < 4:
  time.sleep(0.02)
while True:
  try:
    urllib.request.urlopen("http://127.0.0.1:{port}/health").close()
    break
  except OSError:
    time.sleep(0.02)
"""
  part = python(
    "dies", dies, health=f"http://127.0.0.1:{port}/health", restarts=3
  )
  code, said = run([part], python("main", main))
  assert code == 0, said
  again = [line for line in said if "it is started again" in line]
  assert [line.split(", ")[-1] for line in again] == [
    f"{left} of that left" for left in (3, 2, 1)
  ]
  assert "[dies] ended with code 9" in again[0]
  # One time more than it may, it ends all.
  (tmp_path / "starts").unlink()
  (tmp_path / "main").unlink()
  code, said = run(
    [dataclasses.replace(part, restarts=2)],
    python("main", main + "time.sleep(1000)"),
  )
  assert code == 1
  assert sum("it is started again" in line for line in said) == 2
  assert "[dies] ended with code 9" in said[-1]
  assert "expected it to serve until the end" in said[-1]


def test_service_that_exits_early_with_0_is_a_failure(run):
  code, said = run(
    [python("early", "")], python("main", "import time; time.sleep(100)")
  )
  assert code == 1
  assert "[early] ended with code 0" in said[-1]
  assert "log: empty." in said[-1]


def test_a_service_that_is_never_ready_ends_all(run, port, tmp_path):
  code, said = run(
    [service(port, late=60), python("other", PARENT, tmp_path)],
    python("main", "print('never')"),
    deadline=1.5,
  )
  assert code == 1
  assert f"[service] did not answer http://127.0.0.1:{port}" in said[-1]
  assert "within 1.5 seconds" in said[-1]
  assert_ended(tmp_path)


@pytest.mark.parametrize("stubborn", [(), ("child",), ("parent", "child")])
def test_children_of_a_service_end_with_it(run, tmp_path, stubborn):
  code, said = run(
    [python("service", PARENT, tmp_path, *stubborn)],
    python("main", wait_for(tmp_path / "pids")),
    grace=0.5 if stubborn else 60.0,
  )
  assert code == 0
  assert ("[service] did not end by itself; killed" in said) == bool(stubborn)
  assert_ended(tmp_path)


def test_a_service_may_end_its_children_itself(run, tmp_path):
  orderly = """
import pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
child = subprocess.Popen(["sleep", "1000"])
def end(number, frame):
  time.sleep(0.5)  # Long enough for a signal to all of them to arrive.
  (folder / "child").write_text(str(child.poll()))
  child.kill()
  sys.exit()
signal.signal(signal.SIGTERM, end)
(folder / "ready").touch()
while True: time.sleep(1)
"""
  run(
    [python("service", orderly, tmp_path)],
    python("main", wait_for(tmp_path / "ready")),
  )
  assert (tmp_path / "child").read_text() == "None"


def test_children_of_a_command_that_ended_end_too(run, tmp_path):
  leaves = PARENT.replace("time.sleep(1000)", "")
  assert run([], python("main", leaves, tmp_path))[0] == 0
  assert_ended(tmp_path)


def test_zombie_is_not_waited_for(run, tmp_path):
  """This happens in containers whose first process is not an init."""
  leaves_a_zombie = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
if os.fork() == 0:
  if os.fork() == 0:
    os._exit(0)  # Stays in the group; its parent leaves it and never asks.
  os.setsid()
  (folder / "left").touch()
  while not (folder / "end").exists(): time.sleep(0.02)
  os._exit(0)
while not (folder / "left").exists(): time.sleep(0.02)
"""
  try:
    code, said = run([], python("main", leaves_a_zombie, tmp_path), grace=3.0)
  finally:
    (tmp_path / "end").touch()
  assert code == 0
  assert "ended after" in said[-1]


def test_a_main_command_that_takes_longer_than_it_says_is_killed(
  run, monkeypatch, tmp_path
):
  monkeypatch.setattr(stopping, "_MARGIN", 0.1)
  dies = python("dies", wait_for(tmp_path / "pids") + "raise SystemExit(3)")
  says = PARENT.replace(
    "time.sleep(1000)",
    "print('stopping on SIGTERM; it may take up to 0 s', flush=True)\n"
    "time.sleep(1000)",
  )
  code, said = run([dies], python("main", says, tmp_path, "parent"))
  assert code == 1
  assert "[main] did not end by itself; killed" in said
  assert_ended(tmp_path)


def test_signal_handlers_are_restored(run):
  before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
  run([], python("main", ""))
  after = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
  assert after == before


def test_a_port_that_another_process_has_is_refused(run, tmp_path):
  with socket.create_server(("127.0.0.1", 0)) as taken:
    code, said = run([service(taken.getsockname()[1])], python("main", ""))
  assert code == 1
  assert "expected a free port" in said[-1]
  assert not (tmp_path / "logs" / "service.log").exists()


def test_missing_command_is_named(run, tmp_path):
  missing = supervisor.Part("server", (str(tmp_path / "python"), "-m", "x"))
  code, said = run([missing], python("main", ""))
  assert code == 1
  assert said[-1].startswith("[server] could not start: ")
  assert str(tmp_path / "python") in said[-1]


def test_shown_line_is_the_last_of_this_run(run):
  bar = (
    "import time; print('10%\\r50%', end='\\r', flush=True); time.sleep(0.5)"
  )
  code, said = run([], python("main", bar))
  assert said[1:-1] == ["[main] 50%"]
  _, again = run([], python("main", ""))
  assert len(again) == 2 and "ended" in again[-1]


def test_shown_command_is_quoted_for_the_shell():
  part = python(
    "main",
    "import os, sys; print(os.environ['GPUS'], sys.argv[1:])",
    "--a=b c",
    "--d=('e')",
    env={"GPUS": "0 1"},
  )
  said = subprocess.run(
    ["sh", "-c", part.shown()], capture_output=True, text=True, check=True
  )
  assert said.stdout == "0 1 ['--a=b c', \"--d=('e')\"]\n"
  assert os.environ.get("GPUS") is None
