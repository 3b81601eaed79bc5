"""Commands with --openai: a model behind OpenAI's text completions."""

from __future__ import annotations

import json

import chat_endpoint
import commands
import fake_openai
import pytest

from anysearch_jax.evaluation import columns
from anysearch_jax.host import http_server
from anysearch_jax.launch import (
  ask,
  evaluate,
  policies,
  report,
  serve,
)
from anysearch_jax.launch import documents as documents_lib
from anysearch_jax.launch import flags as launch_flags

QUESTION = "gebos employer founder ?"
CONFIG = "--config=configs/quickstart.py"


def said(body):
  """Searches once and then answers, without the stop texts."""
  if "messages" in body:  # It has no such route.
    return 404, {"error": {"message": "no such model"}}
  found = "<information>" in body["prompt"].rpartition(QUESTION)[2]
  if body["model"] != "mine":
    return 404, {"error": {"message": "no such model"}}
  text = "<answer> mupun" if found else "<search> gebos employer"
  return 200, fake_openai.completion(text)


def run(command, *arguments):
  ended, printed = commands.printed(command, CONFIG, "--cache=", *arguments)
  assert ended == 0, ended
  return printed.splitlines()


def flags_of(server, model="mine", calls="completions"):
  return (
    f"--openai={server.url}",
    f"--openai_model={model}",
    f"--openai_calls={calls}",
  )


def test_one_question_to_a_model_elsewhere():
  with fake_openai.served(said) as server:
    lines = run(ask, *flags_of(server), "--budget=1", QUESTION)
  assert "search 1: gebos employer" in lines and "answer: mupun" in lines


def test_a_service_of_a_model_elsewhere_names_no_second_address(monkeypatch):
  named = []
  monkeypatch.setattr(
    http_server, "serve", lambda *_, **options: named.append(options["title"])
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
    ("--openai=http://u:word@host/v1", "not shown"),
    ("--openai=ftp://host/v1", "expected an address such as"),
    ("--openai_calls=tools", "whose prompt asks for tags"),
    (
      "--openai_calls=tags --hf=configs/graded_world_policy",
      "a tokenizer for completions only",
    ),
    ("--sglang=http://h", "--openai and --sglang"),
    ("--sglang=http://h --vllm=http://h", "--sglang and --vllm: expected"),
    ("--hf=nowhere", "--hf=nowhere: found no folder"),
    ("--openai_key_variable=sk-word", "expected the name of an environment"),
  ],
)
def test_bad_flags_are_one_sentence(flags, expected):
  model = ("--openai=http://host/v1", "--openai_model=m")
  said = commands.run(ask, CONFIG, *model, *flags.split(), QUESTION)
  assert expected in said and "word" not in said


def test_a_key_that_http_does_not_send_is_named(monkeypatch):
  monkeypatch.setenv("OPENAI_API_KEY", "k")
  with chat_endpoint.served(key="k") as server:
    said = commands.run(ask, CONFIG, f"--openai={server.url}", QUESTION)
  assert "--openai_key_variable=OPENAI_API_KEY" in said


def test_unknown_model_is_one_sentence_before_any_question():
  with fake_openai.served(said) as server:
    flags = flags_of(server, "other", "auto")
    found = commands.run(ask, CONFIG, *flags, QUESTION)
    assert {path for path, *_ in server.asked} == {
      "/v1/chat/completions",
      "/v1/completions",
    }
  assert "no such model" in found


@pytest.fixture
def documents(tmp_path):
  """Flags of a folder with one document, and questions about it."""
  (tmp_path / "notes").mkdir()
  (tmp_path / "notes/lease.md").write_text("# Lease\n\nIt ends in June 2027.\n")
  (tmp_path / "mine.csv").write_text(
    'question,answer\n"When does the lease end?",June 2027\n'
    '"Who signed it?",Ana\n'
  )
  return f"--documents={tmp_path / 'notes'}", f"--index={tmp_path / 'index'}"


def test_own_questions_are_evaluated_over_budgets(documents, tmp_path):
  arguments = (
    *(*documents, "--cache=", "--budgets=0,1", "--prices=input=2,output=10"),
    *(f"--questions={tmp_path / 'mine.csv'}", f"--output={tmp_path / 'run'}"),
  )
  with chat_endpoint.served("tools", answer="June 2027 [1]") as server:
    ended, said = commands.printed(
      evaluate, f"--openai={server.url}", *arguments
    )
    assert ended == 0, ended
    again, _ = commands.printed(
      evaluate, f"--openai={server.url}", "--openai_calls=tags", *arguments
    )
    asked = len(server.asked)
  assert (
    "mine budget 1: 1 of 2 right (0.50 [0.09, 0.91]), F1 0.50, cover EM 0.50, "
    "2 searches"
  ) in said
  assert "tokens read and" in said and "$0.0" in said
  assert 'episode.prompts "documents_tools" -> "documents_tags"' in str(again)
  noted = json.loads((tmp_path / "run/provenance.json").read_text())
  assert noted["policy"]["calls"] == "tools"
  assert noted["policy"]["openai"] == f"scripted@{server.url}"
  assert asked == 1 + 2 + 4  # The probe, and the turns of budget 0 and 1.
  made = columns.read(tmp_path / "run/episodes.jsonl")
  assert sorted(made.searches) == [0, 0, 1, 1]
  assert sorted(made.cover_em) == [0, 0, 1, 1]
  ended, said = commands.printed(report, str(tmp_path / "run"))
  assert ended == 0
  measures = [line.split("run")[0].strip() for line in said.splitlines()[1:6]]
  assert measures == ["EM", "F1", "cover EM", "searches", "TP"]


