"""Jobs that depend on each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from launch import quickstart, stopping


def _job(tmp_path, name, code, after=()):
  result = tmp_path / f"{name}.done"
  script = f"import pathlib, sys; {code}; pathlib.Path({str(result)!r}).touch()"
  return quickstart.Job(name, ["-c", script], result, tuple(after))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
  monkeypatch.setattr(quickstart, "_POLL", 0.01)


def test_jobs_run_after_what_they_need(tmp_path):
  needs_a = f"assert pathlib.Path({str(tmp_path / 'a.done')!r}).exists()"
  some = [
    _job(tmp_path, "b", needs_a, after=["a"]),
    _job(tmp_path, "a", "pass"),
    _job(tmp_path, "report", "pass", after=["a", "b"]),
  ]
  quickstart.run(some, tmp_path / "logs", at_once=2)
  assert all(job.result.exists() for job in some)


def test_job_waits_for_a_file_while_others_run(tmp_path):
  file = tmp_path / "programs"
  fills = f"import time; time.sleep(.5); pathlib.Path({str(file)!r}).write_text"
  there = f"assert pathlib.Path({str(file)!r}).read_text()"
  some = [
    _job(tmp_path, "a", f"{fills}('x')"),
    _job(tmp_path, "b", there),
    _job(tmp_path, "c", "pass"),
  ]
  some[1].once = file
  quickstart.run(some, tmp_path / "logs", at_once=3)
  assert all(job.result.exists() for job in some)
  # Nothing else can write it, so waiting would be in vain.
  some[2].once, some[2].again = tmp_path / "never", True
  quickstart.run(some, tmp_path / "logs", at_once=3)


def test_finished_job_is_not_run_again(tmp_path, capsys):
  some = [
    _job(tmp_path, "a", "sys.exit(3)"),
    _job(tmp_path, "report", "pass", after=["a"]),
  ]
  some[0].result.touch()
  quickstart.run(some, tmp_path / "logs", at_once=1)
  out = capsys.readouterr().out
  assert "not run again: a" in out
  assert f"Results stand in {tmp_path}; remove it" in out


def test_a_failed_job_stops_the_rest_and_shows_why(tmp_path):
  some = [
    _job(tmp_path, "a", "print('out of luck'); sys.exit(3)"),
    _job(tmp_path, "report", "pass", after=["a"]),
  ]
  with pytest.raises(SystemExit, match="out of luck"):
    quickstart.run(some, tmp_path / "logs", at_once=1)
  assert not some[1].result.exists()


def test_job_with_again_runs_although_its_result_exists(tmp_path):
  job = _job(tmp_path, "a", "print('anew')")
  job.result.touch()
  job.again = True
  quickstart.run([job], tmp_path / "logs", at_once=1)
  assert "anew" in (tmp_path / "logs" / "a.log").read_text()


def test_missing_dependency_is_named(tmp_path):
  with pytest.raises(SystemExit, match="Nothing can run: b is not there"):
    quickstart.run([_job(tmp_path, "a", "pass", ["b"])], tmp_path, at_once=1)


def test_a_job_that_was_stopped_stops_the_rest(tmp_path):
  with pytest.raises(stopping.StoppedError) as stopped:
    quickstart.run([_job(tmp_path, "a", "sys.exit(75)")], tmp_path, at_once=1)
  assert stopped.value.code == stopping.RESUME


def test_signal_waits_for_running_jobs_to_save(tmp_path):
  pid, saved = tmp_path / "pid", tmp_path / "saved"
  sleeper = f"""
import os, pathlib, signal, sys, time
def save(number, frame):
  time.sleep(1)
  pathlib.Path({str(saved)!r}).touch()
  sys.exit(75)
signal.signal(signal.SIGTERM, save)
pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))
time.sleep(60)
"""
  code = (
    "import pathlib\n"
    "from launch import quickstart\n"
    f"root = pathlib.Path({str(tmp_path)!r})\n"
    f"job = quickstart.Job('a', ['-c', {sleeper!r}], root / 'x')\n"
    "quickstart.run([job], root, at_once=1)\n"
  )
  process = subprocess.Popen([sys.executable, "-c", code])
  end = time.monotonic() + 120
  while not (pid.is_file() and pid.read_text()):
    assert time.monotonic() < end
    time.sleep(0.01)
  process.send_signal(signal.SIGTERM)
  assert process.wait(120) == stopping.RESUME
  with pytest.raises(ProcessLookupError):
    os.kill(int(pid.read_text()), 0)
  assert saved.is_file()
