"""Tests what the benches share: examples."""

from __future__ import annotations

import math

import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.training import batching, throughput
from bench import policies


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
