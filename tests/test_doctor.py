"""The doctor: what it says of what is in order and of what is not."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import fake_retriever
import fake_sglang
import httpx2
import jax
import pytest
import sglang_engines

from anysearch_jax import config as config_lib
from anysearch_jax import protocol, run_lock
from anysearch_jax import tokenizer as tokenizer_lib
from anysearch_jax.policy import hf
from configs import quickstart
from launch import (
  checks,
  doctor,
  footprint,
  machine_checks,
  policy_checks,
  run_checks,
)
from retrieval import recorder

CONFIG = quickstart.get_config()


def with_(config=CONFIG, **groups):
  """The configuration with values of its groups changed."""
  return dataclasses.replace(
    config,
    **{
      name: dataclasses.replace(getattr(config, name), **values)
      for name, values in groups.items()
    },
  )


def examine(config, tmp_path, **settings):
  return list(doctor.examine(config, output=str(tmp_path / "run"), **settings))


def levels(found):
  return {finding.level for finding in found}


def said(found, level):
  return [f"{f.found} {f.todo}" for f in found if f.level == level]


def test_what_can_run_is_in_order(tmp_path, capsys):
  found = examine(CONFIG, tmp_path)
  assert levels(found) == {checks.OK}, found
  names = {line.split()[1] for line in capsys.readouterr().out.splitlines()}
  assert names >= {
    *("python", "packages", "devices", "config", "policy", "texts", "mesh"),
    *("memory", "disk", "output", "data", "retriever"),
  }
  assert not (tmp_path / "run").exists()


def test_the_command_says_what_is_wrong_by_its_exit_code(tmp_path):
  def command(*arguments):
    return subprocess.run(
      [sys.executable, "-m", "launch.doctor", *arguments],
      capture_output=True,
      text=True,
      timeout=300,
      check=False,
    )

  done = command()
  assert (done.returncode, done.stdout.splitlines()[-1]) == (
    0,
    "0 problems, 0 warnings",
  ), done.stdout + done.stderr
  done = command(
    "--config=configs/quickstart.py",
    "--config.policy=nowhere",
    "--config.mesh.fsdp=3",
    f"--output={tmp_path}",
  )
  assert done.returncode == 1, done.stdout + done.stderr
  assert "problem  policy      nowhere: no config.json;" in done.stdout
  # What hangs on the policy is not told as a second problem.
  assert "1 problems, 0 warnings" in done.stdout


@pytest.mark.parametrize(
  ("groups", "sentence"),
  [
    ({"curriculum": {"steps_per_rollout": 3}}, "do not divide into 3"),
    ({"mesh": {"fsdp": 16}}, "needs 16 devices; found 8"),
    ({"data": {"source": "prepared", "path": "nowhere"}}, "nowhere: found no"),
    ({"retrieval": {"kind": "index", "index": "nowhere"}}, "nowhere: found no"),
    (
      {"retrieval": {"kind": "web", "web": "brave", "key_variable": "NO_KEY"}},
      "NO_KEY is not set",
    ),
  ],
)
def test_what_cannot_run_is_a_problem_with_a_sentence(
  tmp_path, monkeypatch, groups, sentence
):
  monkeypatch.delenv("NO_KEY", raising=False)
  found = examine(with_(**groups), tmp_path)
  problems = said(found, checks.PROBLEM)
  assert any(sentence in problem for problem in problems), problems


# How checks run.


def test_a_check_that_breaks_or_hangs_is_a_problem():
  def breaks():
    raise KeyError("x")

  def refuses():
    raise ValueError("found 1, expected 2.")

  def exits():
    sys.exit(3)

  def half():
    yield checks.ok("first")
    raise RuntimeError("then")

  for look, sentence in (
    (breaks, "found KeyError: 'x'"),
    (refuses, "found 1, expected 2."),
    (exits, "found SystemExit: 3"),
    (half, "found RuntimeError: then"),
  ):
    (finding,) = checks.run(checks.Check("c", look), deadline=10)
    assert (finding.level, finding.found) == (checks.PROBLEM, sentence)
  held = threading.Event()
  start = time.monotonic()
  (finding,) = checks.run(checks.Check("c", held.wait), deadline=0.1)
  assert time.monotonic() - start < 5
  assert finding.found == "found no answer within 0.1 seconds"
  held.set()


def test_a_finding_is_a_line_whatever_it_found():
  finding = checks.warning("a\nb", "c")
  assert list(checks.lines("name", [finding])) == [
    "warning  name        a b",
    " " * 21 + "c",
  ]
  assert checks.size(999) == "999 B"
  assert checks.size(1500) == "1.5 KB"
  assert checks.size(12.34e9) == "12.3 GB"
  assert checks.size(1234e9) == "1,234.0 GB"


# The machine.


def test_a_package_that_lacks_or_is_old_is_named(tmp_path):
  path = tmp_path / "requirements.txt"
  path.write_text("# said\njax>=0.1\nno-such-thing>=2  # why\nnumpy>=999\n")
  found = list(machine_checks.packages(path))
  assert said(found, checks.PROBLEM) == [
    "no-such-thing: found none, expected >=2 pip install 'no-such-thing>=2'",
    f"numpy: found {__import__('numpy').__version__}, expected >=999 "
    "pip install 'numpy>=999'",
  ]
  assert said(found, checks.OK) == ["1 of 3 are as required "]


def test_the_requirements_that_are_looked_at_are_the_projects():
  assert machine_checks.REQUIREMENTS.is_file()
  assert "orbax-checkpoint" in machine_checks.REQUIREMENTS.read_text()


# Room.


def test_a_checkpoint_is_as_large_as_said(tmp_path):
  """Against Orbax's own files: the arrays, and little beside them."""
  import small_run

  made = small_run.parts()
  config = small_run.CONFIG
  small_run.train(tmp_path / "run", made, config, rollouts=2)
  takes = footprint.of(made["policy"].architecture, config)
  arrays = sum(
    leaf.nbytes for leaf in jax.tree.leaves(made["policy"].params)
  )
  assert takes.checkpoint == 3 * arrays
  assert takes.checkpoints == takes.checkpoint * (
    config.checkpoint.keep_last + 1
  )


