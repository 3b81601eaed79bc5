"""Tests that keys come from the environment and are never written or shown."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib

import commands
import fake_sglang
import pytest
import sglang_engines
import small_run
import source_tree
import web_site

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.data import prepared, preparing
from anysearch_jax.policy import hf

_KEYS = {
  "RETRIEVER_KEY": "s3cret-of-the-retriever",
  "SERVER_KEY": "s3cret-of-the-servers",
}


@contextlib.contextmanager
def _retriever():
  """Answers every other search; its errors for the rest quote the key."""
  with web_site.Site("127.0.0.1") as site:

    def post(handler):
      key = handler.headers["Authorization"]
      asked.append(key)
      hit = {"document": {"id": "1", "contents": "a\nb"}, "score": 1.0}
      status, value = 403, {"detail": f"Not for {key} today."}
      if len(asked) % 2 == 0:
        found = [[hit] for _ in json.loads(handler.body)["queries"]]
        status, value = 200, {"result": found}
      web_site.reply(status, json.dumps(value).encode())(handler)

    asked, site.post = [], post
    identity = json.dumps({"identity": {"kind": "test"}}).encode()
    site.pages["/health"] = web_site.reply(200, identity)
    yield site.origin, asked


def _says(context):
  """Searches in the first turn and answers in the second."""
  text = fake_sglang.tokenizer().decode(context)
  tag = "answer" if "</search>" in text else "search"
  ends = {"answer": "</answer>", "search": "</search>"}
  return fake_sglang.ids("<", tag, ">", "b", ends[tag])


@pytest.fixture
def world(tmp_path):
  """Yields a folder with a policy, questions and a configuration; servers."""
  hf.save(tmp_path / "policy", sglang_engines.policy())
  entries = [
    preparing.Entry(f"nq_dev/{i}", "a" * i, ["b"], "nq", "dev", None, "{}")
    for i in range(1, 9)
  ]
  parts = {"nq_dev": preparing.Part(entries)}
  prepared.write(tmp_path / "qa", parts, entries, {})
  with _retriever() as (url, asked), fake_sglang.Server(_says) as server:
    retrieval = {"kind": "http", "url": url, "key_variable": "RETRIEVER_KEY"}
    sglang = {"urls": (server.url,), "api_key_variable": "SERVER_KEY"}
    config = config_lib.changed(
      small_run.CONFIG,
      policy=str(tmp_path / "policy"),
      questions=2,
      save_every=1,
      curriculum={"max_budget": 1, "phase1_steps": 2, "total_steps": 4}
      | {"window": 2},
      episode={"max_generated": 20, "max_context": 56}
      | {"search_deadline": 10.0, "turn_deadline": 30.0},
      engine=config_lib.EngineConfig(kind="sglang", max_context=60),
      servers={"retries": 1, "deadline": 20.0, "weights": str(tmp_path / "ram")}
      | sglang,
      retrieval={"log": str(tmp_path / "answers.sqlite")} | retrieval,
      data={"source": "prepared", "path": str(tmp_path / "qa")},
      batch={"row_lengths": (64,), "micro_batch_tokens": 128},
      evaluation={"budgets": (0, 1), "questions": 4, "seeds": (1,)},
    )
    commands.config_file(tmp_path / "config.py", config)
    yield tmp_path, server, asked


def _command(root: pathlib.Path, module: str, *flags: str):
  """Runs a command and saves its output beside the files that it wrote."""
  done = source_tree.python(
    *("-m", f"anysearch_jax.launch.{module}", f"--config={root / 'config.py'}"),
    *(f"--output={root / module}", *flags),
    timeout=600,
    env=os.environ
    | _KEYS
    # No proxy listens at this port.
    | {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    | {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace("=8", "=1")}
    | {"TF_CPP_MIN_LOG_LEVEL": "2"},
  )
  (root / f"{module}.said").write_text(done.stdout + done.stderr)
  return done


def _shown(root: pathlib.Path) -> dict[str, list[str]]:
  """Returns the files that contain a key, by the key's variable."""
  files = [path for path in root.rglob("*") if path.is_file()]
  assert len(files) > 5
  found = {
    variable: [str(p) for p in files if key.encode() in p.read_bytes()]
    for variable, key in _KEYS.items()
  }
  return {variable: paths for variable, paths in found.items() if paths}


def test_an_evaluation_leaves_no_key_behind(world):
  root, server, asked = world
  # The server quotes the key in its error.
  key = f"Bad key Bearer {_KEYS['SERVER_KEY']}"
  server.faults["/generate"] = [(401, {"error": {"message": key}})]
  done = _command(root, "evaluate", "--cache=")
  assert done.returncode == 1, done.stderr
  assert f"Bearer {_KEYS['RETRIEVER_KEY']}" in asked
  rows = [
    json.loads(line) for line in (root / "evaluate/episodes.jsonl").open("rb")
  ]
  reasons = " ".join(row["reason"] for row in rows)
  assert "Not for Bearer ... today." in reasons
  assert "Bad key Bearer ..." in reasons
  assert _shown(root) == {}


@pytest.mark.slow
def test_training_leaves_no_key_behind(world):
  root, server, asked = world
  done = _command(root, "train", "--cache=")
  assert done.returncode == 0, done.stderr
  assert asked
  assert (root / "train" / "policy" / "model.safetensors").is_file()
  assert _shown(root) == {}


def test_the_sglang_client_logs_no_key(monkeypatch, caplog):
  caplog.set_level(logging.DEBUG)
  monkeypatch.setenv("SERVER_KEY", _KEYS["SERVER_KEY"])
  with fake_sglang.Server() as server:
    key = f"Bad key {_KEYS['SERVER_KEY']}"
    server.faults["/model_info"] = [(401, {"message": key})]
    with pytest.raises(types.EngineError, match="Bad key") as caught:
      sglang_engines.connect(urls=(server.url,), api_key_variable="SERVER_KEY")
    server.faults["/model_info"] = [(200, key)]
    with pytest.raises(types.EngineError, match="expected a JSON obj") as other:
      sglang_engines.connect(urls=(server.url,), api_key_variable="SERVER_KEY")
  shown = repr(caught.value) + repr(other.value) + caplog.text
  assert "Bad key ..." in shown
  assert _KEYS["SERVER_KEY"] not in shown
