"""The doctor's checks of a policy's texts, retrievers and servers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import shutil

import doctored
import fake_retriever
import fake_sglang
import httpx2
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.data import prepared, preparing
from anysearch_jax.environment import protocol
from anysearch_jax.policy import tokenizer as tokenizer_lib
from launch import doctor, policy_checks, run_checks
from retrieval import recording

# The policy's text side.


def codec_of(tmp_path, change):
  """Returns the shipped policy's tokenizer with a changed tokenizer.json."""
  shutil.copytree(doctored.CONFIG.policy, tmp_path / "policy")
  path = tmp_path / "policy" / "tokenizer.json"
  values = json.loads(path.read_text())
  change(values)
  path.write_text(json.dumps(values))
  return tokenizer_lib.Tokenizer.from_folder(tmp_path / "policy")


def test_a_tag_that_is_a_special_token_is_lost(tmp_path):
  def change(values):
    first = max(values["model"]["vocab"].values()) + 1
    added = max([first - 1, *(t["id"] for t in values["added_tokens"])]) + 1
    entry = values["added_tokens"][0] | {
      "id": added,
      "content": "</answer>",
      "special": True,
    }
    values["added_tokens"].append(entry)

  codec = codec_of(tmp_path, change)
  found = list(policy_checks.texts(codec, doctored.CONFIG))
  problems = doctored.said(found, doctor.PROBLEM)
  assert any("loses </answer>" in each for each in problems), problems


def test_the_three_families_carry_the_protocol(real_tokenizer):
  found = list(
    policy_checks.texts(real_tokenizer, config_lib.ExperimentConfig())
  )
  assert doctored.levels(found) <= {doctor.OK, doctor.WARNING}, found
  assert sum("tags survive" in f.found for f in found) == 1


def test_a_template_whose_end_ends_no_turn_is_a_warning(real_tokenizer):
  silent = tokenizer_lib.Tokenizer(real_tokenizer.hf)
  silent.end_of_turn_ids = frozenset({0})
  found = list(policy_checks.texts(silent, config_lib.ExperimentConfig()))
  assert any(
    "which ends no turn" in w for w in doctored.said(found, doctor.WARNING)
  )
  silent.end_of_turn_ids = frozenset()
  found = list(policy_checks.texts(silent, config_lib.ExperimentConfig()))
  assert any(
    "no token ends a turn" in p for p in doctored.said(found, doctor.PROBLEM)
  )


def test_stop_text_that_halts_no_row_is_found(real_tokenizer, monkeypatch):
  monkeypatch.setattr(
    real_tokenizer, "token_texts", lambda: ["?"] * real_tokenizer.vocab_size
  )
  found = list(
    policy_checks.texts(real_tokenizer, config_lib.ExperimentConfig())
  )
  assert any(
    protocol.STOPS[0] in p and "not found" in p
    for p in doctored.said(found, doctor.PROBLEM)
  )


def test_a_policy_without_all_of_its_weights_is_refused(tmp_path):
  shutil.copytree(doctored.CONFIG.policy, tmp_path / "policy")
  (weights,) = (tmp_path / "policy").glob("*.safetensors")
  weights.write_bytes(weights.read_bytes()[:-100])
  config = dataclasses.replace(doctored.CONFIG, policy=str(tmp_path / "policy"))
  with pytest.raises(ValueError, match="not a whole safetensors file"):
    policy_checks.folder(config.policy)


# Who answers.


@pytest.fixture
def questions(tmp_path):
  """Returns a configuration with ten questions without passages."""
  entries = [
    preparing.Entry(f"nq_dev/{i}", f"who {i}", ["x"], "nq", "dev", None, "{}")
    for i in range(10)
  ]
  parts = {"nq_dev": preparing.Part(entries)}
  prepared.write(tmp_path / "qa", parts, entries[:1], {})
  path = str(tmp_path / "qa")
  return doctored.with_(data={"source": "prepared", "path": path})


async def _answers(writer):
  """Answers any request like Search-R1's server."""
  hit = {"document": {"id": "1", "contents": "t\nx"}, "score": 1.0}
  body = json.dumps({"result": [[hit]], "identity": "index"}).encode()
  writer.write(
    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
  )
  await writer.drain()


async def _finds_nothing(writer):
  body = b'{"result": [[]]}'
  writer.write(
    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
  )
  await writer.drain()


@pytest.mark.parametrize(
  ("talk", "level", "sentence"),
  [
    (_answers, doctor.OK, "10 searches: p50 "),
    (_finds_nothing, doctor.PROBLEM, "10 without a passage"),
    (fake_retriever.die_at_once, doctor.PROBLEM, "tried 4 times"),
  ],
)
def test_a_server_of_passages_is_asked(questions, talk, level, sentence):
  with fake_retriever.listening(talk) as url:
    config = doctored.with_(questions, retrieval={"kind": "http", "url": url})
    check = doctor.Check(
      "r", lambda: run_checks.retriever(config, ask_web=False)
    )
    (finding,) = doctor.run(check, deadline=60)
  assert (finding.level, sentence in finding.found) == (level, True), finding


