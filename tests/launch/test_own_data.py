"""The files and the cheap commands of docs/data.md."""

from __future__ import annotations

import pathlib
import re
import shlex

import pytest
from commands import printed, run

from anysearch_jax.data import prepared
from anysearch_jax.training import validation
from launch import build_index, flags, prepare_data, train
from retrieval.index import opening

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "data.md"
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
  validation.validate(config)
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
