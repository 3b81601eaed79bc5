"""The study of a real language model: its split, its commands and its rows."""

from __future__ import annotations

import pathlib

import pytest

import anysearch_jax as aj
from research import claims, small_policies, small_walk, study

PRESET = small_policies.PRESETS[0]


def test_every_third_question_over_all_files_is_held_out(tmp_path):
  files = []
  for name, lines in (("nq_dev.jsonl", "abcd"), ("popqa_test.jsonl", "efgh")):
    path = tmp_path / name
    path.write_text("".join(f"{line}\n" for line in lines))
    files.append(path)
  small_walk.split(files, tmp_path / "split")
  parts = {
    path.name: path.read_text().split()
    for path in (tmp_path / "split").iterdir()
  }
  assert parts == {
    "nq_train.jsonl": ["a", "b", "d"],
    "nq_test.jsonl": ["c"],
    "popqa_train.jsonl": ["e", "g", "h"],
    "popqa_test.jsonl": ["f"],
  }


def test_each_command_waits_for_the_one_before():
  jobs = small_walk.jobs("mine.py", passages="corpus.jsonl")
  names = [job.name for job in jobs]
  assert names == ["prepare_data", "build_index", "demonstrate", "sft"]
  assert [job.after for job in jobs] == [(), *((name,) for name in names[:-1])]


@pytest.mark.parametrize("preset", small_policies.PRESETS)
def test_the_trainings_begin_with_the_supervised_policy(preset):
  base = small_policies.get_config(preset)
  aj.validate(base)
  assert pathlib.Path(base.policy) == small_walk.ROOT / "sft" / "policy"
  untrained = small_policies.get_config(f"{preset}-untrained").policy
  is_packaged = untrained == "smollm2"
  assert is_packaged == preset.startswith("smollm2")
  rows = small_policies.rows(base)
  plan = study.Plan(
    pathlib.Path("runs"),
    config=f"research/small_policies.py:{preset}",
    untrained=base.policy,
    evaluation=(),
    threads=1,
  )
  commands = {job.name: job.command for job in plan.jobs(rows, [42])}
  assert f"--policy={untrained}" in commands["evaluate plain 42"]
  assert f"--policy={base.policy}" in commands["evaluate sft 42"]
  trained = [name for name in commands if name.startswith("train")]
  assert len(trained) == 3


def test_claims_are_about_rows_that_there_are():
  rows = small_policies.rows(small_policies.get_config(PRESET))
  names = {row.name for row in rows}
  for family in small_policies.CLAIMS.values():
    for claim in family:
      assert isinstance(claim, claims.Claim)
      assert {claim.more, claim.less} <= names


def test_a_folder_without_questions_is_refused(tmp_path, monkeypatch):
  import commands

  monkeypatch.chdir(tmp_path)
  said = commands.run(
    small_walk, f"--questions={tmp_path}", "--passages=corpus.jsonl"
  )
  assert "found no .jsonl file" in said