def test_a_slow_retriever_is_a_warning():
  class Slow:
    async def search(self, request):
      await asyncio.sleep(0.02)
      return ["passage"]

  config = dataclasses.replace(doctored.CONFIG.episode, search_deadline=0.03)
  questions = [run_checks._QUESTION]
  (finding,) = run_checks._asked(Slow(), questions, config)
  assert finding.level == doctor.WARNING
  assert "episode.search_deadline, now 0.03" in finding.todo


def test_web_is_asked_only_with_ask_web(questions, monkeypatch):
  monkeypatch.setenv("BRAVE_API_KEY", "k")
  sent = []

  async def refuse(self, *arguments, **settings):
    sent.append(arguments)
    raise httpx2.ConnectError("no network here")

  monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", refuse)
  web = {"kind": "web", "web": "brave", "price": 0.005}
  config = doctored.with_(questions, retrieval=web)
  (finding,) = run_checks.retriever(config, ask_web=False)
  assert finding.level == doctor.OK
  assert not sent
  (finding,) = run_checks.retriever(config, ask_web=True)
  assert finding.level == doctor.PROBLEM
  assert 1 <= len(sent) <= 4  # One search and its tries.


def test_questions_whose_passages_no_server_has_are_a_problem():
  served = {"kind": "http", "url": "http://127.0.0.1:9"}
  config = doctored.with_(retrieval=served)
  check = doctor.Check("data", lambda: run_checks.data(config))
  (finding,) = doctor.run(check, deadline=60)
  assert finding.level == doctor.PROBLEM
  assert "'http' with data.source 'world'" in finding.found


def test_a_log_is_read_and_never_made(tmp_path):
  path = tmp_path / "answers.sqlite"
  config = doctored.with_(retrieval={"log": str(path)})
  first, _ = run_checks.retriever(config, ask_web=False)
  assert "not there yet" in first.found
  assert not path.exists()
  strict = doctored.with_(retrieval={"log": str(path), "log_mode": "strict"})
  (finding,) = run_checks.retriever(strict, ask_web=False)
  assert finding.level == doctor.PROBLEM

  class One:
    async def search_many(self, requests):
      return [()] * len(requests)

  made = recording.Recorder(One(), path, mode="record", identity="i")
  asyncio.run(made.search(fake_retriever.ask("q")))
  made.close()
  (finding,) = run_checks.retriever(strict, ask_web=False)
  assert (finding.level, "1 answers" in finding.found) == (doctor.OK, True)
  path.write_bytes(b"not a database" * 100)
  (finding,) = run_checks.retriever(strict, ask_web=False)
  assert finding.level == doctor.PROBLEM


def test_sglang_servers_are_checked_and_not_changed():
  with fake_sglang.Server() as server:
    config = doctored.with_(
      sglang={"urls": (server.url, "http://127.0.0.1:9"), "retries": 0},
      episode={"max_context": fake_sglang.CONTEXT // 2},
    )
    good, gone = run_checks.servers(config)
    assert good.level == doctor.OK, good
    assert "serves 'default'" in good.found
    assert gone.level == doctor.PROBLEM
    assert "Is an SGLang server running there" in gone.found
    long = doctored.with_(
      config, episode={"max_context": fake_sglang.CONTEXT * 2}
    )
    short, _ = run_checks.servers(long)
    assert "--context-length" in short.todo
    paths = {path for path, _ in server.asked}
  assert not paths & {"/continue_generation", "/pause_generation", "/generate"}


def test_questions_without_needed_evidence_are_named(questions):
  config = dataclasses.replace(
    questions, method=config_lib.MethodConfig(name="stepsearch")
  )
  check = doctor.Check("data", lambda: run_checks.data(config))
  *_, finding = doctor.run(check, deadline=60)
  assert finding.level == doctor.PROBLEM
  assert "1 of 1 questions without evidence (nq_dev/0)" in finding.found


def test_prepared_questions_are_read_whole(questions):
  (finding,) = run_checks.data(questions)
  assert (finding.level, "nq_dev 10, train 1" in finding.found) == ("ok", True)
  path = pathlib.Path(questions.data.path) / "nq_dev.parquet"
  path.write_bytes(b"x")
  check = doctor.Check("data", lambda: run_checks.data(questions))
  (finding,) = doctor.run(check, deadline=60)
  assert finding.level == doctor.PROBLEM
  assert "nq_dev.parquet: found SHA-256" in finding.found


def test_questions_to_train_on_alone_are_a_warning(tmp_path):
  entry = preparing.Entry("nq/0", "who", ["x"], "nq", "train", None, "{}")
  prepared.write(tmp_path / "qa", {}, [entry], {})
  config = doctored.with_(
    data={"source": "prepared", "path": str(tmp_path / "qa")}
  )
  good, missing = run_checks.data(config)
  assert good.level == doctor.OK and "train 1" in good.found
  assert missing.level == doctor.WARNING
  assert "no evaluation split" in missing.found
