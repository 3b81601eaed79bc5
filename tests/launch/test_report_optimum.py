"""Rows of the generated world get the optimum of their own world."""

from __future__ import annotations

import json

import numpy as np
import pytest
import study

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings as config_settings
from anysearch_jax.evaluation import metrics
from anysearch_jax.launch import report
from anysearch_jax.world import optimum
from anysearch_jax.world import world as world_lib


def row_of(questions, budgets=(0, 2)):
  (like,) = study.row("A", questions=1, budgets=(0,)).episodes
  return metrics.Row(
    "A",
    tuple(
      like | {"question_id": q.id, "budget": b, "outcome": "answered"}
      for q in questions
      for b in budgets
    ),
  )


def evaluated(folder, **data):
  config = config_lib.ExperimentConfig(data=config_lib.DataConfig(**data))
  values = config_settings.to_dict(config)
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(values))
  return folder


@pytest.mark.parametrize("seed", [0, 1])
def test_a_row_is_held_against_the_optimum_of_its_world(seed, tmp_path):
  folder = evaluated(tmp_path / "one", world_seed=seed)
  world = world_lib.World(seed)
  questions = world.questions("held-out", 12, 0)
  found = report.with_optimum(row_of(questions), [folder, folder]).columns
  agent, at = optimum.Optimum(world), (found.budget == 2).astype(int)
  best = optimum.accuracy(agent, found.ids.tolist(), (0, 2))
  np.testing.assert_allclose(found.optimum, best[found.question, at])


def test_rows_of_other_questions_are_unchanged(tmp_path):
  row = study.row("A", questions=3)
  of_files = evaluated(tmp_path / "files", source="prepared", path="data/qa")
  for folders in ([tmp_path], [of_files]):
    assert report.with_optimum(row, folders) is row
  # Rows of two worlds have no optimum in common.
  one = evaluated(tmp_path / "one")
  other = evaluated(tmp_path / "other", world_seed=1)
  assert report.with_optimum(row, [one, other]) is row


def test_a_question_of_no_world_is_named(tmp_path):
  folder = evaluated(tmp_path / "one")
  with pytest.raises(ValueError, match="Row 'A': Found the question 'q0'"):
    report.with_optimum(study.row("A", questions=3), [folder])
