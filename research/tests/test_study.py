"""The rows of the studies, and the command that runs them."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import commands
import numpy as np
import pytest
import small_run

import anysearch_jax as aj
from research import ablations, claims, outcomes, study, systems

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASES = ("configs/quickstart.py", "configs/qwen3_4b.py")
# The paper's tables and figures, by hand: what each row changes.
CHANGES = {
  "anysearch": {},
  "gamma_max": {"gamma_mode": "fixed", "gamma_fixed": 0.3},
  "gamma_half": {"gamma_mode": "fixed", "gamma_fixed": 0.15},
  "no_tool": {"gamma_mode": "off"},
  "no_abs": {"use_abs": False},
  "no_rel": {"use_rel": False},
  "no_format": {"beta": 0.0},
  "full_scaffold": {"phase2_scaffold": True},
  "no_scaffold": {"phase1_scaffold": False},
  "lambda_0": {"uniform_mix": 0.0},
  "lambda_1": {"uniform_mix": 1.0},
  "phase1_only": {"phase1_steps": None},  # All of them.
  "phase2_only": {"phase1_steps": 0},
}


def override(config, assignments):
  """Applies `path=value` strings, as the flags of a command do."""
  for path, _, text in (each.partition("=") for each in assignments):
    try:
      value = json.loads(text)
    except ValueError:
      value = (text,) if path == "method.options" else text
    for key in reversed(path.split(".")):
      value = {key: value}
    config = aj.config.changed(config, **value)
  return config


@pytest.mark.parametrize("path", BASES)
def test_rows_change_only_what_the_paper_changes(path):
  base = study.load_config(path)
  rows = {
    r.name: r for r in ablations.rows(base) if r.table in ablations.TABLES
  }
  trained = {name for name, row in rows.items() if not row.policy_of}
  assert trained == set(CHANGES)
  for name, changes in CHANGES.items():
    config = override(base, rows[name].overrides)
    aj.validate(config)
    found = {
      field: value
      for part in ("reward", "curriculum")
      for field, value in vars(getattr(config, part)).items()
      if value != getattr(getattr(base, part), field)
    }
    # What a base has already is no change.
    if changes.get("gamma_fixed") == base.reward.gamma_fixed:
      changes = {"gamma_mode": "fixed"}
    if name == "phase1_only":
      changes = {"phase1_steps": base.curriculum.total_steps}
    assert found == changes, name
    assert config.objective.normalize == "group"
  assert {row.table for row in rows.values()} == set(ablations.TABLES)
  assert rows["kept_scaffold"].policy_of == "anysearch"
  assert rows["only_scaffold"].policy_of == claims.UNTRAINED


@pytest.mark.parametrize("path", BASES)
def test_further_rows_can_be_trained(path):
  base = study.load_config(path)
  rows = ablations.rows(base)
  for row in rows:
    config = override(base, row.overrides)
    aj.validate(config, samples=False)
    assert config.curriculum.rollouts == base.curriculum.rollouts
  # Two bases may make two rows equal, but never rows of one table.
  digests = study.settings(rows, path)
  assert len(digests) == len(rows)
  assert len({*digests.values()}) >= len(rows) - 2


@pytest.mark.parametrize("name", ["priced", "no_tool", "search_r1"])
def test_rows_are_the_presets_of_the_quickstart(name):
  base = study.load_config(BASES[0])
  rows = {row.name: row for row in ablations.rows(base)}
  found = override(base, [*rows[name].overrides, f"name={base.name}-{name}"])
  assert found == study.load_config(f"{BASES[0]}:{name}")


def test_rows_of_the_compared_systems_can_be_played():
  base = study.load_config(BASES[0])
  steps = set()
  for row in systems.rows(base):
    config = override(study.load_config(row.config), row.overrides)
    played = override(config, row.evaluation)
    aj.validate(played, trains=False, samples=False)
    assert not played.retrieval.simulated, row.name
    if not row.policy_of:
      aj.validate(config)
      steps.add(
        (config.curriculum.total_steps, config.questions * config.group)
      )
  # At equal steps and episodes.
  assert steps == {(base.curriculum.total_steps, base.questions * base.group)}


@pytest.fixture
def rows():
  return ablations.rows(study.load_config(BASES[0]))


def test_tables_and_rows_are_chosen_with_what_they_need(rows):
  def names(**asked):
    asked = {"tables": (), "names": ()} | asked
    return [row.name for row in study.choose(rows, **asked)]

  assert len(names()) == len(rows) == 42
  assert names(tables=["sampling"]) == ["lambda_0", "lambda_1"]
  assert names(names=["no_abs"]) == ["no_abs"]
  # Its policy is another row's.
  assert names(names=["kept_scaffold"]) == ["anysearch", "kept_scaffold"]
  assert names(names=["only_scaffold"]) == ["only_scaffold"]
  for asked in ({"tables": ["tools"]}, {"names": ["no_such"]}):
    with pytest.raises(ValueError, match="expected some of"):
      names(**asked)


def test_the_first_seed_of_all_rows_comes_first(rows):
  plan = study.Plan(
    pathlib.Path("runs/s"),
    config=BASES[0],
    untrained="start",
    evaluation=["--x"],
    threads=1,
  )
  chosen = study.choose(
    rows, tables=(), names=["no_abs", "kept_scaffold", "only_scaffold"]
  )
  jobs = plan.jobs(chosen, [42, 43])
  names = [job.name for job in jobs]
  assert names[:6] == [
    "train anysearch 42",
    "evaluate anysearch 42",
    "train no_abs 42",
    "evaluate no_abs 42",
    "evaluate kept_scaffold 42",
    "evaluate only_scaffold 42",
  ]
  assert [name.replace("42", "43") for name in names[:6]] == names[6:]
  by_name = {job.name: job for job in jobs}
  assert by_name["evaluate kept_scaffold 43"].after == ("train anysearch 43",)
  assert by_name["evaluate only_scaffold 43"].after == ()
  command = by_name["evaluate kept_scaffold 43"].command
  assert "--policy=runs/s/anysearch-43/policy" in command
  assert "--config.evaluation.scaffold=true" in command
  assert "--policy=start" in by_name["evaluate only_scaffold 42"].command
  assert "--config.reward.use_abs=false" in by_name["train no_abs 42"].command
  # What is known is not evaluated again; a training that others need stays.
  known = {("no_abs", 42), ("anysearch", 42), ("only_scaffold", 43)}
  assert [job.name for job in plan.jobs(chosen, [42, 43], known=known)] == [
    "train anysearch 42",
    "evaluate kept_scaffold 42",
    "evaluate only_scaffold 42",
    *(name.replace("42", "43") for name in names[:5]),
  ]


def test_rows_with_other_settings_are_not_mixed_in(tmp_path):
  changed = tmp_path / "changed.jsonl"
  right = np.ones((1, 2), bool)
  one = outcomes.Outcomes(
    "anysearch", 42, "0", "q", (2,), (1,), right, 0 * right
  )
  outcomes.write(changed, [one])
  for path, found in (
    (changed, "had other settings"),
    (tmp_path / "missing.jsonl", "No such file"),
  ):
    flags = "--config=research/other_worlds.py:1", f"--outcomes={path}"
    assert found in commands.run(study, *flags, "--dry_run")


CONFIG = """
import dataclasses, sys
sys.path.insert(0, {tests!r})
import small_run

