"""The quickstart's plan and its runner, without a training."""

from __future__ import annotations

import io
import pathlib

import numpy as np
import pytest

from launch import flags as launch_flags
from launch import parts, progress, quickstart, train


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
      budgets = resolved.evaluation.budgets
      assert budgets == (tuple(range(9)) if full else (0, 1, 2, 3, 5, 8))
  trainings = [job for job in jobs if job.name.startswith("train")]
  assert len(trainings) == (12 if full else 4)


def test_the_trained_rows_have_more_questions_than_the_others():
  jobs = quickstart.plan(pathlib.Path("runs/q"), full=False)
  asked = {
    job.name: [arg for arg in job.command if "evaluation.questions" in arg][0]
    for job in jobs
    if job.name.startswith("evaluate")
  }
  for name, arg in asked.items():
    few = "scaffold" in name or "warm start" in name
    assert arg.endswith("=300" if few else "=600"), name


def test_fewer_questions_are_inside_more_and_mixed_alike():
  source = parts.source(launch_flags.load_config("configs/quickstart.py"))
  many = source.evaluation_questions(each=1000)
  few = source.evaluation_questions(each=300)
  assert [q.id for q in few] == [q.id for q in many[:300]]
  assert len({q.id for q in many}) == 1000

  def hops(questions):
    return np.mean([q.metadata["hops"] for q in questions])

  assert abs(hops(few) - hops(many)) < 0.3


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
