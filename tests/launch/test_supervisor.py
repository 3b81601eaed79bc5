"""The supervisor: readiness, failures, signals, and leftover processes."""

from __future__ import annotations

import dataclasses
import pathlib
import signal
import socket
import subprocess
import sys

import pytest
import source_tree
import waits

from anysearch_jax.launch import stopping, supervisor

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
SLEEPS = "import time; time.sleep(1000)"


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
  waits.wait_for((folder / "pids").is_file, seconds)
  return [int(pid) for pid in (folder / "pids").read_text().split()]


def assert_ended(folder):
  """Asserts that the processes end soon; a kill takes a moment."""
  ended = {"gone", "Z", "X"}
  waits.wait_for(lambda: ended.issuperset(map(state, pids(folder))), 60)


def python(name, code, *arguments, **settings):
  command = (sys.executable, "-c", code, *map(str, arguments))
  return supervisor.Part(name, command, **settings)


@pytest.fixture
def port():
  return waits.free_port()


def service(port, late=0.0):
  url = f"http://127.0.0.1:{port}/health"
  return python("service", SERVICE, port, late, health=url)


@pytest.fixture
def run(tmp_path, monkeypatch):
  """Runs parts; returns the exit code and the printed lines."""

  def run(services, main, **settings):
    said = []
    monkeypatch.setattr(supervisor, "_say", said.append)
    monkeypatch.setattr(supervisor, "_SHOW_SECONDS", 0.0)
    settings = {"deadline": 30, "grace": 10} | settings
    code = supervisor.run(services, main, logs=tmp_path / "logs", **settings)
    return code, said

  return run


def wait_for(path):
  """Returns code that waits until a file exists."""
  return (
    "import pathlib, time\n"
    f"while not pathlib.Path({str(path)!r}).is_file(): time.sleep(0.02)\n"
  )


def test_the_main_command_starts_when_all_services_answer(run, port, tmp_path):
  other = waits.free_port()
  ask = (
    "import urllib.request, os;"
    f"print(urllib.request.urlopen('http://127.0.0.1:{port}/health').status,"
    "os.environ['GPUS'])"
  )
  before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
  code, said = run(
    [service(port, late=0.3), service(other)],
    python("main", ask, env={"GPUS": "0,1"}),
  )
  logs = tmp_path / "logs"
  assert code == 0
  # Not the services' own lines, which are of one log here.
  words = "starts", "ready", "[main]"
  found = [line for line in said if any(word in line for word in words)]
  assert [line.split(" after")[0] for line in found] == [
    *[f"[service] starts; log: {logs / 'service.log'}"] * 2,
    *["[service] ready"] * 2,
    f"[main] starts; log: {logs / 'main.log'}",
    "[main] 200 0,1",
    "[main] ended",
  ]
  assert (logs / "service.log").read_text().startswith("$ ")
  with socket.socket() as free:  # Nothing listens any more.
    assert free.connect_ex(("127.0.0.1", port)) != 0
  after = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
  assert after == before


@pytest.mark.parametrize(
  ("code", "expected", "end"),
  [
    ("print('so long'); raise SystemExit(7)", 7, "main.log:\n  so long"),
    ("import os; os.kill(os.getpid(), 9)", 137, "main.log: empty."),
  ],
)
def test_the_exit_code_is_that_of_the_main_command(run, code, expected, end):
  found, said = run([], python("main", code))
  assert found == expected
  assert f"[main] failed with code {expected}" in said[-1]
  assert said[-1].endswith(end)


def test_a_service_that_fails_at_its_start_ends_all(run, port, tmp_path):
  url = f"http://127.0.0.1:{port}/health"
  broken = python(
    "broken",
    "import sys; print('\\n'.join(map(str, range(99)))); sys.exit('no GPU')",
    health=url,
  )
  never = python("main", "print('never')")
  code, said = run([broken], never)
  assert code == 1
  assert "[broken] ended with code 1" in said[-1]
  # The end of the log tells why.
  assert said[-1].splitlines()[-2:] == ["  98", "  no GPU"]
  assert len(said[-1].splitlines()) == 21
  missing = supervisor.Part("missing", (str(tmp_path / "no"),))
  code, said = run([missing], never)
  assert code == 1 and "[missing] could not start: " in said[-1]
  code, said = run(
    [service(port, late=60), python("other", PARENT, tmp_path)],
    never,
    deadline=1.5,
  )
  assert code == 1
  assert f"[service] did not answer {url} within 1.5 seconds" in said[-1]
  assert_ended(tmp_path)
  with socket.create_server(("127.0.0.1", port)):
    code, said = run([service(port)], never)
  assert code == 1 and "found another process at" in said[-1]
  assert not (tmp_path / "logs" / "main.log").exists()


@pytest.mark.parametrize("exits", [0, 3])
def test_a_service_that_ends_later_ends_all(run, tmp_path, exits):
  code = f"{wait_for(tmp_path / 'pids')}raise SystemExit({exits})"
  found, said = run([python("ends", code)], python("main", PARENT, tmp_path))
  assert found == 1
  assert f"[ends] ended with code {exits}" in said[-1]
  assert_ended(tmp_path)


