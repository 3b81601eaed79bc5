"""The files and the cheap commands of docs/data.md."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shlex

import pytest
import scripted
from commands import printed, run

from anysearch_jax.data import prepared
from anysearch_jax.launch import (
  build_index,
  evaluate,
  flags,
  init,
  prepare_data,
  train,
)
from anysearch_jax.methods import systems
from anysearch_jax.retrieval.index import opening

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "data.md"
COMMANDS = {"prepare_data": prepare_data, "build_index": build_index}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
  """The folder in which the page's files and two of its commands were."""
  folder = tmp_path_factory.mktemp("own_data")
  text = PAGE.read_text()
  for name, rows in re.findall(
    r'```json title="(\S+)"\n(.*?)```', text, re.DOTALL
  ):
    (folder / name).write_text(rows)
  lines = re.sub(r"\\\n", " ", text)
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(folder)
    for name, command in COMMANDS.items():
      # The first of the page.
      line, *_ = re.findall(
        rf"^    python -m launch\.{name} (.*)$", lines, re.M
      )
      assert run(command, *shlex.split(line)) == ""
    yield folder


def test_page_has_the_questions_that_its_configuration_asks(played):
  config = flags.load_config("configs/own_data.py")
  systems.validate(config)
  questions = prepared.Prepared(played / config.data.path)
  assert len(questions.rows(config.data.split)) == 4
  assert len(questions.rows("mine_test")) == 2


def test_index_of_the_page_finds_what_its_questions_need(played):
  config = flags.load_config("configs/own_data.py")
  index = opening.open_index(played / config.retrieval.index)
  (found,) = index.search(["Who founded the Orlan bakery?"], 3)
  assert found[0].title == "Orlan bakery"
  assert "Mira Tasse" in found[0].text


def test_a_dry_run_counts_the_passes_over_the_questions(played):
  def said(steps):
    ended, text = printed(
      *(train, "--dry_run", "--config=configs/own_data.py"),
      f"--config.curriculum.total_steps={steps}",
      *("--config.curriculum.phase1_steps=0", "--config.questions=4"),
      *("--config.curriculum.steps_per_rollout=1", "--config.group=2"),
    )
    assert ended == 0
    return re.search("passes over the questions: (.*)", text)[1]

  assert said(10) == "10.0 (40 of 4 questions)"
  assert said(11).startswith("11.0 (44 of 4 questions); after 10 a policy may")


def make_policy(config, source):
  """Makes a policy that searches once, for --scripted."""
  del config, source
  script = [scripted.search("lease"), scripted.answer("2027")]
  return scripted.Engine(lambda r: script[min(r.turn, 1)]), scripted.CODEC


def test_commands_that_init_prints_evaluate_own_documents_and_questions(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "my notes").mkdir()
  (tmp_path / "my notes" / "a.md").write_text("The lease ends in 2027.")
  mine = tmp_path / "mine.csv"
  rows = [f"When does lease {n} end?,2027" for n in range(12)]
  mine.write_text("\n".join(["question,answer", *rows]))
  flags_of_init = ("--documents=my notes", "--questions=mine.csv")
  ended, said = printed(init, *flags_of_init)
  assert not ended, ended
  lines = re.findall(
    r"^  anysearch (\w+) (.+)$", said.replace("\\\n", ""), re.M
  )
  modules = {**COMMANDS, "train": train}
  names = [name for name, _ in lines]
  assert names[:4] == ["build_index", "prepare_data", "train", "train"]
  for name, line in lines[:3]:
    assert run(modules[name], *shlex.split(line)) == "", line
  ended, said = printed(
    *(evaluate, "--config=my_search.py", f"--scripted={__name__}:make_policy"),
    "--output=evaluations/mine",
  )
  assert not ended, ended
  cells = re.findall(r"budget (\d): (\d+) of (\d+) right .* (\d) search", said)
  test_rows = prepared.Prepared("data/mine").rows("mine_test")
  assert [budget for budget, _, _, _ in cells] == ["0", "1", "2"]
  assert {(right, count) for _, right, count, _ in cells} == {
    (str(len(test_rows)),) * 2
  }
  episodes = [
    json.loads(line) for line in open("evaluations/mine/episodes.jsonl")
  ]
  assert {row["searches"] for row in episodes if row["budget"]} == {1}


def test_init_refuses_what_is_missing(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert "found nothing at nowhere" in run(init, "--documents=nowhere")
  assert "nowhere.csv: found no file" in run(init, "--questions=nowhere.csv")
  assert not (tmp_path / "my_search.py").exists()


def test_a_configuration_of_ones_own_is_written_and_trains(
  played, tmp_path, monkeypatch
):
  ended, said = printed(init, str(tmp_path / "mine"))
  file = tmp_path / "mine" / "my_search.py"
  assert not ended and f"anysearch train --config={file} --dry_run" in said
  kept = run(init, str(tmp_path / "mine"))
  assert f"{file}: found a file, which is kept." in kept
  monkeypatch.chdir(played)
  ended, said = printed(train, f"--config={file}", "--dry_run")
  assert not ended, ended
  assert '"name": "my_search"' in said and "rollouts: 8" in said
  written, shipped = map(
    flags.load_config, (str(file), str(ROOT / "configs" / "own_data.py"))
  )
  assert written == dataclasses.replace(shipped, name="my_search")
  assert file.read_text().count("  # ") >= 8