def test_the_room_of_a_run_follows_from_its_sizes():
  a, _ = hf.describe(CONFIG.policy)
  plain = footprint.of(a, CONFIG)
  policy = pathlib.Path(CONFIG.policy)
  weights = sum(f.stat().st_size for f in policy.glob("*.safetensors"))
  # The shipped policy is float16.
  assert plain.export == pytest.approx(2 * weights, rel=0.05)
  half = footprint.of(a, with_(checkpoint={"export_dtype": "bfloat16"}))
  assert half.export == plain.export / 2
  adapters = footprint.of(a, with_(lora={"rank": 4}))
  assert adapters.checkpoint < plain.checkpoint / 4
  assert adapters.export > plain.export
  cut = footprint.of(a, with_(mesh={"fsdp": 2, "tensor": 2}))
  assert cut.trained == plain.trained // 4
  bare = footprint.of(a, with_(objective={"kl_coefficient": 0.0}))
  assert plain.trained - bare.trained == plain.export
  e = CONFIG.engine
  cache = 2 * a.layers * a.kv_heads * a.head_dim * e.slots * e.max_context * 4
  assert plain.sampled == cache
  assert footprint.of(a, with_(engine={"kind": "sglang"})).sampled == 0


def test_a_full_disk_and_little_memory_are_problems(tmp_path, monkeypatch):
  a, _ = hf.describe(CONFIG.policy)
  needs = footprint.of(a, CONFIG)
  usage = shutil.disk_usage(tmp_path)
  for free, level in ((needs.disk, checks.OK), (needs.disk - 1, "problem")):
    full = usage._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _, full=full: full)
    assert run_checks.disk(a, CONFIG, tmp_path / "run").level == level
  # What an earlier start has written needs no more room.
  (tmp_path / "run" / "checkpoints").mkdir(parents=True)
  (tmp_path / "run" / "checkpoints" / "x").write_bytes(b"x")
  assert run_checks.disk(a, CONFIG, tmp_path / "run").level == checks.OK
  least = needs.trained + needs.sampled
  for has, level in ((least, checks.OK), (least - 1, checks.PROBLEM)):
    monkeypatch.setattr(machine_checks, "device_memory", lambda has=has: has)
    monkeypatch.setattr(machine_checks, "available_memory", lambda: 10**12)
    (finding,) = run_checks.memory(a, CONFIG)
    assert finding.level == level
  sglang = with_(engine={"kind": "sglang"}, sglang={"weights": str(tmp_path)})
  for free, level in ((10**9, checks.OK), (1000, checks.PROBLEM)):
    full = usage._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _, full=full: full)
    finding = run_checks.handed_over(a, sglang)
    assert finding.level == level
    assert str(tmp_path) in finding.found


