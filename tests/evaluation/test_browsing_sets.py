"""BrowseComp-Plus and FRAMES, in rows that were made in the published shape."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import pickle

import commands
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import retrieval_cases

from anysearch_jax.data import prepared
from launch import prepare_data
from retrieval import passages
from retrieval.index import building, opening, vectors

CANARY = "a canary of these tests"
DOCUMENTS = [f"---\ntitle: T{i}\n---\nPage {i} has ünits." for i in range(6)]


def hidden(value, canary=CANARY):
  """Encrypts all texts, as integers instead of byte by byte."""
  if isinstance(value, list):
    return [hidden(each, canary) for each in value]
  if isinstance(value, dict):
    return {k: hidden(v, canary) for k, v in value.items()}
  data = value.encode()
  key = hashlib.sha256(canary.encode()).digest() * (len(data) // 32 + 1)
  numbers = (int.from_bytes(x, "big") for x in (data, key[: len(data)]))
  xored = next(numbers) ^ next(numbers)
  return base64.b64encode(xored.to_bytes(len(data), "big")).decode()


def documents(*ids):
  return [
    {"docid": str(i), "text": DOCUMENTS[i], "url": f"https://x.org/{i}"}
    for i in ids
  ]


PLAIN = [
  {
    "query": f"Name the unit\nof page {i}.",
    "answer": f"ünit {i}",
    "gold_docs": documents(i),
    "evidence_docs": documents(i, i + 1),
    "negative_docs": documents(5),
  }
  for i in range(3)
]
ROWS = [{"query_id": str(7 + i)} | row for i, row in enumerate(PLAIN)]


def prepare(tmp_path, rows, *flags):
  source, folder = tmp_path / "test.parquet", tmp_path / "prepared"
  pq.write_table(pa.Table.from_pylist(rows), source)
  given = f"--input=browsecomp-plus:test={source}"
  said = commands.run(prepare_data, given, f"--output={folder}", *flags)
  return said or list(prepared.Prepared(folder).rows("browsecomp-plus_test"))


def test_rows_are_decrypted_and_only_ids_of_documents_are_kept(tmp_path):
  rows = [{"query_id": row["query_id"]} | hidden(PLAIN[i])
          for i, row in enumerate(ROWS)]  # fmt: skip
  found = prepare(tmp_path, rows, f"--canary={CANARY}")
  assert [q.id for q in found] == [f"browsecomp-plus/{7 + i}" for i in range(3)]
  assert found[1].text == PLAIN[1]["query"]  # No question mark is added.
  assert found[1].golden_answers == ("ünit 1",)
  assert found[1].metadata["gold_doc_ids"] == ["1"]
  assert found[1].metadata["evidence_doc_ids"] == ["1", "2"]
  assert "Page" not in json.dumps(dict(found[1].metadata))
  for canary in ("", "another"):
    said = prepare(tmp_path, rows, f"--canary={canary}")
    assert "row 1: a text that no canary, or a wrong one, decrypts" in said
  manifest = (tmp_path / "prepared" / prepared.MANIFEST).read_text()
  assert CANARY not in manifest


def test_decrypted_rows_and_qrels_are_read(tmp_path):
  qrels = tmp_path / "qrel_evidence.txt"
  qrels.write_text("7 Q0 4 1\n7 Q0 3 1\n7 Q0 2 0\n\n99 Q0 1 1\n")
  first, second, _ = prepare(tmp_path, ROWS, f"--qrels_evidence={qrels}")
  assert first.metadata["evidence_doc_ids"] == ["4", "3"]
  assert first.metadata["gold_doc_ids"] == ["0"]
  assert second.metadata["evidence_doc_ids"] == ["1", "2"]
  qrels.write_text("7 4 1\n")
  said = prepare(tmp_path, ROWS, f"--qrels_evidence={qrels}")
  assert "line 1: found '7 4 1', expected a question, 0, a document" in said


def test_articles_of_frames_are_its_evidence(tmp_path):
  wiki, source = "https://en.wikipedia.org/wiki", tmp_path / "test.tsv"
  columns = [f"wikipedia_link_{i}" for i in (*range(1, 11), "11+")]
  names = ["", "Prompt", "Answer", *columns, "reasoning_types", "wiki_links"]
  row = dict.fromkeys(names, "") | {
    "": "3",
    "Prompt": 'Which "town" is older, A or B?',
    "Answer": "Quincy",
    "wikipedia_link_1": f"{wiki}/Quincy,_Massachusetts#History",
    "wikipedia_link_2": f"{wiki.replace('en.', 'en.m.')}/Caf%C3%A9 (see table)",
    "wikipedia_link_11+": f"{wiki}/U2_(band), {wiki}/Queen's_Park?x=1",
    "reasoning_types": "Numerical reasoning | Tabular reasoning",
    "wiki_links": str([f"{wiki}/Quincy,_Massachusetts", f"{wiki}/What%3F"]),
  }
  with source.open("w", newline="") as file:
    table = csv.DictWriter(file, names, delimiter="\t")
    table.writeheader()
    table.writerow(row)
  folder = tmp_path / "prepared"
  given = f"--input=frames:test={source}"
  assert commands.run(prepare_data, given, f"--output={folder}") == ""
  (found,) = prepared.Prepared(folder).rows("frames_test")
  assert (found.id, found.text) == ("frames/3", row["Prompt"])
  titles = [each["title"] for each in found.metadata["supporting"]]
  assert titles == [
    *("Quincy, Massachusetts", "Café", "U2 (band)", "Queen's Park", "What?")
  ]
  assert found.metadata["hops"] == 5
  assert found.metadata["reasoning_types"] == row["reasoning_types"]


class Calls:
  """Runs a command when it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return open, (str(self.path), "w")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickled_vectors_find_the_documents_of_their_ids(tmp_path, protocol):
  source, names = tmp_path / "corpus", [f"d{i}" for i in range(6)]
  source.mkdir()
  for part in range(2):
    own = documents(*range(3 * part, 3 * part + 3))
    rows = [row | {"docid": f"d{row['docid']}"} for row in own]
    pq.write_table(pa.Table.from_pylist(rows), source / f"train-{part}.parquet")
  encoder = retrieval_cases.Encoder()
  x, order = encoder.passages(DOCUMENTS), [4, 1, 5, 0, 2, 3]
  for part in range(2):
    own = order[part::2]
    pair = x[own].astype(np.float32), [names[i] for i in own]
    path = tmp_path / f"corpus.shard{part}.pkl"
    path.write_bytes(pickle.dumps(pair, protocol))
  settings = building.Settings(
    "flat", shard=4, vectors=(str(tmp_path / "corpus.shard*.pkl"),)
  )
  for _ in range(2):  # The second time, nothing is left to do.
    assert building.build(source, tmp_path / "i", settings, encoder=encoder)
  index = opening.open_index(tmp_path / "i", encoder=encoder)
  assert not (tmp_path / "i" / building.PUBLISHED).exists()
  for i, found in enumerate(index.search(DOCUMENTS, 6)):
    best = np.argsort(-(x @ x[i]))
    assert [p.id for p in found] == [names[row] for row in best]
    assert found[0].text == DOCUMENTS[i]
  corpus = passages.prepare(source, tmp_path / "prepared")
  damaged = {
    "'io', 'open'": (Calls(tmp_path / "ran"), ["d0"]),
    "no vector for 3 of 6": pair,
    "found int64": (np.zeros((1, 2), np.int64), ["d0"]),
  }
  for said, value in damaged.items():
    path.write_bytes(pickle.dumps(value, protocol))
    with pytest.raises(ValueError, match=said):
      vectors.unpickled([str(path)], corpus, tmp_path / "out")
  assert not (tmp_path / "ran").exists()
