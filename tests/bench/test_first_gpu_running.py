"""Stages of bench.first_gpu: limits, crashes, resumption, what is written."""

from __future__ import annotations

import dataclasses
import http.server
import json
import math
import sys
import threading

import pytest
import random_models

from anysearch_jax import config as config_lib
from anysearch_jax.environment import protocol
from anysearch_jax.training import batching, throughput
from bench import policies
from bench.first_gpu import notes as notes_lib
from bench.first_gpu import running, stages

_WRITES = """
import json, pathlib
def note(values):
  pathlib.Path({path!r}).write_text(json.dumps(values))
note({{"figures": {{"so far": 1}}}})
"""
_SCRIPTS = {
  "good": 'note({"status": "done", "figures": {"ms": 2.5}})',
  "wrong": (
    'note({"status": "failed", "reason": "ValueError: no", "figures": {}})\n'
    "raise SystemExit(1)"
  ),
  "crash": "import os\nprint('last words', flush=True)\nos.abort()",
  "hang": "import time\ntime.sleep(600)",
}


class _Runs:
  """Runs scripts as stages, and counts them."""

  def __init__(self, folder):
    self.folder = folder
    self.started = []

  def __call__(self, *names, seconds=30.0, rehearse=False, scripts=_SCRIPTS):
    def command(name):
      self.started.append(name)
      head = _WRITES.format(path=str(self.folder / f"stages/{name}.json"))
      return [sys.executable, "-c", head + scripts[name]]

    stages = dict.fromkeys(names, seconds)
    results = running.run(
      stages, self.folder, rehearse=rehearse, command=command
    )
    name = running.RESULTS[rehearse]
    written = json.loads((self.folder / name).read_text())
    assert written["stages"] == [dataclasses.asdict(r) for r in results]
    return {r.name: r for r in results}


@pytest.fixture
def runs(tmp_path):
  return _Runs(tmp_path)


def test_a_stage_that_ends_badly_does_not_end_the_others(runs):
  found = runs("wrong", "crash", "hang", "good", seconds=3.0)
  assert {name: r.status for name, r in found.items()} == {
    "wrong": "failed",
    "crash": "failed",
    "hang": "timed out",
    "good": "done",
  }
  assert found["wrong"].reason == "ValueError: no"
  assert found["crash"].reason == "ended by SIGABRT: last words"
  assert found["good"].figures == {"ms": 2.5}
  # What a stage found before its end is kept.
  assert found["crash"].figures == found["hang"].figures == {"so far": 1}
  assert 1 <= found["hang"].seconds < 20


def test_only_what_is_not_done_runs_again(runs):
  runs("good", "wrong")
  runs.started.clear()
  mended = _SCRIPTS | {"wrong": _SCRIPTS["good"]}
  found = runs("good", "wrong", scripts=mended)
  assert runs.started == ["wrong"]
  assert found["wrong"].status == found["good"].status == "done"
  # A rehearsal has results of its own.
  assert list(runs("good", rehearse=True)) == ["good"]
  assert runs.started == ["wrong", "good"]


def test_stages_at_their_limits_fit_25_minutes():
  assert sum(running.STAGES.values()) <= 60 * 25


def test_a_case_that_fails_is_noted_and_the_next_one_measured(tmp_path):
  (tmp_path / "stages").mkdir()
  notes = notes_lib.Notes(tmp_path, "x", rehearse=True)

  def fails():
    error = MemoryError("RESOURCE_EXHAUSTED: out of memory\nmany more lines")
    raise ExceptionGroup("two", [ExceptionGroup("one", [error]), KeyError("b")])

  notes.case("large", fails)
  notes.case("small", lambda: {"ms": 2.0})
  found = json.loads((tmp_path / "stages/x.json").read_text())
  assert found["figures"] == {
    "large": {"failed": "MemoryError: RESOURCE_EXHAUSTED: out of memory"},
    "small": {"ms": 2.0},
  }


class _Server(http.server.BaseHTTPRequestHandler):
  """Answers `/generate` as SGLang does, for every row."""

  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    tokens = body["sampling_params"]["max_new_tokens"]
    answer = {"meta_info": {"completion_tokens": tokens}}
    text = json.dumps([answer] * len(body["input_ids"])).encode()
    self.send_response(200)
    self.send_header("Content-Length", str(len(text)))
    self.end_headers()
    self.wfile.write(text)

  def log_message(self, *_):
    pass


def test_a_server_is_timed_by_the_tokens_that_it_says_it_wrote(tmp_path):
  (tmp_path / "stages").mkdir()
  with http.server.HTTPServer(("127.0.0.1", 0), _Server) as fake:
    threading.Thread(target=fake.handle_request, daemon=True).start()
    address = f"http://127.0.0.1:{fake.server_port}"
    notes = notes_lib.Notes(tmp_path, "server", rehearse=True, server=address)
    stages.server(notes)
  (figures,) = notes.figures.values()
  assert (figures["rows"], figures["tokens"]) == (2, 8)
  assert figures["tokens/s"] > 0


# What stages invent: words, passages, references.


def test_some_words_search_and_some_answer():
  words = policies.WordTokenizer(512)
  texts = words.token_texts()
  assert len(texts) == 512
  actions = [protocol.last_action(text) for text in texts]
  kinds = [action.kind for action in actions if action]
  assert {*kinds} == {*protocol.ActionKind}
  assert 5 < len(kinds) < 50
  ids = words.encode("what is word7 and word7")
  assert ids[2] == ids[4] and all(0 < i < 512 for i in ids)
  assert words.decode([3, 4]) == texts[3] + texts[4]


@pytest.mark.parametrize("scored", [0.22, 1])
@pytest.mark.parametrize("tokens", [256, 1024, 2048 + 32])
def test_trajectories_fill_the_rows_that_run(tokens, scored):
  config = config_lib.ExperimentConfig(
    batch=config_lib.BatchConfig(
      row_lengths=(256,), micro_batch_tokens=256, max_micro_batches=10
    )
  )
  work = policies.train_examples(
    row=256, vocab=64, tokens=tokens, scored=scored
  )
  (rows,) = packed = batching.pack(work, config=config.batch)
  a = random_models.architecture("llama")
  assert throughput.count([packed], a).tokens == tokens
  assert rows.used == math.ceil(tokens / 256)
  assert sum(x.weights[1:].sum() for x in work) == pytest.approx(1, abs=0.05)
  share = sum((x.weights[1:] > 0).sum() for x in work) / tokens
  assert share == pytest.approx(scored, abs=0.02)
  assert len({x.weights.size for x in work}) > 1


def test_a_stage_fails_if_all_its_cases_fail(tmp_path, monkeypatch):
  (tmp_path / "stages").mkdir()

  def fails():
    raise MemoryError("RESOURCE_EXHAUSTED: out of memory")

  monkeypatch.setattr(stages, "decode", lambda notes: notes.case("a", fails))
  notes = notes_lib.Notes(tmp_path, "decode", rehearse=True)
  with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
    running.measure("decode", notes)
  written = json.loads((tmp_path / "stages/decode.json").read_text())
  assert written["status"] == "failed"