def test_service_is_restarted_up_to_its_limit(run, port, tmp_path):
  """The service dies twice while its child still holds the port."""
  dies = f"""
import pathlib, subprocess, sys, time
starts = pathlib.Path({str(tmp_path)!r}, "starts")
count = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (count + 1))
subprocess.Popen([sys.executable, "-c", {SERVICE!r}, "{port}", "0"])
if count < 2:
  while not pathlib.Path({str(tmp_path)!r}, "main").exists():
    time.sleep(0.02)
  sys.exit(9)
time.sleep(1000)
"""
  main = f"""
import pathlib, time, urllib.request
folder = pathlib.Path({str(tmp_path)!r})
(folder / "main").touch()
while len((folder / "starts").read_text()) < 3:
  time.sleep(0.02)
while True:
  try:
    urllib.request.urlopen("http://127.0.0.1:{port}/health").close()
    break
  except OSError:
    time.sleep(0.02)
"""
  part = python(
    "dies", dies, health=f"http://127.0.0.1:{port}/health", restarts=2
  )
  code, said = run([part], python("main", main))
  assert code == 0, said
  again = [line for line in said if "it is started again" in line]
  assert [line.split(", ")[-1] for line in again] == [
    f"{left} of that left" for left in (2, 1)
  ]
  # One time more than it may, it ends all.
  (tmp_path / "starts").unlink()
  (tmp_path / "main").unlink()
  code, said = run(
    [dataclasses.replace(part, restarts=1)],
    python("main", main + "time.sleep(1000)"),
  )
  assert code == 1
  assert sum("it is started again" in line for line in said) == 1
  assert "[dies] ended with code 9" in said[-1]
  assert "expected it to serve until the end" in said[-1]


@pytest.mark.parametrize("stubborn", [(), ("child",), ("parent", "child")])
def test_children_of_a_service_end_with_it(run, tmp_path, stubborn):
  code, said = run(
    [python("service", PARENT, tmp_path, *stubborn)],
    python("main", wait_for(tmp_path / "pids")),
    grace=0.5 if stubborn else 60.0,
  )
  assert code == 0
  # Children that it leaves behind are killed without a word.
  ended = "[service] did not end by itself; killed" not in said
  assert ended == ("parent" not in stubborn)
  assert_ended(tmp_path)


def test_what_a_command_left_behind_ends(run, tmp_path):
  leaves = PARENT.replace("time.sleep(1000)", "")
  assert run([], python("main", leaves, tmp_path))[0] == 0
  assert_ended(tmp_path)


def test_a_main_command_that_takes_too_long_to_save_is_killed(
  run, monkeypatch, tmp_path
):
  monkeypatch.setattr(supervisor, "_SAVE_SECONDS", 0.5)
  dies = python("dies", wait_for(tmp_path / "pids") + "raise SystemExit(3)")
  says = PARENT.replace(
    "time.sleep(1000)",
    "print('does not stop', flush=True)\ntime.sleep(1000)",
  )
  code, said = run([dies], python("main", says, tmp_path, "parent"))
  assert code == 1
  assert "[main] did not end by itself; killed" in said
  assert_ended(tmp_path)


# Signals.

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


@pytest.fixture
def supervised(tmp_path):
  """Starts a supervisor process with a service, its child and a command."""

  def start(*, grace, stubborn=(), main=SLEEPS, until="[main] starts"):
    script = f"""
import pathlib, signal, sys
from anysearch_jax.launch import supervisor
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
    process = source_tree.started("-c", script)
    assert any(line.startswith(until) for line in process.stdout)
    pids(tmp_path)
    return process

  return start


def test_a_signal_stops_everything(supervised, tmp_path):
  number = signal.SIGHUP
  process = supervised(grace=60)
  process.send_signal(number)
  rest, _ = process.communicate(timeout=120)
  # The main command was told by SIGTERM, and ended so.
  assert process.returncode == 128 + signal.SIGTERM
  assert f"stopping everything on {number.name}" in rest
  assert_ended(tmp_path)


def test_second_signal_kills_remaining_processes(supervised, tmp_path):
  process = supervised(grace=600, stubborn=("parent", "child"))
  process.send_signal(signal.SIGINT)
  assert any("stopping everything" in line for line in process.stdout)
  with pytest.raises(subprocess.TimeoutExpired):
    process.wait(1.2 * stopping._SAME_REQUEST_SECONDS)
  process.send_signal(signal.SIGINT)
  process.communicate(timeout=120)
  assert process.returncode == 128 + signal.SIGTERM
  assert_ended(tmp_path)


def test_the_main_command_saves_before_services_end(supervised, tmp_path):
  process = supervised(grace=1.5, main=SAVES, until="[main] trains")
  process.send_signal(signal.SIGINT)
  rest, _ = process.communicate(timeout=120)
  assert process.returncode == stopping.RESUME, rest
  assert "[main] stopping on SIGTERM; it may take up to 60 s" in rest
  assert "[main] ended with code 75" in rest
  assert (tmp_path / "saved").read_text() == "True"
  assert_ended(tmp_path)


def test_text_and_tail_skip_what_was_in_the_log(tmp_path):
  log = tmp_path / "log.log"
  log.write_text("before\n")
  code = "print('10%\\r100%\\n\\nend')"
  child = supervisor.Running(python("log", code), tmp_path)
  waits.wait_for(lambda: child.code == 0, 30)
  assert child.text() == "10%\r100%\n\nend\n"
  assert child.tail(2) == ["100%", "end"]
  assert log.read_text().startswith("before\n$ ")
