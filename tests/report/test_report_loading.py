"""The folders that a report reads: runs, evaluations, seeds, groups."""

from __future__ import annotations

import json
import pathlib
import re

import commands
import numpy as np
import pytest
import study
from absl import flags
from absl.testing import flagsaver

from anysearch_jax import budgets
from anysearch_jax.launch import report as command
from anysearch_jax.report import loading

_POLICY = pathlib.Path("configs/graded_world_policy")


def _run(folder, *names, label="A", seed=42):
  """Writes a run with evaluations of these names."""
  study.save_training(study.training(label, rollouts=12), folder)
  for name in names:
    row = study.row(label, questions=4, budgets=(0, 2), seeds=(seed,))
    study.save_row(row, folder / "evaluation" / name)
  return folder


def test_a_row_is_named_by_its_run_and_evaluation(tmp_path):
  run = _run(tmp_path / "any-42", "plain", "scaffold")
  found = loading.sources(str(run))
  assert [s.label for s in found] == ["any-42", "any-42, scaffold"]
  assert [s.run for s in found] == [run, run]
  folder = run / "evaluation" / "scaffold"
  assert found[1].folders == (folder,)
  assert [s.label for s in loading.sources(str(folder))] == ["any-42, scaffold"]
  assert [s.label for s in loading.sources(f"B={folder}")] == ["B"]
  study.save_row(study.row("x", questions=1, budgets=(1,)), tmp_path / "mine")
  (outside,) = loading.sources(str(tmp_path / "mine"))
  assert (outside.label, outside.run) == ("mine", None)


def test_runs_of_several_seeds_make_one_row_of_each_evaluation(tmp_path):
  runs = [
    _run(tmp_path / f"any-{seed}", "plain", "scaffold", seed=seed)
    for seed in (42, 43)
  ]
  plain, scaffold = loading.sources(f"A = b={'+'.join(map(str, runs))}")
  assert (plain.label, scaffold.label) == ("A = b", "A = b, scaffold")
  row = loading.load_row(plain.label, *plain.folders)
  assert len(row.columns) == 2 * 2 * 4
  assert set(row.columns.seed) == {42, 43}


def _policy(run, digest):
  """Notes the policy of a run's evaluation."""
  noted = {"policy": {"folder": str(run), "sha256": digest}}
  path = run / "evaluation" / "plain" / "provenance.json"
  path.write_text(json.dumps(noted), "utf-8")


def test_trainings_are_told_by_their_policies(tmp_path):
  runs = [_run(tmp_path / name, "plain") for name in "abc"]
  (source,) = loading.sources("A=" + "+".join(map(str, runs)))
  row = loading.load_row(source.label, *source.folders)
  # Without provenance, a run's folder is a training.
  assert len(row.columns.runs) == 3
  assert np.bincount(row.columns.run).tolist() == [8, 8, 8]
  for run, digest in zip(runs, ("x", "y", "x"), strict=True):
    _policy(run, digest)
  with pytest.raises(ValueError, match="Row 'A': .* occurs twice .* training"):
    loading.load_row(source.label, *source.folders)
  row = loading.load_row(source.label, *source.folders[:2])
  assert len(row.columns.runs) == 2


def _played(output, **policy):
  """Writes an evaluation, outside of its run, of this policy."""
  study.save_row(study.row("A", questions=4, budgets=(0, 2)), output)
  text = json.dumps({"policy": policy})
  (output / "provenance.json").write_text(text, "utf-8")
  return output


