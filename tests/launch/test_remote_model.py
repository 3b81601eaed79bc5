"""Commands with --openai: a model behind OpenAI's text completions."""

from __future__ import annotations

import json

import commands
import fake_openai
import pytest

from launch import ask, evaluate, http_server, serve

QUESTION = "gebos employer founder ?"
CONFIG = "--config=configs/quickstart.py"


def said(body):
  """Searches once and then answers, without the stop texts."""
  found = "<information>" in body["prompt"].rpartition(QUESTION)[2]
  if body["model"] != "mine":
    return 404, {"error": {"message": "no such model"}}
  text = "<answer> mupun" if found else "<search> gebos employer"
  return 200, fake_openai.completion(text)


def run(command, *arguments):
  ended, printed = commands.printed(command, CONFIG, "--cache=", *arguments)
  assert ended == 0, ended
  return printed.splitlines()


def flags_of(server, model="mine"):
  return f"--openai={server.url}", f"--openai_model={model}"


def test_one_question_to_a_model_elsewhere():
  with fake_openai.served(said) as server:
    lines = run(ask, *flags_of(server), "--budget=1", QUESTION)
  assert "search 1: gebos employer" in lines and "answer: mupun" in lines


def test_a_service_of_a_model_elsewhere_names_no_second_address(monkeypatch):
  named = []
  monkeypatch.setattr(
    http_server, "serve", lambda *_, **options: named.append(options["named"])
  )
  with fake_openai.served(said) as server:
    run(serve, *flags_of(server), "--port=0")
  assert named == ["quickstart (mine)"]


def test_evaluation_names_the_model_and_resumes(tmp_path):
  arguments = (
    *("--budgets=0,1", "--seeds=1", "--config.evaluation.questions=2"),
    f"--output={tmp_path / 'run'}",
  )
  with fake_openai.served(said) as server:
    run(evaluate, *flags_of(server), *arguments)
    asked = len(server.asked)
    run(evaluate, *flags_of(server), *arguments)
    assert len(server.asked) == asked  # It was finished.
    url = server.url
  read = json.loads((tmp_path / "run/provenance.json").read_text())
  assert read["policy"] == {"openai": f"mine@{url}", "tokenizer": ""}
  rows = [
    json.loads(line)
    for line in (tmp_path / "run/episodes.jsonl").read_text().splitlines()
  ]
  assert [row["budget"] for row in rows].count(1) == 2
  assert all(row["searches"] <= row["budget"] for row in rows)


@pytest.mark.parametrize(
  ("flags", "expected"),
  [
    (["--openai=http://u:word@host/v1", "--openai_model=m"], "not shown"),
    (["--openai=http://host/v1"], "--openai_model=''"),
    (
      ["--openai=http://host/v1", "--openai_model=m", "--sglang=http://h"],
      "--openai and --sglang",
    ),
    (
      ["--openai=http://host/v1", "--openai_model=m", "--hf=nowhere"],
      "nowhere: no tokenizer.json",
    ),
    (
      [
        *("--openai=http://host/v1", "--openai_model=m"),
        "--openai_key_variable=sk-word",
      ],
      "expected the name of an environment variable",
    ),
  ],
)
def test_bad_flags_are_one_sentence(flags, expected):
  said = commands.run(ask, CONFIG, *flags, QUESTION)
  assert expected in said and "word" not in said


def test_unknown_model_is_one_sentence_before_any_question():
  with fake_openai.served(said) as server:
    found = commands.run(ask, CONFIG, *flags_of(server, "other"), QUESTION)
    assert len(server.asked) == 1
  assert "no such model" in found
