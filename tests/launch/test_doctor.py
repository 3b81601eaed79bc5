"""The doctor: its findings for valid and invalid installations and runs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import shutil
import sys
import threading

import commands
import fake_retriever
import fake_sglang
import fake_vllm
import httpx2
import jax
import optax
import pytest

import anysearch_jax as aj
from anysearch_jax import config as config_lib
from anysearch_jax.configs import quickstart
from anysearch_jax.data import prepared, preparing
from anysearch_jax.host import platforms, run_lock
from anysearch_jax.launch import (
  doctor,
  findings,
  jax_setup,
  run_checks,
  train,
)
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.policy import hf, hf_architecture
from anysearch_jax.policy import tokenizer as tokenizer_lib

CONFIG = quickstart.get_config()
ROOT = pathlib.Path(__file__).resolve().parents[2]
SHAPES = ROOT / "configs" / "shapes"


def with_(config=CONFIG, **groups):
  return config_lib.changed(config, **groups)


def said(found, level):
  return [f"{f.found} {f.todo}" for f in found if f.level == level]


def checks(config=CONFIG, folder=pathlib.Path("run"), **settings):
  return run_checks.Checks(config, folder, **settings)


def run(look):
  return doctor.run_check(look, deadline=60)


def footprint(config=CONFIG, **groups):
  a, _ = hf.describe(CONFIG.policy)
  return run_checks.footprint(a, with_(config, **groups))


def test_doctor_finds_no_problem_in_a_valid_configuration(tmp_path, capsys):
  found = list(doctor.examine(CONFIG, output=str(tmp_path / "run")))
  assert {finding.level for finding in found} == {findings.OK}, found
  names = {line.split()[1] for line in capsys.readouterr().out.splitlines()}
  assert names >= {
    *("python", "packages", "devices", "config", "policy", "texts", "mesh"),
    *("accelerator", "disk", "output", "data", "retriever"),
  }
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("settings", "output", "sentence"),
  [
    ("engine.max_context=100", "run", "exceeds engine.max_context 100"),
    ("mesh.fsdp=16", "run", "needs 16 devices; found 8"),
    (
      "data.source=prepared data.path=nowhere retrieval.kind=index",
      *("run", "nowhere: found no"),
    ),
    ("retrieval.kind=index retrieval.index=x", "run", "x: found no"),
    (
      "retrieval.kind=web retrieval.web=brave retrieval.key_variable=NO_KEY",
      *("run", "NO_KEY is not set"),
    ),
    ("", "/dev/null/x", "/dev/null is not a folder"),
    (
      "policy=models/Qwen2.5-7B-Instruct",
      *("run", "hf download Qwen/Qwen2.5-7B-Instruct"),
    ),
  ],
)
def test_invalid_run_is_a_problem(
  tmp_path, monkeypatch, settings, output, sentence
):
  monkeypatch.delenv("NO_KEY", raising=False)
  # The machine is checked by the test above.
  for name in ("packages", "devices"):
    monkeypatch.setattr(doctor, name, lambda: findings.ok(""))
  config = launch_flags.override(CONFIG, settings.split())
  found = list(doctor.examine(config, output=str(tmp_path / output)))
  problems = said(found, findings.PROBLEM)
  assert any(sentence in problem for problem in problems), problems
  # Checks that need the policy do not report a second problem.
  assert "policy=" not in settings or len(problems) == 1


def test_a_check_that_breaks_or_hangs_is_a_problem():
  def raises(error):
    yield findings.ok("first")
    raise error

  for look, sentence in (
    (lambda: raises(KeyError("x")), "found KeyError: 'x'"),
    (
      lambda: raises(ValueError("found 1, expected 2.")),
      "found 1, expected 2.",
    ),
    (lambda: sys.exit(3), "found SystemExit: 3"),
  ):
    (finding,) = run(look)
    assert (finding.level, finding.found) == (findings.PROBLEM, sentence)
  held = threading.Event()
  (finding,) = doctor.run_check(held.wait, deadline=0.1)
  assert finding.found == "found no answer within 0.1 seconds"
  held.set()


# The machine.


def test_packages_that_are_missing_old_or_broken_are_named(
  tmp_path, monkeypatch
):
  for name, code in (
    ("raises-it", "raise OSError('libx.so.1: not found')"),
    ("ends-it", "import os; os._exit(7)"),
    ("works-well", ""),
  ):
    (tmp_path / f"{name.replace('-', '_')}.py").write_text(code)
    info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
      f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    )
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  path = tmp_path / "requirements.txt"
  path.write_text(
    "# said\nraises-it>=1\nends-it>=1\nworks-well>=1\n"
    "no-such-thing>=2  # why\nworks-well>=999\n"
  )
  found = list(doctor.packages(path))
  assert said(found, findings.PROBLEM)[:2] == [
    "no-such-thing: found none, expected >=2 pip install 'no-such-thing>=2'",
    "works-well: found 1.0, expected >=999 pip install 'works-well>=999'",
  ]
  (raises,) = said(found, findings.PROBLEM)[2:]
  assert "cannot be imported (OSError" in raises
  assert "libx.so.1: not found" in raises
  assert said(found, findings.OK) == ["3 of 5 are as required "]
  assert doctor._failure("import os; os._exit(7)") == "the process ended with 7"
  assert "orbax-checkpoint" in doctor.REQUIREMENTS.read_text()


def test_a_device_that_jax_does_not_use_is_reported_with_the_reason(
  monkeypatch,
):
  monkeypatch.setattr(platforms, "has_device", lambda name: name == "cuda")
  found = list(doctor.devices())
  assert [each.level for each in found] == [findings.OK, findings.WARNING]
  assert "has a CUDA device" in found[1].found
  assert "EXTRAS=cuda13" in found[1].todo
  monkeypatch.setattr(platforms, "plugins", lambda name: [name])
  monkeypatch.setattr(doctor, "_START", "raise OSError('no libcuda')")
  doctor._refusal.cache_clear()
  assert doctor._refusal("cuda") == "OSError: no libcuda"


_FIT_A_CPU = {"Qwen2.5-0.5B-Instruct", "Qwen3-0.6B", "gemma-3-1b-it"}


@pytest.mark.parametrize("path", sorted(SHAPES.glob("*.json")))
def test_a_large_policy_is_not_for_a_cpu(monkeypatch, path):
  a = hf_architecture.from_hf(json.loads(path.read_text()))
  monkeypatch.setattr(platforms, "has_device", lambda name: name == "cuda")
  with pytest.raises(ValueError, match="has a CUDA device.*--allow_cpu"):
    jax_setup.refuse_cpu(a, allow=False)
  jax_setup.refuse_cpu(a, allow=True)
  found = run_checks.check_accelerator(a)
  assert found.level == findings.PROBLEM and "billion" in found.found
  monkeypatch.setattr(platforms, "has_device", lambda name: False)
  without_a_device = jax_setup.cpu_problem(a)
  assert "has a" not in without_a_device
  assert bool(without_a_device) == (path.stem not in _FIT_A_CPU)
  jax_setup.refuse_cpu(hf.describe(CONFIG.policy)[0], allow=False)
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  jax_setup.refuse_cpu(a, allow=False)


def test_training_refuses_a_large_policy_on_a_cpu(tmp_path):
  folder = tmp_path / "policy"
  shutil.copytree(CONFIG.policy, folder)
  values = json.loads((SHAPES / "Qwen3-1.7B.json").read_text())
  vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
  # Only the shape is read before the check, so there are no such weights.
  text = json.dumps(values | {"vocab_size": vocabulary})
  (folder / "config.json").write_text(text)
  refused = commands.run(
    train,
    *("--config=configs/quickstart.py", f"--config.policy={folder}"),
    *(f"--output={tmp_path / 'run'}", "--cache="),
  )
  assert "billion parameters" in refused and "--allow_cpu" in refused
  assert not (tmp_path / "run").exists()


# Room.


def test_footprint_follows_from_the_sizes():
  policy, plain = hf.load(CONFIG.policy), footprint()
  held = jax.eval_shape(
    lambda params: (params, optax.adamw(1e-3).init(params)), policy.params
  )
  arrays = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))
  more = footprint(checkpoint={"keep_last": 3})
  assert more.disk - plain.disk == pytest.approx(arrays, abs=100)
  files = pathlib.Path(CONFIG.policy).glob("*.safetensors")
  # The shipped policy is float16.
  shipped = 2 * sum(file.stat().st_size for file in files)
  half = footprint(checkpoint={"export_dtype": "bfloat16"})
  assert plain.disk - half.disk == pytest.approx(shipped / 2, rel=0.05)
  adapters = footprint(lora={"rank": 4})
  assert adapters.disk < plain.disk
  assert footprint(objective={"advantage": "gae"}).disk > 1.8 * plain.disk


def test_a_full_disk_is_a_problem(tmp_path, monkeypatch):
  usage, needs = shutil.disk_usage(tmp_path), footprint()
  sglang = with_(engine={"kind": "sglang"}, servers={"weights": str(tmp_path)})
  plain = checks(folder=tmp_path / "run")

  def level(look, free):
    full = usage._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    return look().level

  assert level(plain.disk, needs.disk) == findings.OK
  assert level(plain.disk, needs.disk - 1) == findings.PROBLEM
  # What an earlier start has written needs no more room.
  (tmp_path / "run" / "checkpoints").mkdir(parents=True)
  (tmp_path / "run" / "checkpoints" / "x").write_bytes(b"x")
  assert level(plain.disk, needs.disk - 1) == findings.OK
  assert level(checks(sglang).handed_over, needs.handed) == findings.OK
  assert level(checks(sglang).handed_over, needs.handed - 1) == findings.PROBLEM


def test_locked_or_read_only_folder_is_a_problem(tmp_path):
  mine = checks(folder=tmp_path / "run")
  assert mine.output().level == findings.OK
  with run_lock.hold(tmp_path / "run" / run_lock.NAME):
    assert mine.output().level == findings.PROBLEM
    assert "writes to it" in mine.output().found
  assert checks(folder=pathlib.Path("/proc/run")).output().level == "problem"


# The policy's text side.


def test_policy_that_loses_tags_or_weights_is_a_problem(tmp_path):
  shutil.copytree(CONFIG.policy, tmp_path / "policy")
  path = tmp_path / "policy" / "tokenizer.json"
  values = json.loads(path.read_text())
  first = max(values["model"]["vocab"].values()) + 1
  entry = values["added_tokens"][0] | {
    "id": max([first - 1, *(t["id"] for t in values["added_tokens"])]) + 1,
    "content": "</answer>",
    "special": True,
  }
  values["added_tokens"].append(entry)
  path.write_text(json.dumps(values))
  codec = tokenizer_lib.Tokenizer.from_folder(tmp_path / "policy")
  (finding,) = run(lambda: run_checks.check_texts(codec, CONFIG))
  assert finding.level == findings.PROBLEM
  assert "loses </answer>" in finding.found
  (weights,) = (tmp_path / "policy").glob("*.safetensors")
  weights.write_bytes(weights.read_bytes()[:-100])
  config = dataclasses.replace(CONFIG, policy=str(tmp_path / "policy"))
  (finding,) = run(checks(config).policy)
  assert "not a whole safetensors file" in finding.found


def test_the_three_families_carry_the_protocol(real_tokenizer, monkeypatch):
  config = config_lib.ExperimentConfig()
  found = list(run_checks.check_texts(real_tokenizer, config))
  assert not said(found, findings.PROBLEM)
  assert sum("tags survive" in each for each in said(found, findings.OK)) == 1
  silent = tokenizer_lib.Tokenizer(real_tokenizer.hf)
  for ends, level, sentence in (
    ({0}, findings.WARNING, "which ends no turn"),
    (set(), findings.PROBLEM, "no token that ends a turn"),
  ):
    silent.end_of_turn_ids = frozenset(ends)
    found = run(lambda: run_checks.check_texts(silent, config))
    assert any(sentence in each for each in said(found, level))
  # As that of gpt-oss, whose answers another token ends than questions.
  (last, *_), template = silent.control_tokens, silent.hf.chat_template
  monkeypatch.setattr(silent.hf, "chat_template", template + f"{{# {last} #}}")
  silent.end_of_turn_ids = frozenset(silent.encode(last))
  assert not said(run_checks.check_texts(silent, config), findings.WARNING)


# Who answers.


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
  """Returns the configuration with ten prepared questions."""
  folder = tmp_path_factory.mktemp("data") / "qa"
  entries = [
    preparing.Entry(f"nq/{i}", f"who {i}", ["x"], "nq", "dev", None, "{}")
    for i in range(10)
  ]
  prepared.write(
    folder, {"nq_dev": preparing.Part(entries)}, entries[:1], {"settings": {}}
  )
  data = {"source": "prepared", "path": str(folder)}
  return with_(data=data, retrieval={"kind": "http", "url": "http://h:1"})


def answering(*hits):
  body = json.dumps({"result": [list(hits)]}).encode()

  async def answer(writer):
    writer.write(
      b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    await writer.drain()

  return answer


@pytest.mark.parametrize(
  ("talk", "level", "sentence"),
  [
    (
      answering({"document": {"id": "1", "contents": "t\nx"}, "score": 1.0}),
      findings.OK,
      "10 searches: slowest ",
    ),
    (answering(), findings.PROBLEM, "10 without a passage"),
    (fake_retriever.die_at_once, findings.PROBLEM, "tried 4 times"),
  ],
)
def test_a_server_of_passages_is_asked(questions, talk, level, sentence):
  with fake_retriever.listening(talk) as url:
    config = with_(questions, retrieval={"kind": "http", "url": url})
    (finding,) = run(checks(config).retriever)
  assert (finding.level, sentence in finding.found) == (level, True), finding


def test_a_run_without_an_evaluation_split_asks_its_own_questions(tmp_path):
  """A corpus need not know the river of Paris."""
  entries = [
    preparing.Entry(f"nq/{i}", f"who {i}", ["x"], "nq", "train", None, "{}")
    for i in range(10)
  ]
  prepared.write(
    tmp_path / "qa",
    {"train": preparing.Part(entries)},
    entries[:1],
    {"settings": {}},
  )
  notes = tmp_path / "notes.txt"
  notes.write_text("who is it?")
  index = tmp_path / "index"
  aj.index_documents([str(notes)], index)
  config = with_(
    data={"source": "prepared", "path": str(tmp_path / "qa")},
    retrieval={"kind": "index", "index": str(index)},
  )
  (finding,) = run(checks(config).retriever)
  assert finding.level == findings.OK, finding
  assert "10 searches" in finding.found and "0 without" in finding.found


def test_a_slow_retriever_is_a_warning():
  class Slow:
    async def search(self, request):
      await asyncio.sleep(0.02)
      return ["passage"]

  config = dataclasses.replace(CONFIG.episode, search_deadline=0.03)
  (finding,) = run_checks.check_answers(Slow(), [run_checks._QUESTION], config)
  assert finding.level == findings.WARNING
  assert "episode.search_deadline, now 0.03" in finding.todo


def test_web_is_asked_only_with_ask_web(questions, monkeypatch):
  monkeypatch.setenv("BRAVE_API_KEY", "k")
  sent = []

  async def refuse(self, *arguments, **settings):
    sent.append(arguments)
    raise httpx2.ConnectError("no network here")

  monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", refuse)
  web = {"kind": "web", "web": "brave", "price": 0.005, "url": ""}
  config = with_(questions, retrieval=web)
  (finding,) = checks(config).retriever()
  assert finding.level == findings.OK
  assert not sent
  (finding,) = checks(config, ask_web=True).retriever()
  assert finding.level == findings.PROBLEM
  assert 1 <= len(sent) <= 4  # One search and its tries.


def test_sglang_servers_are_checked_and_not_changed():
  with fake_sglang.Server() as server:
    config = with_(
      engine={"kind": "sglang"},
      servers={"urls": (server.url, "http://127.0.0.1:9"), "retries": 0},
      episode={"max_context": fake_sglang.CONTEXT // 2},
    )
    good, gone = checks(config).servers()
    assert good.level == findings.OK, good
    assert gone.level == findings.PROBLEM
    assert "Does SGLang run there" in gone.found
    routed = with_(config, servers={"router": server.url})
    assert [each.level for each in checks(routed).servers()] == [
      findings.OK,
      findings.PROBLEM,
      findings.OK,
    ]
    paths = {path for path, _ in server.asked}
  assert not paths & {"/continue_generation", "/pause_generation", "/generate"}


def test_vllm_servers_are_checked_and_not_changed():
  with fake_vllm.Server() as good, fake_vllm.Server() as bad:
    bad.settings["model_config"]["logprobs_mode"] = "raw_logprobs"
    config = with_(
      engine={"kind": "vllm"}, servers={"urls": (good.url, bad.url)}
    )
    right, wrong = checks(config).servers()
    assert (right.level, wrong.level) == (findings.OK, findings.PROBLEM)
    assert f"in contexts of {fake_sglang.CONTEXT} tokens" in right.found
    assert "--logprobs-mode=processed_logprobs" in wrong.found
    asked = {path for path, _ in (*good.asked, *bad.asked)}
  assert not asked & {"/resume", "/pause?mode=keep", fake_vllm.GENERATE}


def test_prepared_questions_are_read_whole(questions, tmp_path):
  (finding,) = checks(questions).data()
  assert (finding.level, "nq_dev 10, train 1" in finding.found) == ("ok", True)
  stepsearch = with_(questions, method={"name": "stepsearch"})
  *_, finding = run(checks(stepsearch).data)
  assert "1 of 1 questions without evidence (nq/0)" in finding.found
  served = with_(retrieval={"kind": "http", "url": "http://127.0.0.1:9"})
  (finding,) = run(checks(served).data)
  assert "'http' with data.source 'world'" in finding.found
  shutil.copytree(questions.data.path, tmp_path / "qa")
  config = with_(questions, data={"path": str(tmp_path / "qa")})
  (tmp_path / "qa" / "nq_dev.parquet").write_bytes(b"x")
  (finding,) = run(checks(config).data)
  assert finding.level == findings.PROBLEM
  assert "nq_dev.parquet: found SHA-256" in finding.found
  entry = preparing.Entry("nq/0", "who", ["x"], "nq", "train", None, "{}")
  prepared.write(tmp_path / "train", {}, [entry], {})
  config = with_(questions, data={"path": str(tmp_path / "train")})
  good, missing = checks(config).data()
  assert good.level == findings.OK and "train 1" in good.found
  assert missing.level == findings.WARNING
  assert "no evaluation split" in missing.found


def test_played_episodes_tell_whether_a_training_would_learn(tmp_path):
  episode = {"max_generated": 40}
  searching = with_(CONFIG, name="graded", episode=episode, group=4)
  found = checks(searching, tmp_path, episodes=8).play()
  assert found.level == findings.OK
  assert found.found.startswith("played 8 episodes. The mean reward is ")
  # One token is no answer, so all rewards are equal.
  short = with_(searching, episode={"max_generated": 1})
  found = checks(short, tmp_path, episodes=8).play()
  assert found.level == findings.PROBLEM
  assert "found equal rewards in each of 2 groups" in found.found
  assert "100% truncated" in found.found and "anysearch sft" in found.todo
  names = [name for name, _ in checks(short, tmp_path, episodes=8).all()]
  assert "play" not in names  # The check of the policy has not passed.
