"""What tests of Milvus and of PostgreSQL ask of both."""

from __future__ import annotations

import asyncio
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import retrieval_cases as cases

from anysearch_jax import types


def ask(query, k=3, corpus=""):
  return types.SearchRequest(query, k, corpus)


def search(retriever, *asked):
  return asyncio.run(retriever.search_many(asked))


def built_by_the_command(*flags):
  """Runs launch.build_index in a process; returns what it said."""
  done = subprocess.run(
    [sys.executable, "-m", "launch.build_index", "--cache=", *flags],
    cwd=pathlib.Path(__file__).parents[2],
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def finds_the_rows_of_a_float64_product(retriever, corpus):
  """Checks a retriever whose ranking is `dense`."""
  encoder = cases.Encoder()
  x = encoder.passages(list(corpus.contents(0, len(corpus))))
  queries = [f"query {i}" for i in range(20)]
  scores = encoder.queries(queries).astype(float) @ x.astype(float).T
  found = search(retriever, *(ask(q, 5) for q in queries))
  for answer, row in zip(found, scores, strict=True):
    best = np.argsort(-row, kind="stable")[:5]
    assert [p.id for p in answer] == [str(i) for i in best]
    np.testing.assert_allclose([p.score for p in answer], row[best], atol=1e-5)


def finds_the_first_of_both(retriever, corpus):
  """Checks a retriever whose ranking is `hybrid`."""
  # The contents' own vector is nearest, and only row 9 has its number.
  (found,) = search(retriever, ask(corpus[9].contents, 3))
  assert found[0].id == "9"
  assert found[0].score == pytest.approx(2 / 61)
  assert len(found) == 3