def test_a_folder_that_is_written_to_or_cannot_be_is_a_problem(tmp_path):
  assert run_checks.output(tmp_path / "run").level == checks.OK
  with run_lock.hold(tmp_path / "run" / run_lock.NAME):
    finding = run_checks.output(tmp_path / "run")
    assert finding.level == checks.PROBLEM
    assert "writes to it" in finding.found
  assert run_checks.output(pathlib.Path("/proc/run")).level == checks.PROBLEM


# The policy's text side.


def codec_of(tmp_path, change):
  """The shipped policy with another tokenizer.json."""
  shutil.copytree(CONFIG.policy, tmp_path / "policy")
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
  found = list(policy_checks.texts(codec, CONFIG))
  problems = said(found, checks.PROBLEM)
  assert any("loses </answer>" in each for each in problems), problems


def test_the_three_families_carry_the_protocol(real_tokenizer):
  found = list(policy_checks.texts(real_tokenizer, config_lib.ExperimentConfig()))
  assert levels(found) <= {checks.OK, checks.WARNING}, found
  assert sum("tags survive" in f.found for f in found) == 1


def test_a_template_whose_end_ends_no_turn_is_a_warning(real_tokenizer):
  silent = tokenizer_lib.Tokenizer(real_tokenizer.hf)
  silent.end_of_turn_ids = frozenset({0})
  found = list(policy_checks.texts(silent, config_lib.ExperimentConfig()))
  assert any("which ends no turn" in w for w in said(found, checks.WARNING))
  silent.end_of_turn_ids = frozenset()
  found = list(policy_checks.texts(silent, config_lib.ExperimentConfig()))
  assert any("no token ends a turn" in p for p in said(found, checks.PROBLEM))


def test_a_stop_that_halts_nothing_is_found(real_tokenizer, monkeypatch):
  monkeypatch.setattr(
    real_tokenizer, "token_texts", lambda: ["?"] * real_tokenizer.vocab_size
  )
  found = list(policy_checks.texts(real_tokenizer, config_lib.ExperimentConfig()))
  assert any(
    protocol.STOPS[0] in p and "not found" in p
    for p in said(found, checks.PROBLEM)
  )


def test_a_policy_without_all_of_its_weights_is_refused(tmp_path):
  shutil.copytree(CONFIG.policy, tmp_path / "policy")
  (weights,) = (tmp_path / "policy").glob("*.safetensors")
  weights.write_bytes(weights.read_bytes()[:-100])
  config = dataclasses.replace(CONFIG, policy=str(tmp_path / "policy"))
  with pytest.raises(ValueError, match="not a whole safetensors file"):
    policy_checks.folder(config)


# Who answers.


