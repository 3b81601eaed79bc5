"""Tests packing: each token occurs once, with its target, weight and place."""

from __future__ import annotations

import dataclasses
import functools
import math

import chex
import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import grpo
from anysearch_jax.training import batching

CONFIG = config_lib.BatchConfig(
  row_lengths=(8, 20), micro_batch_tokens=40, max_micro_batches=30
)


LOSS = jax.jit(
  functools.partial(grpo.grpo_loss, config=config_lib.ObjectiveConfig())
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


def predictions(sequence):
  """Returns a sequence's predictions, one tuple of values for each."""
  size = len(sequence.token_ids) - 1
  return list(
    zip(
      sequence.token_ids[:-1].tolist(),
      sequence.token_ids[1:].tolist(),
      range(size),
      sequence.logps[1:].tolist(),
      sequence.logps[1:].tolist(),
      [sequence.advantage] * size,
      sequence.weights[1:].tolist(),
    )
  )


def segments(rows):
  """Returns all segments as `predictions`, by micro-batch, row and place."""
  out = []
  flat = {
    name: x.reshape(-1, x.shape[-1])
    for name, x in rows._asdict().items()
    if name != "used" and x is not None
  }
  ids = flat.pop("segment_ids")
  for x in flat.values():
    assert not x[ids == 0].any()
  for r in np.flatnonzero(ids.any(-1)):
    for segment in range(1, ids[r].max() + 1):
      here = np.flatnonzero(ids[r] == segment)
      np.testing.assert_array_equal(here, np.arange(here[0], here[-1] + 1))
      out.append(list(zip(*(x[r, here].tolist() for x in flat.values()))))
  return out


sizes_strategy = st.lists(st.integers(2, 21), max_size=40)
configs = st.builds(
  config_lib.BatchConfig,
  row_lengths=st.sampled_from([(20,), (8, 20), (1, 5, 33)]),
  micro_batch_tokens=st.integers(1, 100),
  max_micro_batches=st.just(40),
  max_segments=st.integers(1, 5),
)


@hypothesis.given(sizes_strategy, configs, st.integers(1, 4))
def test_every_sequence_is_packed_once_and_whole(sizes, config, multiple):
  sequences = examples(sizes)
  batch = batching.pack(sequences, config=config, multiple=multiple)
  found = [packed for rows in batch for packed in segments(rows)]
  expected = [predictions(s) for s in sequences]
  assert sorted(found) == sorted(expected)
  # Exact: the same numbers are summed in another order without rounding.
  weights = [x for rows in batch for x in rows.weight.ravel().tolist()]
  assert math.fsum(weights) == math.fsum(
    x for s in sequences for x in s.weights[1:].tolist()
  )
  counts = [size - 1 for size in sizes]
  used = batching.micro_batches(counts, config=config, multiple=multiple)
  assert used == tuple(int(rows.used) for rows in batch)
  abstract = batching.abstract(config, multiple=multiple)
  chex.assert_trees_all_equal_shapes_and_dtypes(batch, abstract)
  for rows, length in zip(batch, config.row_lengths, strict=True):
    a, b, t = rows.tokens.shape
    assert (a, t) == (40, length)
    assert b % multiple == 0
    assert b == multiple or b * t <= config.micro_batch_tokens
    # Another `multiple` rows would exceed the micro-batch's tokens.
    assert (b + multiple) * t > config.micro_batch_tokens
    assert rows.segment_ids.max() <= config.max_segments
    occupied = (rows.segment_ids > 0).any((1, 2))
    np.testing.assert_array_equal(occupied, np.arange(a) < rows.used)


@pytest.mark.parametrize(
  ("changes", "multiple"),
  [
    ({}, 4),
    ({"max_segments": 1}, 2),
    ({"row_lengths": (5, 9, 33), "max_segments": 2}, 3),
  ],
)
def test_the_loss_does_not_depend_on_the_packing(changes, multiple):
  sequences = examples([9, 3, 3, 21, 5, 5, 14, 2, 20, 8])

  def loss(batch):
    total = 0.0
    for rows in batch:
      # Like a policy's: a function of the prediction, not of its neighbours.
      logp = -1 - np.sin(rows.tokens + 2 * rows.targets + 3 * rows.positions)
      logp = logp.astype(np.float32)
      rest = (rows.behaviour_logp, logp / 2, rows.advantage, rows.weight)
      total += LOSS(logp, *rest)[0]
    return float(total)

  config = dataclasses.replace(CONFIG, **changes)
  packed = loss(batching.pack(sequences, config=config, multiple=multiple))
  alone = dataclasses.replace(
    CONFIG, row_lengths=(20,), micro_batch_tokens=20, max_micro_batches=1
  )
  expected = [loss(batching.pack([s], config=alone)) for s in sequences]
  assert abs(sum(expected)) > 1
  assert packed == pytest.approx(sum(expected), rel=1e-5)


def test_a_small_case_by_hand():
  # 5, 3 and 2 predictions: the longest first, then those that fit beside it.
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


def test_short_sequences_fill_the_free_space_of_long_rows():
  # One micro-batch of two rows of 20: 17 leaves 3, the second row is empty.
  short, long = batching.pack(examples([18, 4, 9, 9]), config=CONFIG)
  assert (short.used, long.used) == (0, 1)
  segments = (long.segment_ids[0] > 0).sum(-1)
  np.testing.assert_array_equal(segments, [17 + 3, 8 + 8])


@pytest.mark.parametrize(
  ("mean", "spread"),
  [(2000, 0.2), (2560, 0.3), (2816, 0.2), (3000, 0.4), (3600, 0.3)],
)
def test_rows_of_trajectories_are_almost_full(mean, spread):
  """The longest first, each in the fullest row: up to 8 % stay free."""
  rng = np.random.default_rng(0)
  sizes = np.clip(rng.normal(mean, spread * mean, 512), 300, 8192).astype(int)
  config = dataclasses.replace(
    CONFIG,
    row_lengths=(8192,),
    micro_batch_tokens=16384,
    max_micro_batches=256,
    max_segments=16,
  )
  (used,) = batching.micro_batches(sizes.tolist(), config=config)
  assert 0.91 < sizes.sum() / (used * 16384) <= 1


def test_what_does_not_fit_is_refused():
  with pytest.raises(ValueError, match=r"22 tokens does not fit .* row of 20"):
    batching.pack([example(22)], config=CONFIG)
  config = dataclasses.replace(CONFIG, max_micro_batches=2)
  batching.pack(examples([21] * 4), config=config)
  sentence = "needs 3 micro-batches of 2 rows x 20 tokens.* is 2; raise it"
  with pytest.raises(ValueError, match=sentence):
    batching.pack(examples([21] * 5), config=config)
