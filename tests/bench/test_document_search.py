"""The measurement of searches by words and by meaning."""

from __future__ import annotations

import gzip
import json
import re

import embeddings_server
import numpy as np
import pytest

from bench import document_search


def test_recall_by_hand():
  questions = [
    document_search.Question("a", frozenset({"1"})),
    document_search.Question("b", frozenset({"1", "2"})),
  ]
  rankings = [["3", "4", "5", "1"], ["2", "9", "8", "1"]]
  recall = document_search.measure_recall(questions, rankings)
  np.testing.assert_array_equal(recall, [[0, 1, 0, 1], [1, 1, 0, 1]])


def test_a_line_has_the_paired_difference_and_its_interval():
  words = np.zeros((4, 4))
  way = words.copy()
  way[:2, 2] = 1
  line = document_search.recall_line("dense", way, words)
  # Two of four differ: a mean of .5, a standard error of .5 / 2.
  assert line.split() == [
    *("dense", "0.000", "0.000", "0.500", "0.000", "+0.500", "±0.490")
  ]


@pytest.mark.parametrize("arguments", [[], ["--confirm"]])
def test_a_small_corpus_is_measured(tmp_path, capsys, arguments):
  data = tmp_path / "data"
  (data / "questions").mkdir(parents=True)
  texts = ["a cat sleeps", "the car stops", "a house", "a tree", "water"]
  with gzip.open(data / "corpus.jsonl.gz", "wt") as lines:
    for number, text in enumerate(texts):
      row = {"id": str(number), "contents": f'"T{number}"\n{text}'}
      lines.write(json.dumps(row) + "\n")
  rows = [
    {"question": "the kitten", "metadata": {"gold_doc_ids": [0]}},
    {"question": "an automobile", "metadata": {"gold_doc_ids": ["1"]}},
    {"question": "no gold", "metadata": {}},
  ]
  names = ("hotpotqa_train", "hotpotqa_dev", "nq_test", "popqa_test")
  for name in names:
    content = "\n".join(map(json.dumps, rows))
    (data / f"questions/{name}.jsonl").write_text(content)
  with embeddings_server.served() as server:
    document_search.main(
      [
        *(str(data), f"--vectors={tmp_path / 'vectors'}", "--passages=4"),
        *(f"--embeddings={server.url}", *arguments),
      ]
    )
  told = capsys.readouterr().out
  assert "4 passages" in told
  dense = re.search(r"2 questions\n  words .*\n  dense +([\d.]+)", told)[1]
  assert dense == "1.000"
  assert ("scores, dense 0.3" in told) == (not arguments)
  assert re.search(r"a query: words [\d.]+ ms, dense [\d.]+ ms, hybrid", told)
