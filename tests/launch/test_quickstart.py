"""The quickstart's plan, and its runner of jobs that depend on each other."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import waits

from anysearch_jax.launch import (
  evaluate,
  parts,
  progress,
  quickstart,
  stopping,
  train,
)
from anysearch_jax.launch import flags as launch_flags


@pytest.mark.parametrize("full", [False, True])
def test_the_plan_is_complete_and_its_flags_are_real(full):
  jobs = quickstart.plan(pathlib.Path("runs/q"), full=full)
  names = [job.name for job in jobs]
  assert len(set(names)) == len(names)
  for place, job in enumerate(jobs):
    # Each needs earlier ones only, so that the plan always ends.
    assert set(job.needs) <= set(names[:place])
    if job.command[2] == "anysearch_jax.launch.report":
      continue
    flags = dict(arg[2:].split("=", 1) for arg in job.command[3:])
    config = launch_flags.load_config(flags["config"])
    overrides = [
      f"{name.removeprefix('config.')}={value}"
      for name, value in flags.items()
      if name.startswith("config.")
    ]
    resolved = launch_flags.override(config, overrides)
    if job.name.startswith("train"):
      c = resolved.curriculum
      assert (c.total_steps, c.rollouts) == ((600, 120) if full else (300, 60))
      method, _, budget = job.name.rpartition("-")[0].partition("_at_")
      assert method.startswith("train-")
      if budget:
        assert c.fixed_budget == int(budget)
      assert resolved.seed == int(job.name.rpartition("-")[2])
    else:
      assert resolved.evaluation.questions == (1000 if full else 600)
      budgets = evaluate.parse_budgets(flags["budgets"])
      assert budgets == (tuple(range(9)) if full else (0, 1, 2, 3, 5, 8))
  trainings = [name for name in names if name.startswith("train")]
  assert len(trainings) == (18 if full else 2)


def test_what_needs_no_training_runs_beside_the_first_one():
  jobs = quickstart.plan(pathlib.Path("runs/q"), full=False)
  names = [job.name for job in jobs]
  first, second = [name for name in names if name.startswith("train")]
  beside = {job.name for job in jobs[: names.index(second)] if not job.needs}
  played = {f"evaluate-{name}-plain" for name in ("warm_start", "optimum")}
  assert beside == {first} | played
  assert set(jobs[-1].needs) == set(names[:-1])
  rows = [arg.partition("=")[0] for arg in jobs[-1].command[3:7]]
  assert rows[0] == "Priced search" and rows[2:] == ["Warm start", "Optimum"]


def test_fewer_questions_are_inside_more_and_mixed_alike():
  source = parts.source(launch_flags.load_config("configs/quickstart.py"))
  many = source.evaluation_questions(per_dataset=1000)
  few = source.evaluation_questions(per_dataset=300)
  assert [q.id for q in few] == [q.id for q in many[:300]]
  assert len({q.id for q in many}) == 1000
  hops = [np.mean([q.metadata["hops"] for q in each]) for each in (few, many)]
  assert abs(hops[0] - hops[1]) < 0.3


def test_progress_says_rate_and_time_left(capsys, monkeypatch):
  now = iter([0.0, 1.0, 2.0, 10.0])
  clock = types.SimpleNamespace(monotonic=lambda: next(now))
  monkeypatch.setattr(progress, "time", clock)
  line = progress.Line(100, unit="step")
  line.tick(10)
  line.tick(11)  # Too soon to print again.
  line.tick(50, "loss 1.0")
  first, second = capsys.readouterr().out.splitlines()
  assert first == "step 10/100"
  # From step 10 (the first of this process, which compiles) in nine seconds.
  assert second == "step 50/100  4.4/s  0:11 left  loss 1.0"


def test_progress_says_that_the_first_item_compiles(capsys):
  line = progress.Line(7, unit="rollout")
  printed = ""
  with line.reporting_waits(lambda: "", every=0.05):
    while not printed:
      printed = capsys.readouterr().out
    line.tick(1)
    capsys.readouterr()
    time.sleep(0.1)
  assert capsys.readouterr().out == ""
  first, *_ = printed.splitlines()
  said = "the first one also compiles programs, 0:00 so far"
  assert first == f"rollout 0/7  {said}"


def test_dry_run_tells_the_derived_numbers():
  text = train.describe(launch_flags.load_config("configs/quickstart.py"))
  assert "rollouts: 120" in text
  assert "trajectories a rollout: 80" in text


# Jobs.


@pytest.fixture
def job(tmp_path, monkeypatch):
  """Makes a job that runs code and then writes its result."""
  monkeypatch.setattr(quickstart, "_POLL_SECONDS", 0.01)

  def job(name, code="pass", after=()):
    result = tmp_path / f"{name}.done"
    end = f"pathlib.Path({str(result)!r}).touch()"
    script = f"import pathlib, sys; {code}; {end}"
    command = sys.executable, "-c", script
    return quickstart.Job(name, command, result=result, needs=tuple(after))

  return job


@pytest.fixture
def run(tmp_path):
  return lambda *jobs: quickstart.run(jobs, tmp_path / "logs", at_once=2)


def test_jobs_run_after_what_they_need(job, run, tmp_path):
  there = f"assert pathlib.Path({str(tmp_path / 'a.done')!r}).exists()"
  run(job("b", there, after=["a"]), job("a"), last := job("c", after=["b"]))
  assert last.result.exists()


def test_two_jobs_run_at_a_time_and_no_third(job, run, tmp_path):
  def meet(*pair):
    here, there = (f"pathlib.Path({str(tmp_path)!r}, {x!r})" for x in pair)
    wait = f"[{there}.exists() or time.sleep(.01) for _ in range(3000)]"
    return f"import time; {here}.touch(); {wait}; assert {there}.exists()"

  # Two wait for each other, look for the third, and wait again.
  third = f"pathlib.Path({str(tmp_path / 'third')!r})"
  look = f"assert not {third}.exists()"
  run(
    job("a", f"{meet('a1', 'b1')}; {look}; {meet('a2', 'b2')}"),
    job("b", f"{meet('b1', 'a1')}; {look}; {meet('b2', 'a2')}"),
    job("third", f"{third}.touch()"),
  )


def test_finished_jobs_but_the_last_are_not_run_again(
  job, run, tmp_path, capsys
):
  jobs = [job("a", "sys.exit(3)"), job("report", "print('anew')")]
  for each in jobs:
    each.result.touch()
  run(*jobs)
  out = capsys.readouterr().out
  assert "not run again: a" in out
  assert f"Results are in {tmp_path}; remove it" in out
  assert "anew" in (tmp_path / "logs" / "report.log").read_text()


@pytest.mark.parametrize(
  ("code", "ends"),
  [
    ("print('out of luck'); sys.exit(3)", "out of luck"),
    ("sys.exit(75)", "75"),
  ],
)
def test_a_job_that_fails_stops_the_rest(job, run, tmp_path, code, ends):
  endless = "import time; time.sleep(600)"
  jobs = job("a", code), job("b", endless), job("report", after=["a"])
  with pytest.raises(SystemExit, match=ends):
    run(*jobs)
  assert not list(tmp_path.glob("*.done"))


def test_a_stop_lets_running_jobs_save_and_the_same_command_resumes(
  tmp_path, capsys
):
  pid, saved, done = (tmp_path / name for name in ("pid", "saved", "done"))
  sleeper = f"""
