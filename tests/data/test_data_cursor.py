"""The cursor: each question once per epoch, resumable from any position."""

from __future__ import annotations

import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import small_run

from anysearch_jax import types
from anysearch_jax.data import dataset_iterator
from anysearch_jax.training import checkpoint

ROWS = [types.Question(str(i), f"{i}?", ("x",)) for i in range(5)]


def order(count, *, of, key):
  """Returns the indices of the first `count` questions of a stream."""
  rows = [types.Question(str(i), "?", ("x",)) for i in range(of)]
  stream = dataset_iterator.Stream(rows, count=count, key=key)
  return [int(question.id) for question in stream]


@hypothesis.given(of=st.integers(1, 40), key=st.integers(0, 2**40))
def test_each_epoch_has_every_question_once(of, key):
  taken = order(3 * of, of=of, key=key)
  for epoch in range(3):
    assert sorted(taken[epoch * of :][:of]) == list(range(of))


def test_permutation_is_frozen_across_versions():
  # Values from NumPy's SeedSequence and PCG64; resuming depends on them.
  seeds = (np.random.SeedSequence((42, epoch)) for epoch in (0, 1))
  streams = (np.random.Generator(np.random.PCG64(seed)) for seed in seeds)
  by_hand = [stream.permutation(5) for stream in streams]
  assert order(10, of=5, key=42) == np.concatenate(by_hand).tolist()


def test_a_stream_is_a_sequence_that_knows_its_position():
  stream = dataset_iterator.Stream(ROWS, count=13, key=3)
  ids = [question.id for question in stream]
  assert len(ids) == len(stream) == 13
  assert stream[-1].id == ids[-1] and stream[7].id == ids[7]
  for index in (13, -14):
    with pytest.raises(IndexError):
      stream[index]
  listed = {"epoch": 2, "position": 2, "of": 5}
  assert dataset_iterator.progress(ROWS, 12) == listed
  assert dataset_iterator.progress(stream, 12) == listed | {"key": 3}


@pytest.fixture(scope="module")
def parts():
  return small_run.parts()


def _stream(parts, *, key=7, questions=6):
  """Returns a stream of 16 questions, four rollouts, over six distinct ones."""
  rows = parts["questions"][:questions]
  return parts | {"questions": dataset_iterator.Stream(rows, count=16, key=key)}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, parts):
  """Returns a run that was killed in its third rollout and resumed."""
  folder = tmp_path_factory.mktemp("run")
  small_run.train(folder, _stream(parts), rollouts=3)
  small_run.train(folder, _stream(parts))
  return folder


def test_resumed_run_takes_the_streams_questions(resumed, parts):
  rows = order(16, of=6, key=7)
  for rollout in (1, 3):
    path = resumed / "trajectories" / f"rollout-{rollout:05d}.jsonl"
    groups = map(json.loads, path.read_text().splitlines())
    assert [group["question_id"] for group in groups] == [
      parts["questions"][row].id for row in rows[4 * rollout :][:4]
    ]


def test_the_cursor_is_in_the_metrics_and_the_checkpoint(resumed):
  lines = (resumed / "metrics.jsonl").read_text().splitlines()
  values = map(json.loads, lines)
  places = [(v["data/epoch"], v["data/position"]) for v in values]
  assert places == [(0, 4), (1, 2), (2, 0), (2, 4)]
  for rollout, (epoch, position) in ((2, (1, 2)), (4, (2, 4))):
    folder = resumed / "checkpoints"
    progress = checkpoint.read_json(folder, rollout, "progress")
    expected = {"epoch": epoch, "key": 7, "position": position, "of": 6}
    assert progress["questions"] == expected


@pytest.mark.parametrize("change", [{"key": 8}, {"questions": 5}])
def test_resuming_with_another_stream_is_rejected(resumed, parts, change):
  with pytest.raises(checkpoint.MismatchError, match="questions.*'key'"):
    small_run.train(resumed, _stream(parts, **change))
