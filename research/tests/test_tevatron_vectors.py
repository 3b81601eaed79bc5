"""Pickled vectors: read in any order, and never run."""

from __future__ import annotations

import json
import pickle

import faiss
import numpy as np
import pytest

from research import tevatron_vectors

VECTORS = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_file_has_the_vectors_in_the_order_of_the_corpus(tmp_path, protocol):
  corpus = tmp_path / "corpus.jsonl"
  rows = [{"docid": f"d{i}", "text": f"Page {i}."} for i in range(6)]
  corpus.write_text("\n".join(map(json.dumps, rows)))
  for part, own in enumerate(([4, 1, 5], [0, 2, 3])):
    pair = VECTORS[own], [f"d{i}" for i in own]
    path = tmp_path / f"corpus.shard{part}.pkl"
    path.write_bytes(pickle.dumps(pair, protocol))
  output = tmp_path / "vectors.index"
  tevatron_vectors.main(
    [
      f"--corpus={corpus}",
      f"--vectors={tmp_path / 'corpus.shard*.pkl'}",
      f"--output={output}",
    ]
  )
  index = faiss.read_index(str(output))
  np.testing.assert_array_equal(index.reconstruct_n(0, 6), VECTORS)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_other_pickles_are_refused_and_not_run(tmp_path, protocol):
  path = tmp_path / "corpus.pkl"
  few = VECTORS[:3], ["d0", "d2", "d3"]
  for said, value in {
    "found a call of io.open": f"cio\nopen\n(V{tmp_path}/ran\nVw\ntR.".encode(),
    "found 3 ids for 3 vectors": pickle.dumps(few, protocol),
    "found 1 ids for 2 vectors": pickle.dumps((np.eye(2), ["d0", "d0"])),
    "OBJECT array": pickle.dumps((np.array([[None]]), ["d0"]), protocol),
  }.items():
    path.write_bytes(value)
    with pytest.raises(ValueError, match=said):
      tevatron_vectors.unpickled([str(path)], [f"d{i}" for i in range(6)])
  assert not (tmp_path / "ran").exists()