import os, pathlib, signal, sys, time
if pathlib.Path({str(saved)!r}).is_file():
  sys.exit()
def save(number, frame):
  time.sleep(1)
  pathlib.Path({str(saved)!r}).touch()
  sys.exit(75)
signal.signal(signal.SIGTERM, save)
pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))
time.sleep(60)
"""
  once = f"pathlib.Path({str(done)!r}).open('x')"
  code = f"""
import pathlib, sys
from anysearch_jax.launch import quickstart
root = pathlib.Path({str(tmp_path)!r})
jobs = [
  quickstart.Job(name, (sys.executable, "-c", code), result=root / name)
  for name, code in (
    ("done", "import pathlib; " + {once!r}), ("last", {sleeper!r})
  )
]
quickstart.run(jobs, root / "logs", at_once=1)
"""
  process = subprocess.Popen([sys.executable, "-c", code])
  waits.wait_for(lambda: pid.is_file() and pid.read_text(), 120)
  process.send_signal(signal.SIGTERM)
  assert process.wait(120) == stopping.RESUME
  with pytest.raises(ProcessLookupError):
    os.kill(int(pid.read_text()), 0)
  assert saved.is_file()
  exec(compile(code, "quickstart", "exec"), {})
  assert "already there, not run again: done" in capsys.readouterr().out
