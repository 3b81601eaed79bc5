"""Tests what the benches share: ratios and examples."""

from __future__ import annotations

import math

import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.training import batching, throughput
from bench import harness, policies


def test_a_ratio_is_the_median_of_the_ratios_of_rounds():
  found = harness.Rounds(
    [
      {"ours": {"speed": 6.0 * n}, "theirs": {"speed": 2.0 * (n + 1)}}
      for n in (1, 3, 5)
    ]
  )
  assert found.values("ours", "speed") == [6, 18, 30]
  assert found.medians("theirs") == {"speed": 8}
  # By round: 6 / 4, 18 / 8, 30 / 12.
  assert found.ratios("speed", "ours", "theirs") == [1.5, 2.25, 2.5]
  ratio = found.ratio("speed", "ours", "theirs")
  assert ratio == (2.25, 1.5, 2.5)
  assert str(ratio) == "2.25x [1.50, 2.50]"


@pytest.mark.parametrize("tokens", [256, 1024, 2048 + 32])
def test_trajectories_fill_the_rows_that_run(tokens):
  config = config_lib.ExperimentConfig(
    batch=config_lib.BatchConfig(
      row_lengths=(256,), micro_batch_tokens=256, max_micro_batches=10
    )
  )
  work = policies.train_examples(row=256, vocab=64, tokens=tokens)
  (rows,) = packed = batching.pack(work, config=config.batch)
  assert throughput.count([packed]).tokens == tokens
  assert rows.used == math.ceil(tokens / 256)
  assert sum(x.weights[1:].sum() for x in work) == pytest.approx(1)
  assert len({x.weights.size for x in work}) > 1
