"""The quickstart's plan, and its runner of jobs that depend on each other."""

from __future__ import annotations

import io
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from launch import flags as launch_flags
from launch import parts, progress, quickstart, stopping, train


@pytest.mark.parametrize("full", [False, True])
def test_the_plan_is_complete_and_its_flags_are_real(full):
  jobs = quickstart.plan(pathlib.Path("runs/q"), full=full)
  names = [job.name for job in jobs]
  assert len(set(names)) == len(names)
  for job in jobs:
    assert set(job.after) <= set(names)
    flags = dict(arg[2:].split("=", 1) for arg in job.command[2:])
    if job.name == "report":
      continue
    config = launch_flags.load_config(flags["config"])
    overrides = [
      f"{name.removeprefix('config.')}={value}"
      for name, value in flags.items()
      if name.startswith("config.")
    ]
    resolved = launch_flags.override(config, overrides)
    assert resolved.curriculum.total_steps == 600
    if job.name.startswith("evaluate"):
      e = resolved.evaluation
      few = "scaffold" in job.name or "warm start" in job.name
      # The trained rows have more questions than the others.
      assert e.questions == (1000 if full else 300 if few else 600)
      assert e.budgets == (tuple(range(9)) if full else (0, 1, 2, 3, 5, 8))
  trainings = [job for job in jobs if job.name.startswith("train")]
  assert len(trainings) == (12 if full else 4)


def test_fewer_questions_are_inside_more_and_mixed_alike():
  source = parts.source(launch_flags.load_config("configs/quickstart.py"))
  many = source.evaluation_questions(each=1000)
  few = source.evaluation_questions(each=300)
  assert [q.id for q in few] == [q.id for q in many[:300]]
  assert len({q.id for q in many}) == 1000
  hops = [np.mean([q.metadata["hops"] for q in each]) for each in (few, many)]
  assert abs(hops[0] - hops[1]) < 0.3


def test_progress_says_rate_and_time_left():
  out, now = io.StringIO(), iter([0.0, 1.0, 2.0, 10.0])
  line = progress.Line(100, unit="step", clock=lambda: next(now), out=out)
  line.tick(10)
  line.tick(11)  # Too soon to print again.
  line.tick(50, "loss 1.0")
  first, second = out.getvalue().splitlines()
  assert first.startswith("step 10/100")
  # From step 9 (where this process began) to 50 in ten seconds.
  assert second == "step 50/100  4.1/s  0:12 left  loss 1.0"


def test_dry_run_tells_the_derived_numbers():
  text = train.describe(launch_flags.load_config("configs/quickstart.py"))
  assert "rollouts: 120" in text
  assert "trajectories a rollout: 80" in text


# Jobs.


@pytest.fixture
def job(tmp_path, monkeypatch):
  """Makes a job that runs code and then writes its result."""
  monkeypatch.setattr(quickstart, "_POLL", 0.01)

  def job(name, code="pass", after=(), **settings):
    result = tmp_path / f"{name}.done"
    end = f"pathlib.Path({str(result)!r}).touch()"
    script = f"import pathlib, sys; {code}; {end}"
    return quickstart.Job(
      name, ["-c", script], result, tuple(after), **settings
    )

  return job


@pytest.fixture
def run(tmp_path):
  return lambda *jobs: quickstart.run(jobs, tmp_path / "logs", at_once=3)


def test_jobs_run_after_what_they_need(job, run, tmp_path):
  there = f"assert pathlib.Path({str(tmp_path / 'a.done')!r}).exists()"
  jobs = [
    job("b", there, after=["a"]),
    job("a"),
    job("report", after=["a", "b"]),
  ]
  run(*jobs)
  assert all(each.result.exists() for each in jobs)


def test_job_waits_for_a_file_while_others_run(job, run, tmp_path):
  file = tmp_path / "programs"
  fills = f"import time; time.sleep(.5); pathlib.Path({str(file)!r}).write_text"
  there = f"assert pathlib.Path({str(file)!r}).read_text()"
  run(job("a", f"{fills}('x')"), job("b", there, once=file), job("c"))
  # Nothing else can write it, so waiting would be in vain.
  run(job("d", once=tmp_path / "never"))


def test_finished_job_runs_again_only_if_it_says_so(job, run, tmp_path, capsys):
  jobs = [job("a", "sys.exit(3)"), job("report", "print('anew')", reports=True)]
  for each in jobs:
    each.result.touch()
  run(*jobs)
  out = capsys.readouterr().out
  assert "not run again: a" in out
  assert f"Results stand in {tmp_path}; remove it" in out
  assert "anew" in (tmp_path / "logs" / "report.log").read_text()


@pytest.mark.parametrize(
  ("code", "after", "ends"),
  [
    ("print('out of luck'); sys.exit(3)", (), "out of luck"),
    ("pass", ["b"], "Nothing can run: a, b is not there"),
    ("sys.exit(75)", (), "75"),
  ],
)
def test_a_job_that_cannot_end_stops_the_rest(job, run, code, after, ends):
  last = job("report", after=["a"])
  with pytest.raises(SystemExit, match=ends):
    run(job("a", code, after), last)
  assert not last.result.exists()


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
