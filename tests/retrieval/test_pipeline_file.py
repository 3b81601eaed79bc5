"""Pipelines from files: in a run, served, measured, and refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys

import pytest
import retrieval_cases as cases
import small_rerankers
import small_run
import test_serve_command as served

from anysearch_jax import config as config_lib
from anysearch_jax import types
from launch import pipelines, retrievers
from retrieval.clients import client
from retrieval.encoder import cross_encoder
from retrieval.index import building, opening
from retrieval.pipeline import spec

FILE = """
[[stage]]
retrieve = {{ kind = "index", index = "{folder}/english" }}
keep = 6

[[stage]]
retrieve = {{ kind = "index", index = "{folder}/plain" }}
name = "plain"
keep = 6

[[stage]]
rerank = {{ model = "{folder}/reranker", max_tokens = 64 }}
keep = 3
deadline = 60.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Makes two indexes of one corpus, a reranker, and the file of all."""
  folder = tmp_path_factory.mktemp("pipeline")
  source = cases.write(folder / "c.jsonl")
  for language in ("english", "plain"):
    settings = building.Settings("bm25", language=language)
    building.build(source, folder / language, settings)
  small_rerankers.classifier(folder / "reranker", "bert", labels=1)
  (folder / "pipeline.toml").write_text(FILE.format(folder=folder))
  return folder


def made_by(path):
  config = dataclasses.replace(
    small_run.CONFIG,
    retrieval=config_lib.RetrievalConfig(kind="pipeline", pipeline=str(path)),
  )
  return retrievers.make(config, None)


def ask(retriever, *queries, k=3):
  async def run():
    return await retriever.search_many(
      [types.SearchRequest(query, k) for query in queries]
    )

  return asyncio.run(run())


def test_a_run_is_answered_by_the_stages(folder):
  made = made_by(folder / "pipeline.toml")
  queries = ["number n7 water", "fire n3"]
  answers = ask(made, *queries)
  model = cross_encoder.CrossEncoder.load(folder / "reranker", max_tokens=64)
  indexes = [opening.open_index(folder / n) for n in ("english", "plain")]
  for query, answer in zip(queries, answers, strict=True):
    found = {
      p.id: p.contents for index in indexes for p in index.search([query], 6)[0]
    }
    each = model.scores([(query, text) for text in found.values()])
    scores = dict(zip(found, each, strict=True))
    best = sorted(found, key=lambda name: -scores[name])[:3]
    assert [p.id for p in answer] == best
    assert [p.score for p in answer] == [scores[name] for name in best]
  identity = made.identity()
  kinds = [list(s)[0] for s in identity["identity"]["stages"]]
  assert kinds == ["retrieve", "retrieve", "rerank"]
  assert len(identity["sha256"]) == 64


def test_a_pipeline_is_served_and_measured(folder, tmp_path):
  path = folder / "pipeline.toml"
  command = ("-m", "launch.serve_retriever", "--port=0", f"--pipeline={path}")
  with served.started(*command) as (process, url):
    http = client.HttpRetriever(url)
    over_http = ask(http, "number n7 water", "fire n3")
    assert http.identity() == made_by(path).identity()["identity"]
    http.close()
    assert served.stopped(process) == 0
    # The deadlines of the stages are 30 and 60 seconds.
    assert "--deadline=30: the stages of" in (said := process.stderr.read())
    assert "up to 90 seconds" in said
  direct = ask(made_by(path), "number n7 water", "fire n3")
  assert [[p.id for p in a] for a in over_http] == [
    [p.id for p in a] for a in direct
  ]
  questions = tmp_path / "dev.jsonl"
  questions.write_text(
    "".join(
      json.dumps(
        {
          "question": f"passage number n{i}",
          "metadata": {"gold_doc_ids": [str(i)]},
        }
      )
      + "\n"
      for i in range(8)
    )
  )
  done = subprocess.run(
    [
      *(sys.executable, "-m", "launch.recall", f"--pipeline={path}", "--k=3"),
      *(f"--questions={questions}", f"--json={tmp_path / 'rows.json'}"),
    ],
    cwd=served.ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  rows = json.loads((tmp_path / "rows.json").read_text())
  assert [r["stage"] for r in rows] == ["retrieve", "plain", "fused", "rerank"]
  # The word nI is in one passage, which the random reranker may lose.
  assert [r["any"] for r in rows[:3]] == [1.0, 1.0, 1.0]
  assert all(r["n"] == 8 and r["seconds"] > 0 for r in rows)
  assert done.stdout.count("ms a query") == 4


@pytest.mark.parametrize(
  ("text", "sentence"),
  [
    ("", "expected only \\[\\[stage\\]\\]"),
    ("stage = 3", "expected only"),
    ("[[stage]", "found no pipeline .*expected a TOML file"),
    ("[[stage]]\nkeep = 3", "stage 1: found .*expected exactly one of retr"),
    ('[[stage]]\nrerank = "m"', "rerank is 'm', expected a table such as"),
    ("[[stage]]\nrerank = {}", "needs a model .* or a url"),
    ('[[stage]]\nrerank = {model = "m"}', "expected one or more that retrieve"),
    ("[[stage]]\ncut = {}", "cut needs a score, characters, or both"),
    ("[[stage]]\ncut = {score = 'x'}", "found cut.score = 'x', expected one"),
    ("[[stage]]\ncut = {score = nan}", "found cut.score = nan, expected a num"),
    ("[[stage]]\ncut = {characters = 0}", "characters = 0, .* at least 1"),
    ("[[stage]]\nrerank = {batch = 0}", "rerank.batch = 0, .* at least 1"),
    ("[[stage]]\nretrieve = {}\nk = 3", "unknown key 'k', expected cache"),
    ("[[stage]]\nretrieve = {}\nkeep = 0", "keep is 0, expected a number"),
    ("[[stage]]\nretrieve = {}\ndeadline = 0", "deadline is 0, expected sec"),
    ("[[stage]]\nretrieve = {}\noptional = 1", "optional is 1, expected true"),
    ("[[stage]]\nretrieve = {}", "found kind 'lexical'; expected a retriever"),
    ('[[stage]]\nretrieve = {knd = "x"}', "retrieve: unknown key 'knd'"),
    ('[[stage]]\nretrieve = {kind = "http"}', "retrieval.url: found ''"),
    (
      '[[stage]]\nretrieve = {kind = "index", index = "gone"}',
      "stage 'retrieve': gone: found no finished index",
    ),
    (
      '[[stage]]\nretrieve = {kind = "pipeline", pipeline = "p.toml"}',
      "found kind 'pipeline'; expected a retriever",
    ),
    (
      '[[stage]]\nretrieve = {kind = "index", index = "i", log = "l"}',
      "found log = 'l'; expected it in the configuration of the run",
    ),
  ],
)
def test_an_invalid_file_is_refused_by_name(text, sentence, tmp_path):
  path = tmp_path / "p.toml"
  path.write_text(text)
  with pytest.raises(ValueError, match=f"p.toml.*{sentence}"):
    pipelines.make(path, retrievers.open_one)


@pytest.mark.parametrize(
  ("rerank", "sentence"),
  [
    ({"model": "gone"}, "gone: no config.json"),
    ({"model": "m", "name": "n"}, "found name with a model"),
    ({"url": "http://a", "max_tokens": 3}, "found max_tokens with a url"),
    ({"url": "a"}, "The reranker's url is invalid"),
  ],
)
def test_an_invalid_reranker_is_refused_by_its_stage(
  folder, tmp_path, rerank, sentence
):
  values = ", ".join(f"{k} = {json.dumps(v)}" for k, v in rerank.items())
  path = tmp_path / "p.toml"
  path.write_text(
    f'[[stage]]\nretrieve = {{kind = "index", index = "{folder}/plain"}}\n'
    f"[[stage]]\nrerank = {{{values}}}\n"
  )
  with pytest.raises(ValueError, match=f"stage 'rerank': .*{sentence}"):
    pipelines.make(path, retrievers.open_one)


def test_stages_have_names_of_their_own():
  stage = {"retrieve": {"kind": "index"}}
  read = spec.parse({"stage": [stage, stage, {**stage, "name": "x"}]})
  assert [each.name for each in read] == ["retrieve", "retrieve2", "x"]
  with pytest.raises(ValueError, match="the name 'retrieve2' is taken"):
    spec.parse({"stage": [stage, stage, {**stage, "name": "retrieve2"}]})