def test_two_checkpoints_of_a_training_are_no_two_trainings(tmp_path):
  run = str(_run(tmp_path / "run"))
  early, late, again, other = (
    _played(tmp_path / name, checkpoint=at, rollout=rollout, sha256=digest)
    for name, at, rollout, digest in (
      ("early", run, 40, "x"),
      ("late", run, 80, "y"),
      # A run of another machine, which has the same path there.
      ("again", run, 80, "z"),
      ("other", f"{run}-43", 80, "u"),
    )
  )
  final = _played(tmp_path / "final", folder=f"{run}/policy", sha256="v")
  for pair, named in (
    ((early, late), f"checkpoint 40 and checkpoint 80 of {run};"),
    ((late, other, final), f"checkpoint 80 and policy of {run};"),
  ):
    with pytest.raises(ValueError, match=f"Row 'A': {pair[0]} .* {named}"):
      loading.load_row("A", *pair)
  for pair in ((late, other), (late, again), (final, other)):
    assert len(loading.load_row("A", *pair).columns.runs) == 2


def test_row_of_which_one_run_is_not_evaluated_is_rejected(tmp_path):
  runs = [_run(tmp_path / "a", "plain"), _run(tmp_path / "b")]
  with pytest.raises(ValueError, match=f"{runs[1]}: .*anysearch evaluate"):
    loading.sources(f"A={runs[0]}+{runs[1]}")


def test_run_without_evaluation_is_reported_by_its_training(tmp_path, capsys):
  run = _run(tmp_path / "run")
  (run / "checkpoints" / "40").mkdir(parents=True)
  assert loading.sources(str(run)) == [loading.Source("run", (), run)]
  _command(str(run))
  assert f"--checkpoint={run} --output={run}/" in capsys.readouterr().out
  data = json.loads((run / "report" / "report.json").read_text("utf-8"))
  assert data["rows"] == data["budgets"] == []
  assert (data["system"], data["trained_budget"]) == ("run", 5)
  assert data["tables"]["training"]["lines"][0]["cells"][0]["value"] == 12
  page = (run / "report" / "report.html").read_text("utf-8")
  assert 'id="training"' in page
  assert 'id="results"' not in page and 'id="browser"' not in page
  assert "reward term: exact match" in page
  assert "fingerprint gap: a:1" in page
  assert "run was not evaluated yet" in page
  assert (run / "report" / "training.csv").is_file()
  for link in re.findall(r'<a href="#(\w+)"', page):
    assert f'<section id="{link}">' in page


def test_prices_are_those_of_all_evaluations_or_unknown(tmp_path):
  folders = [_played(tmp_path / name) for name in "abcd"]
  for folder, price in zip(folders, (5.0, 5.0, 1.0), strict=False):
    stored = {"evaluation": {"search_price": price, "output_price": 0.25}}
    (folder / "config.json").write_text(json.dumps(stored))
  a, b, c, unknown = folders
  prices = command._stored_prices([a, b, unknown])
  assert prices == budgets.Prices(search=5.0, output=0.25)
  assert (
    command._stored_prices([a, c]) is command._stored_prices([unknown]) is None
  )


def test_the_tokenizer_is_that_of_the_policy_that_played(tmp_path):
  folder = tmp_path / "run" / "evaluation" / "plain"
  folder.mkdir(parents=True)
  assert loading.decoder(folder) is None
  (folder / "config.json").write_text(json.dumps({"policy": "gone/policy"}))
  assert loading.decoder(folder) is None
  (folder / "config.json").write_text(json.dumps({"policy": str(_POLICY)}))
  decode = loading.decoder(folder)
  # The world's words are separated by spaces; control tokens are included.
  assert decode([7, 56]) == "<think> need"
  # A run that moved has its tokenizer inside.
  folder = tmp_path / "moved" / "evaluation" / "plain"
  folder.mkdir(parents=True)
  (tmp_path / "moved" / "policy").mkdir()
  (tmp_path / "moved" / "policy" / "tokenizer.json").write_bytes(
    (_POLICY / "tokenizer.json").read_bytes()
  )
  assert loading.decoder(folder)([7]) == "<think>"