def get_config():
  return dataclasses.replace(small_run.CONFIG, policy={policy!r})
"""


def test_study_runs_resumes_and_reports_all_results(tmp_path):
  config = tmp_path / "small.py"
  start = tmp_path / "start"
  support = str(ROOT / "tests" / "support")
  config.write_text(CONFIG.format(tests=support, policy=str(start)))
  aj.save_policy(start, small_run.parts()["policy"])
  root = tmp_path / "study"

  def run(*arguments):
    done = subprocess.run(
      [
        *(sys.executable, "-m", "research.study", f"--config={config}"),
        *("--questions=3", "--budgets=0,1", "--seeds=1", f"--output={root}"),
        *arguments,
      ],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=600,
      check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout

  run("--rows=anysearch,only_scaffold")
  # Of a known training, only the policy is used again.
  (root / "outcomes.jsonl").unlink()
  said = run("--rows=kept_scaffold")
  assert "not run again: train anysearch 42" in said
  assert "not run again: evaluate anysearch 42" in said
  report = json.loads((root / "report.json").read_text())
  assert [row["label"] for row in report["rows"]] == [
    "AnySearch",
    "AnySearch + scaffold",
    "Only scaffold",
  ]
  found = outcomes.read(root / "outcomes.jsonl")
  assert sorted(one.key for one in found) == [
    ("anysearch", 42),
    ("kept_scaffold", 42),
    ("only_scaffold", 42),
  ]
  assert all(one.right.shape == (2, 3) for one in found)
  assert "| AnySearch + scaffold |" in (root / "evidence.md").read_text()
  # Elsewhere, they are known and nothing is left to do.
  elsewhere = tmp_path / "elsewhere"
  known = f"--outcomes={root / 'outcomes.jsonl'}"
  asked = "--rows=anysearch,only_scaffold,kept_scaffold"
  said = run(asked, known, f"--output={elsewhere}")
  assert "train" not in said
  for name in ("outcomes.jsonl", "evidence.md"):
    assert (elsewhere / name).read_text() == (root / name).read_text()
