"""Child processes: their output, their end, and what they leave behind."""

from __future__ import annotations

import sys
import time

import process_trees
import pytest

from launch import supervisor

# Ignores SIGTERM; its log says that it is ready.
DEAF = (
  "import signal, time\n"
  "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
  "print('ready', flush=True)\n"
  "time.sleep(100)\n"
)


@pytest.fixture
def start(tmp_path):
  """Starts Python code; whatever is left of it is killed after the test."""
  started = []

  def start(code, *arguments, **settings):
    command = [sys.executable, "-c", code, *arguments]
    child = supervisor.Child(command, tmp_path / "log", **settings)
    started.append(child)
    return child

  yield start
  for each in started:
    each.kill()


def wait_until(there):
  end = time.monotonic() + 30
  while not there():
    assert time.monotonic() < end
    time.sleep(0.01)


def test_text_and_tail_skip_what_was_in_the_log(start, tmp_path):
  (tmp_path / "log").write_text("before\n")
  child = start("print('10%\\r100%\\n\\nend')", heading="$ x\n", append=True)
  wait_until(lambda: child.code == 0)
  assert child.text() == "10%\r100%\n\nend\n"
  assert child.tail(2) == ["100%", "end"]
  assert (tmp_path / "log").read_text().startswith("before\n$ x\n")


def test_code_of_a_killed_child_is_that_of_a_shell(start):
  child = start("import time; time.sleep(100)")
  assert child.code is None
  child.kill()
  assert child.code == 128 + 9 and not child.runs()


def test_a_deaf_child_is_killed_after_the_limit(start):
  child = start(DEAF)
  wait_until(lambda: child.tail(1) == ["ready"])
  assert supervisor.stop([child], limit=lambda _: 0.2) == [child]
  assert not child.runs()


def test_a_child_that_announces_its_time_is_given_it(start):
  said = "stopping on SIGTERM; it may take up to 7 s"
  child = start(DEAF.replace("ready", said))
  wait_until(lambda: child.tail(1))
  assert 7 < child.patience() < 60


def test_an_urged_stop_kills_at_once(start):
  child = start(DEAF)
  wait_until(lambda: child.tail(1) == ["ready"])
  assert supervisor.stop([child], urged=lambda: True) == [child]


def test_what_a_child_started_ends_with_it(start, tmp_path):
  child = start(process_trees.PARENT, str(tmp_path))
  process_trees.pids(tmp_path)
  assert supervisor.stop([child], limit=lambda _: 20) == []
  process_trees.assert_ended(tmp_path)
