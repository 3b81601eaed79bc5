"""The cursor: each question once per epoch, resumable from any position."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from anysearch_jax import types
from anysearch_jax.data import dataset_iterator

ROWS = [types.Question(str(i), f"{i}?", ("x",)) for i in range(5)]


@hypothesis.given(
  of=st.integers(1, 9),
  key=st.integers(0, 2**40),
  begin=st.integers(0, 30),
  sizes=st.lists(st.integers(0, 25), max_size=5),
)
def test_stream_does_not_depend_on_chunk_sizes(of, key, begin, sizes):
  place = start = dataset_iterator.at(begin, key=key, of=of)
  pieces = [np.zeros(0, int)]
  for n in sizes:
    taken, place = dataset_iterator.take(place, n, of=of)
    assert len(taken) == n
    pieces.append(taken)
  whole, end = dataset_iterator.take(start, sum(sizes), of=of)
  np.testing.assert_array_equal(np.concatenate(pieces), whole)
  assert end == place == dataset_iterator.at(begin + sum(sizes), key=key, of=of)
  assert 0 <= place.position < of


@hypothesis.given(of=st.integers(1, 40), key=st.integers(0, 100))
def test_each_epoch_has_every_question_once(of, key):
  taken, _ = dataset_iterator.take(
    dataset_iterator.Cursor(0, key, 0), 3 * of, of=of
  )
  for epoch in taken.reshape(3, of):
    assert sorted(epoch) == list(range(of))


def test_permutation_is_frozen_across_versions():
  # Values from NumPy's SeedSequence and PCG64; resuming depends on them.
  taken, _ = dataset_iterator.take(dataset_iterator.Cursor(0, 42, 0), 10, of=5)
  by_hand = [
    np.random.Generator(
      np.random.PCG64(np.random.SeedSequence((42, epoch)))
    ).permutation(5)
    for epoch in (0, 1)
  ]
  np.testing.assert_array_equal(taken, np.concatenate(by_hand))


def test_a_stream_is_a_sequence_that_may_exceed_its_questions():
  stream = dataset_iterator.Stream(ROWS, count=13, key=3)
  ids = [question.id for question in stream]
  assert len(ids) == len(stream) == 13
  assert sorted(ids[:5]) == sorted(ids[5:10]) == list("01234")
  assert stream[-1].id == ids[-1] and stream[7].id == ids[7]
  for index in (13, -14):
    with pytest.raises(IndexError, match="one of 13"):
      stream[index]


def test_progress_is_plain_values():
  stream = dataset_iterator.Stream(ROWS, count=100, key=3)
  assert dataset_iterator.progress(stream, 12) == {
    "epoch": 2,
    "key": 3,
    "position": 2,
    "of": 5,
  }
  assert dataset_iterator.progress(ROWS, 12) == {
    "epoch": 2,
    "position": 2,
    "of": 5,
  }