def test_training_groups_come_with_reward_and_advantage(tmp_path):
  run = tmp_path / "run"
  (run / "trajectories").mkdir(parents=True)
  worth = {"answer": "y", "em": 0, "format": None, "reward": 0.3}
  group = {
    "question_id": "q",
    "budget": 2,
    "trajectories": [
      {"searches": 1, "failed": False, **worth, "advantage": -1.0},
      {"searches": 0, "failed": True},
    ],
  }
  (run / "trajectories" / "rollout-00007.jsonl").write_text(
    json.dumps(group) + "\n"
  )
  sample = loading.recorded_rollouts("A", run)
  assert sample.label == "A, training"
  (episode,) = sample.episodes
  assert episode == {
    "question_id": "q",
    "budget": 2,
    "searches": 1,
    "failed": False,
    **worth,
    "advantage": -1.0,
    "seed": 7,
    "training": True,
  }


@pytest.mark.parametrize(
  ("item", "label", "folders"),
  [
    ("A=lr=1+b=2", "A", ["lr=1+b=2"]),  # One folder with this name.
    ("A = b=lr=1+b=2", "A = b", ["lr=1+b=2"]),
    ("A=lr=1+b", "A", ["lr=1", "b"]),  # Two folders.
    ("A + s=a+b", "A + s", ["a+b"]),
    ("a+b=b", "a+b", ["b"]),
    ("γ=0=lr=1", "γ=0", ["lr=1"]),
  ],
)
def test_folder_names_may_contain_separators(
  tmp_path, monkeypatch, item, label, folders
):
  for name in ("lr=1+b=2", "lr=1", "a+b", "b", "1"):
    (tmp_path / name).mkdir()
  monkeypatch.chdir(tmp_path)
  assert loading.parse_item(item) == (label, tuple(map(pathlib.Path, folders)))


def test_unwritable_report_ends_with_a_message(tmp_path):
  run = _run(tmp_path / "a", "plain")
  (run / "report").write_text("a file where the folder would be")
  with pytest.raises(OSError, match="could not be written .* --output"):
    _command(str(run))


def _command(*arguments, **given):
  flags.FLAGS.mark_as_parsed()
  with commands.defined(command), flagsaver.flagsaver(**given):
    command.main(["report", *arguments])


def test_the_command_takes_run_folders_and_writes_into_the_first(
  tmp_path, monkeypatch, capsys
):
  here = tmp_path / "here"
  here.mkdir()
  monkeypatch.chdir(here)
  runs = [_run(tmp_path / name, "plain", label=name) for name in "ab"]
  _command(str(runs[0]), f"γ=0={runs[1]}")
  assert list(here.iterdir()) == []
  assert not (runs[1] / "report").exists()
  page = runs[0] / "report" / "report.html"
  assert page.is_file()
  data = json.loads(page.with_name("report.json").read_text("utf-8"))
  assert [row["label"] for row in data["rows"]] == ["a", "γ=0"]
  assert data["training"] == ["a", "γ=0"]
  printed = capsys.readouterr().out.splitlines()
  assert printed[0].split()[:5] == ["measure", "row", "B", "=", "0"]
  assert printed[-5:] == [*data["summary"], "", str(page)]


@pytest.mark.parametrize(
  ("items", "sentence"),
  [
    (["A=nowhere"], "A=nowhere: found no such folder; expected folder or lab"),
    (["A=."], r"\.: found neither episodes.jsonl nor evaluation"),
    ([], "Found no row; name the folder"),
  ],
)
def test_the_command_says_what_it_expected(items, sentence):
  with pytest.raises(ValueError, match=sentence):
    _command(*items)


@pytest.mark.parametrize(
  ("given", "sentence"),
  [
    ({"prices": ["a=1"]}, "--prices: found 'a=', expected one of input="),
    ({"prices": ["search=-1"]}, "search_price: found -1.0, expected at least"),
    ({"tables": ["tool"]}, "--tables: found 'tool', expected label=ablation"),
  ],
)
def test_invalid_flags_have_messages(tmp_path, given, sentence):
  run = _run(tmp_path / "a", "plain")
  flags.FLAGS.mark_as_parsed()
  with (
    commands.defined(command),
    flagsaver.flagsaver(output=str(tmp_path / "r.html"), **given),
    pytest.raises(ValueError, match=sentence),
  ):
    command.main(["report", str(run)])
