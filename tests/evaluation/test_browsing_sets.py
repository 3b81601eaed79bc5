"""BrowseComp-Plus, in rows that were made in the published shape.

A row of FRAMES is in golden/question_rows.json.
"""

from __future__ import annotations

import base64
import hashlib
import json

import commands
import fake_openai
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scripted
import study

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.data import evidence, prepared
from anysearch_jax.environment import citations
from anysearch_jax.evaluation import columns, judging, measures
from anysearch_jax.launch import prepare_data, score

CANARY = "a canary of these tests"
DOCUMENTS = [f"---\ntitle: T{i}\n---\nPage {i} has ünits." for i in range(6)]


def hidden(value):
  """Encrypts all texts, as integers instead of byte by byte."""
  if isinstance(value, list):
    return [hidden(each) for each in value]
  if isinstance(value, dict):
    return {k: v if k == "query_id" else hidden(v) for k, v in value.items()}
  data = value.encode()
  key = hashlib.sha256(CANARY.encode()).digest() * (len(data) // 32 + 1)
  text, mask = (int.from_bytes(x, "big") for x in (data, key[: len(data)]))
  return base64.b64encode((text ^ mask).to_bytes(len(data), "big")).decode()


def documents(*ids):
  return [{"docid": f"d{i}", "text": DOCUMENTS[i], "url": "u"} for i in ids]


ROW = {
  "query_id": "769",
  "query": "Name the unit\nof page 1.",
  "answer": "ünit 1",
  "gold_docs": documents(1),
  "evidence_docs": documents(1, 2),
  "negative_docs": documents(5),
}


def prepare(tmp_path, name, *flags):
  output = tmp_path / "prepared"
  file = next(tmp_path.glob("test.*"))
  given = f"--input={name}:test={file}", f"--output={output}"
  said = commands.run(prepare_data, *given, *flags)
  return said or prepared.Prepared(output).rows(f"{name}_test")[0]


@pytest.mark.parametrize("encrypted", [True, False])
def test_rows_are_decrypted_and_only_ids_of_documents_are_kept(
  tmp_path, encrypted
):
  table = pa.Table.from_pylist([hidden(ROW) if encrypted else ROW])
  pq.write_table(table, tmp_path / "test.parquet")
  for canary in ("", "another") if encrypted else ():
    said = prepare(tmp_path, "browsecomp-plus", f"--canary={canary}")
    assert "row 1: a text that no canary, or a wrong one, decrypts" in said
  flags = [f"--canary={CANARY}"] if encrypted else []
  found = prepare(tmp_path, "browsecomp-plus", *flags)
  assert (found.id, found.text) == ("browsecomp-plus/769", ROW["query"])
  assert found.golden_answers == ("ünit 1",)
  assert found.metadata["gold_doc_ids"] == ["d1"]
  assert found.metadata["evidence_doc_ids"] == ["d1", "d2"]
  kept = (tmp_path / "prepared" / prepared.MANIFEST).read_text()
  assert CANARY not in kept and "Page" not in str(found.metadata)


def test_shares_of_evidence_are_those_of_the_original():
  found = [types.Passage(i, f'"T{i}"', "x") for i in "abcd"]
  none = citations.Cited(None)
  cited = citations.Cited("x", ((1, found[0]), (4, found[3])), (9,))

  def shares(metadata, cited=none):
    engine = scripted.Engine((scripted.search("s"), scripted.answer("x")))
    question = types.Question("q", "Q?", ("x",), metadata=metadata)
    retriever = scripted.Retriever({"s": found[:3]})
    played = engine, retriever, config_lib.EpisodeConfig()
    return evidence.measure(
      scripted.play(*played, budget=1, question=question), cited
    )

  ids = {"gold_doc_ids": ["a", "z"], "evidence_doc_ids": [*"abdz"]}
  recalls = {"gold_recall": 1 / 2, "evidence_recall": 2 / 4}
  marks = {"citation_precision": 2 / 3, "citation_recall": 2 / 4}
  assert shares(ids, cited) == recalls | marks
  assert shares(ids) == recalls
  titles = {"supporting": [{"title": "tB"}, {"title": "TD"}]}
  assert shares(titles) == {"evidence_recall": 1 / 2}
  assert shares({}, cited) == {}


@pytest.mark.parametrize(
  ("reply", "expected"),
  [
    ("a: correct: no\n**correct:** yes\n**confidence:** 80%", (1, 80)),
    ("**correct**: No\n**confidence**: 7.5 %", (0, 7.5)),
    ("CORRECT: yes\nconfidence: 250", (1, 100)),
    ("correct: yes\nconfidence: high", (1, None)),
    ("I cannot tell. confidence: 70", (0, None)),
  ],
)
def test_replies_are_read_as_in_the_original(reply, expected):
  assert tuple(judging.verdict(reply).values()) == expected


@pytest.mark.parametrize("n", [99, 100, 250, 430])
def test_calibration_error_leaves_out_the_last_bin(n):
  rng = np.random.default_rng(n)
  sure, right = rng.permutation(n) / n * 100, rng.integers(0, 2, n) * 1.0
  order, total = sorted(range(n), key=lambda i: sure[i]), 0.0
  for start in range(0, 100 * (n // 100 - 1), 100):
    some = order[start : start + 100]
    gap = sum(sure[i] / 100 - right[i] for i in some) / 100
    total += 100 / n * gap**2
  given = np.append(sure, np.nan), np.append(right, 1.0)
  found = judging.calibration_error(*given)
  assert found is None if n < 100 else found == pytest.approx(total**0.5)


def test_a_judge_that_is_late_is_asked_again(tmp_path):
  path, late = tmp_path / "episodes.jsonl", []
  rows = [
    row | {"failed": not i, "outcome": "answered", "answer": f"a{i}" * bool(i)}
    for i, row in enumerate(
      study.row("a", questions=2, budgets=(0, 2)).episodes
    )
  ]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))

  def reply(body):
    text = body["messages"][0]["content"]
    said = f"correct: {'yes' if 'a2' in text else 'no'}\nconfidence: 50"
    message = {"role": "assistant", "content": said}
    answered = {"choices": [{"index": 0, "message": message}]}
    return (500, {}) if late and "a1" in text else (200, answered)

  with fake_openai.served(reply) as server:
    given = f"--input={path}", f"--output={path}", f"--judge={server.url}"
    flags = *given, "--judge_deadline=0.5"
    # Only the late one is asked about again, unless the judge is another.
    for model, more in (("m", 1), ("n", 3)):
      late[:] = [True]
      said = commands.run(score, *flags, "--judge_model=m")
      assert "no verdict on 1 of 4 answers" in said
      asked = len(server.asked)
      late.clear()
      assert commands.printed(score, *flags, f"--judge_model={model}")[0] == 0
      assert len(server.asked) == asked + more
  found = measures.estimates(columns.read(path), ("judged", "gold_recall"))
  assert [e.value for e in found.values()] == [pytest.approx(1 / 3), None]