async def _answers(writer):
  """Search-R1's server, for any request."""
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
    (_answers, checks.OK, "10 searches: p50 "),
    (_finds_nothing, checks.PROBLEM, "10 without a passage"),
    (fake_retriever.die_at_once, checks.PROBLEM, "tried 4 times"),
  ],
)
def test_a_server_of_passages_is_asked(talk, level, sentence):
  with fake_retriever.listening(talk) as url:
    config = with_(retrieval={"kind": "http", "url": url})
    check = checks.Check(
      "r", lambda: run_checks.retriever(config, ask_web=False)
    )
    (finding,) = checks.run(check, deadline=60)
  assert (finding.level, sentence in finding.found) == (level, True), finding


def test_a_slow_retriever_is_a_warning():
  class Slow:
    async def search(self, request):
      await asyncio.sleep(0.02)
      return ["passage"]

  config = dataclasses.replace(CONFIG.episode, search_deadline=0.03)
  questions = [run_checks._QUESTION]
  (finding,) = run_checks._asked(Slow(), questions, config)
  assert finding.level == checks.WARNING
  assert "episode.search_deadline, now 0.03" in finding.todo


def test_the_web_is_asked_only_where_it_may_cost(monkeypatch):
  monkeypatch.setenv("BRAVE_API_KEY", "k")
  sent = []

  async def refuse(self, *arguments, **settings):
    sent.append(arguments)
    raise httpx2.ConnectError("no network here")

  monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", refuse)
  config = with_(retrieval={"kind": "web", "web": "brave", "price": 0.005})
  (finding,) = run_checks.retriever(config, ask_web=False)
  assert finding.level == checks.OK
  assert not sent
  (finding,) = run_checks.retriever(config, ask_web=True)
  assert finding.level == checks.PROBLEM
  assert 1 <= len(sent) <= 4  # One search and its tries.


def test_a_log_is_read_and_never_made(tmp_path):
  path = tmp_path / "answers.sqlite"
  config = with_(retrieval={"log": str(path)})
  first, _ = run_checks.retriever(config, ask_web=False)
  assert "not there yet" in first.found
  assert not path.exists()
  strict = with_(retrieval={"log": str(path), "log_mode": "strict"})
  (finding,) = run_checks.retriever(strict, ask_web=False)
  assert finding.level == checks.PROBLEM

  class One:
    async def search(self, request):
      return ()

  made = recorder.Recorder(One(), path, mode="record", identity="i")
  asyncio.run(made.search(fake_retriever.ask("q")))
  made.close()
  (finding,) = run_checks.retriever(strict, ask_web=False)
  assert (finding.level, "1 answers" in finding.found) == (checks.OK, True)
  path.write_bytes(b"not a database" * 100)
  (finding,) = run_checks.retriever(strict, ask_web=False)
  assert finding.level == checks.PROBLEM


def test_servers_that_sample_are_looked_at_and_left_as_they_are():
  with fake_sglang.Server() as server:
    config = with_(
      sglang={"urls": (server.url, "http://127.0.0.1:9"), "retries": 0},
      episode={"max_context": fake_sglang.CONTEXT // 2},
    )
    good, gone = run_checks.servers(config)
    assert good.level == checks.OK, good
    assert "serves 'default'" in good.found
    assert gone.level == checks.PROBLEM
    assert "Is an SGLang server running there" in gone.found
    long = with_(config, episode={"max_context": fake_sglang.CONTEXT * 2})
    short, _ = run_checks.servers(long)
    assert "--context-length" in short.todo
    paths = {path for path, _ in server.requests}
  assert not paths & {"/continue_generation", "/pause_generation", "/generate"}


def test_prepared_questions_are_read_whole(tmp_path):
  import question_rows

  folder = question_rows.prepared(tmp_path)
  config = with_(data={"source": "prepared", "path": str(folder)})
  assert levels(run_checks.data(config)) == {checks.OK}
  assert math.isfinite(len(jax.devices())) and sglang_engines
