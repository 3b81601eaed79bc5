"""The split of a variance against simulated parts of known size."""

from __future__ import annotations

import numpy as np
import pytest
import study
from scipy import stats

from anysearch_jax.evaluation import components, metrics


def _row(rates, *, seeds, draw):
  """Builds a row of trainings with `rates` of right answers, `[R, N]`."""
  base = study.row("a", questions=rates.shape[1], budgets=(1,), seeds=seeds)
  episodes = []
  for run, rate in enumerate(rates):
    for e in base.episodes:
      place = int(e["question_id"][1:])
      episodes.append(
        e
        | {"run": f"r{run}", "outcome": "answered"}
        | {"em": draw(rate[place]), "searches": 1}
      )
  return metrics.Row("a", tuple(episodes)).columns


def test_parts_have_the_sizes_they_were_made_with():
  rng = np.random.default_rng(0)
  questions, trainings, seeds = 300, 6, (1, 2)
  hard = rng.normal(0.5, 0.15, questions)
  shifts = np.linspace(-0.1, 0.1, trainings)[:, None]
  table = _row(hard + shifts, seeds=seeds, draw=lambda p: int(rng.random() < p))
  found = components.split(table, ("accuracy", "tp"))["accuracy"]
  assert (found.trainings, found.seeds, found.questions) == (6, 2, 300)
  # A standard deviation of 6 numbers that are known, not drawn.
  assert found.between == pytest.approx(shifts.std(ddof=1), rel=0.25)
  assert found.from_trainings == pytest.approx(found.between / 6**0.5)
  assert found.from_questions == pytest.approx(0.15 / 300**0.5, rel=0.35)
  drawn = 0.5 / (300 * 6 * 2) ** 0.5
  assert found.from_seeds == pytest.approx(drawn, rel=0.1)
  tp = components.split(table, ("tp",))["tp"]
  half = (tp.estimate.high - tp.estimate.low) / 2
  asked = stats.t.ppf(0.975, 299) * np.hypot(tp.from_questions, tp.from_seeds)
  trained = stats.t.ppf(0.975, 5) * tp.from_trainings
  assert half == pytest.approx(np.hypot(asked, trained), rel=1e-3)


def test_one_training_has_no_part_of_trainings():
  row = study.row("a", questions=30, budgets=(1, 2), seeds=(1, 2))
  found = components.split(row.columns, ("accuracy",))["accuracy"]
  assert found.trainings == 1
  assert found.from_trainings is found.between is None
  assert found.from_seeds > 0


def test_one_seed_of_one_training_cannot_be_split():
  row = study.row("a", questions=30, budgets=(1, 2))
  found = components.split(row.columns, ("accuracy",))["accuracy"]
  assert found.from_seeds is found.from_trainings is None
  assert found.from_questions > 0


def test_an_empty_row_has_no_parts():
  row = study.row("a", questions=3, budgets=(1,))
  failed = [e | {"outcome": "failed"} for e in row.episodes]
  assert components.split(failed, ("accuracy",)) == {}