def read_flags(*arguments):
  with commands.defined(ask):
    launch_flags._parse_argv(["command", *arguments])
    return policies.read_flags(documents_lib.read_config())


@pytest.mark.parametrize(
  ("behaviour", "route", "sentence"),
  [
    ("tools", "/chat/completions", "a tool that it calls (it called the tool)"),
    ("tags", "/chat/completions", "in its messages (it did not call the tool)"),
    ("tags", "/completions", "one text (the server has no /chat/completions)"),
  ],
)
def test_one_question_decides_how_a_model_is_asked(
  behaviour, route, sentence, documents, capsys
):
  with chat_endpoint.served(behaviour, routes=[f"/v1{route}"]) as server:
    config, chosen = read_flags(*documents, f"--openai={server.url}")
  assert sentence in capsys.readouterr().err
  tools = behaviour == "tools"
  assert config.episode.prompts == (
    "documents_tools" if tools else "documents_tags"
  )
  assert config.policy == chosen.name == f"scripted@{server.url}"


@pytest.mark.parametrize(
  ("scheme", "key"), [("http", ""), ("https", "Bearer k")]
)
def test_openais_key_leaves_encrypted_only(scheme, key, monkeypatch):
  monkeypatch.setenv("OPENAI_API_KEY", "k")
  url = f"--openai={scheme}://host/v1"
  _, chosen = read_flags(CONFIG, url, "--openai_model=m", "--openai_calls=tags")
  headers = chosen.endpoint.engine._endpoint._caller._client.headers
  assert headers.get("Authorization", "") == key


def test_several_models_are_listed(documents):
  with chat_endpoint.served(models=[f"m{i}" for i in range(12)]) as server:
    found = commands.run(ask, *documents, f"--openai={server.url}", "When?")
  assert "12 models" in found and "m1, m10" in found and found.endswith("...")


SMALL = {"meta": {"n_params": 494_000_000}}
PROPS = {"total_slots": 2, "default_generation_settings": {"n_ctx": 2000}}


def ask_documents(tmp_path, server, *arguments, command=ask):
  """Asks about a note; returns what was printed."""
  note = tmp_path / "notes" / "lease.md"
  note.parent.mkdir(exist_ok=True)
  note.write_text("# Lease\n\nThe lease of flat 7 ends in June 2027.\n")
  ended, printed = commands.printed(
    command,
    "--cache=",
    f"--documents={note.parent}",
    f"--index={tmp_path / 'index'}",
    f"--openai={server.url}",
    *arguments,
  )
  assert ended == 0, ended
  return printed


@pytest.mark.parametrize(
  ("facts", "flags", "is_short"),
  [
    (SMALL, (), True),
    (SMALL, ("--nosearch_first",), False),
    (SMALL, ("--openai_calls=tools",), False),
    ({"ollama": "494.03M"}, (), True),
    ({"ollama": "7.6B"}, (), False),
    ({"ollama": "large"}, (), False),
    ({"meta": {"n_params": 7 * 10**9}}, (), False),
    ({"meta": None}, (), False),
    ({}, (), False),
    ({}, ("--search_first",), True),
  ],
)
def test_small_models_are_asked_in_short_prompts(
  tmp_path, facts, flags, is_short
):
  with chat_endpoint.served("tools", facts=facts) as server:
    if size := facts.get("ollama"):
      pulled = {"name": "scripted", "details": {"parameter_size": size}}
      server.tell("/api/tags", {"models": [pulled]})
    ask_documents(
      tmp_path, server, *flags, "--budget=1", "When does the lease end?"
    )
  prompt = server.asked[-1]["messages"][0]["content"]
  assert prompt.startswith("[1] Lease") == is_short


def test_a_server_says_how_much_it_reads_and_plays_at_a_time(tmp_path):
  questions = tmp_path / "questions.jsonl"
  row = {"question": "When does the lease end?", "answer": "June 2027"}
  rows = [json.dumps({**row, "id": str(n)}) for n in range(6)]
  questions.write_text("\n".join(rows))
  with chat_endpoint.served("tools", props=PROPS, plays=2) as server:
    output = tmp_path / "run"
    ask_documents(
      tmp_path,
      server,
      f"--questions={questions}",
      "--budgets=1",
      f"--output={output}",
      command=evaluate,
    )
  config = json.loads((output / "config.json").read_text())
  assert config["episode"]["max_context"] == 1800
  assert config["episode"]["max_generated"] == 900


def test_plain_retrieval_is_a_row_of_evaluate(tmp_path):
  questions = tmp_path / "questions.jsonl"
  row = {"question": "When does the lease end?", "answer": "In June 2027"}
  questions.write_text(json.dumps(row))
  output = tmp_path / "run"
  with chat_endpoint.served("tools") as server:
    ask_documents(
      tmp_path,
      server,
      "--scripted=rag",
      f"--questions={questions}",
      "--budgets=1,3",
      f"--output={output}",
      command=evaluate,
    )
  rows = [
    json.loads(line)
    for line in (output / "episodes.jsonl").read_text().splitlines()
  ]
  assert [row["searches"] for row in rows] == [1, 1]
  assert all(
    body["messages"][0]["content"].startswith("[1] Lease")
    for body in server.asked
    if body["max_tokens"] > 1  # Not the probe.
  )


def test_plain_retrieval_needs_passages_of_real_text():
  said = commands.run(ask, CONFIG, "--scripted=rag", QUESTION)
  assert "expected --documents" in said
