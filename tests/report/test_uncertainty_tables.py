"""Tables of uncertainty: its sources, seed by seed, detectable effects."""

from __future__ import annotations

import pytest
import study

from anysearch_jax.evaluation import metrics
from anysearch_jax.report import build as report


def _trained(label, trainings, **options):
  """Builds a row of trainings, each with an evaluation seed of its own."""
  return metrics.Row(
    label,
    tuple(
      e | {"run": f"{label}{seed}"}
      for seed in range(trainings)
      for e in study.row(
        f"{label}{seed}", seeds=(seed,), budgets=(0, 2), questions=12, **options
      ).episodes
    ),
  )


def _built(*rows):
  found = report.build(rows, [row.label for row in rows[1:]], draws=100)
  return found.data, found.data["tables"]


def _line(table, *keys):
  """Returns the cells of the line with these keys, by their full names."""
  (line,) = [line for line in table["lines"] if line["keys"] == keys]
  heads = [column["full_name"] for column in table["columns"]]
  return dict(zip(heads, line["cells"], strict=True))


def test_several_trainings_are_told_apart_from_seeds():
  data, tables = _built(_trained("A", 3), _trained("B", 3, skill=0.1))
  line = _line(tables["uncertainty"], "EM", "A")
  assert [line[k]["value"] for k in ("trainings", "seeds of each")] == [3, 1]
  assert line["error from trainings"]["value"] >= 0
  assert data["trainings"] == 3
  line = _line(tables["pairwise_rows"], "all", "2", "A − B")
  assert line["EM p, trainings"]["value"] >= 0.1  # Three against three.
  assert line["EM detectable"]["value"] > 0
  assert "cover questions and trainings" in tables["pairwise_rows"]["note"]
  alone = _line(tables["by_seed_rows"], "EM", "A − B")
  seeds = [alone[f"seed {seed}"]["value"] for seed in range(3)]
  assert min(seeds) <= alone["together"]["value"] <= max(seeds)
  assert [v["scope"] for v in data["verdicts"][:2]] == ["", ""]


def test_one_training_is_said_to_be_one_policy():
  rows = [
    study.row(label, seeds=(1, 2), budgets=(0, 2), questions=12)
    for label in "AB"
  ]
  data, tables = _built(*rows)
  line = _line(tables["uncertainty"], "EM", "A")
  assert line["error from seeds"]["value"] > 0
  assert line["error from trainings"]["value"] is None
  assert "these policies only" in tables["pairwise_rows"]["note"]
  assert "only" in data["verdicts"][0]["scope"]


def test_rows_that_share_one_seed_of_several_have_gaps():
  _, tables = _built(_trained("A", 3), _trained("B", 1))
  assert not tables["by_seed_rows"]["lines"]  # There is one common seed.
  _, tables = _built(_trained("A", 3), _trained("B", 3), _trained("C", 1))
  line = _line(tables["by_seed_rows"], "EM", "A − C")
  values = [line[f"seed {seed}"]["value"] for seed in range(3)]
  assert values[0] == pytest.approx(line["together"]["value"])
  assert values[1:] == [None, None]
