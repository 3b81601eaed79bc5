"""Packing: every token once, with its own target, weight and place."""

from __future__ import annotations

import dataclasses

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from anysearch_jax import config as config_lib
from anysearch_jax.training import batching

CONFIG = config_lib.BatchConfig(
  row_lengths=(8, 20), micro_batch_tokens=40, max_micro_batches=30
)


def example(size, seed=0):
  rng = np.random.default_rng([size, seed])
  return batching.Example(
    token_ids=rng.integers(0, 1000, size).astype(np.int32),
    weights=(rng.random(size) * (rng.random(size) < 0.7)).astype(np.float32),
    logps=-rng.random(size).astype(np.float32),
    advantage=float(np.float32(rng.normal())),
  )


def examples(sizes):
  return [example(size, seed) for seed, size in enumerate(sizes)]


def contents(token_ids, weights, logps, advantage):
  """A sequence as a value; its first token is no target."""
  return (
    tuple(token_ids.tolist()),
    tuple(weights[1:].tolist()),
    tuple(logps[1:].tolist()),
    advantage,
  )


def unpack(rows):
  """Every segment as `contents`, in the order of micro-batch, row, place."""
  out = []
  flat = {
    name: x.reshape(-1, x.shape[-1])
    for name, x in rows._asdict().items()
    if name != "used"
  }
  for r in range(len(flat["tokens"])):
    row = {name: x[r] for name, x in flat.items()}
    for segment in range(1, row["segment_ids"].max() + 1):
      here = np.flatnonzero(row["segment_ids"] == segment)
      np.testing.assert_array_equal(here, np.arange(here[0], here[-1] + 1))
      np.testing.assert_array_equal(row["positions"][here], range(len(here)))
      tokens, targets = row["tokens"][here], row["targets"][here]
      np.testing.assert_array_equal(tokens[1:], targets[:-1])
      (advantage,) = set(row["advantage"][here].tolist())
      out.append(
        contents(
          np.concatenate([tokens, targets[-1:]]),
          np.concatenate([[0], row["weight"][here]]),
          np.concatenate([[0], row["behaviour_logp"][here]]),
          advantage,
        )
      )
    padding = row["segment_ids"] == 0
    for x in row.values():
      assert not x[padding].any()
  return out


sizes_strategy = st.lists(st.integers(2, 21), max_size=40)


@hypothesis.given(sizes_strategy)
def test_every_sequence_is_packed_once_and_whole(sizes):
  sequences = examples(sizes)
  batch = batching.pack(sequences, config=CONFIG)
  found = [packed for rows in batch for packed in unpack(rows)]
  expected = [contents(*dataclasses.astuple(s)) for s in sequences]
  assert sorted(found) == sorted(expected)


@hypothesis.given(sizes_strategy)
def test_shapes_are_the_configurations_and_used_counts_what_holds_tokens(sizes):
  batch = batching.pack(examples(sizes), config=CONFIG)
  for rows, (b, t) in zip(batch, [(5, 8), (2, 20)], strict=True):
    for name, x in rows._asdict().items():
      assert x.shape == (() if name == "used" else (30, b, t))
    occupied = (rows.segment_ids > 0).any((1, 2))
    np.testing.assert_array_equal(occupied, np.arange(30) < rows.used)
  total = sum(float(rows.weight.sum(dtype=np.float64)) for rows in batch)
  given = sum(
    float(s.weights[1:].sum(dtype=np.float64)) for s in examples(sizes)
  )
  assert total == pytest.approx(given, rel=1e-6)


def test_packing_is_a_function_of_its_arguments():
  sizes = [9, 3, 3, 21, 5, 5, 14, 2]
  first = batching.pack(examples(sizes), config=CONFIG)
  second = batching.pack(examples(sizes), config=CONFIG)
  jax.tree.map(np.testing.assert_array_equal, first, second)


def test_a_small_case_by_hand():
  # Sizes 5, 3, 2 as predictions: the longest first, then what fits beside it.
  config = dataclasses.replace(
    CONFIG, row_lengths=(7,), micro_batch_tokens=14, max_micro_batches=1
  )
  sequences = [
    batching.Example(
      np.arange(start, start + size, dtype=np.int32),
      np.full(size, weight, np.float32),
      np.full(size, -weight, np.float32),
      weight,
    )
    for start, size, weight in [(10, 4, 0.5), (20, 6, 0.25), (30, 3, 1.0)]
  ]
  (rows,) = batching.pack(sequences, config=config)
  assert rows.used == 1
  np.testing.assert_array_equal(
    rows.tokens[0], [[20, 21, 22, 23, 24, 30, 31], [10, 11, 12, 0, 0, 0, 0]]
  )
  np.testing.assert_array_equal(
    rows.targets[0], [[21, 22, 23, 24, 25, 31, 32], [11, 12, 13, 0, 0, 0, 0]]
  )
  np.testing.assert_array_equal(
    rows.positions[0], [[0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 0, 0, 0, 0]]
  )
  np.testing.assert_array_equal(
    rows.segment_ids[0], [[1, 1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0, 0]]
  )
  weight = [[0.25] * 5 + [1.0] * 2, [0.5] * 3 + [0.0] * 4]
  np.testing.assert_array_equal(rows.weight[0], weight)
  np.testing.assert_array_equal(rows.advantage[0], weight)
  np.testing.assert_array_equal(rows.behaviour_logp[0], np.negative(weight))


def test_short_sequences_take_the_room_that_long_rows_leave():
  # One micro-batch of two rows of 20: 17 leaves 3, the second row is free.
  short, long = batching.pack(examples([18, 4, 9, 9]), config=CONFIG)
  assert (short.used, long.used) == (0, 1)
  segments = (long.segment_ids[0] > 0).sum(-1)
  np.testing.assert_array_equal(segments, [17 + 3, 8 + 8])


def test_no_sequence_gives_no_work():
  batch = batching.pack([], config=CONFIG)
  assert [int(rows.used) for rows in batch] == [0, 0]


def test_a_sequence_longer_than_every_row_is_refused():
  with pytest.raises(ValueError, match=r"22 tokens does not fit .* row of 20"):
    batching.pack([example(22)], config=CONFIG)


def test_more_micro_batches_than_configured_are_refused():
  config = dataclasses.replace(CONFIG, max_micro_batches=2)
  batching.pack(examples([21] * 4), config=config)
  sentence = "needs 3 micro-batches of 2 rows x 20 tokens.* is 2; raise it"
  with pytest.raises(ValueError, match=sentence):
    batching.pack(examples([21] * 5), config=config)
