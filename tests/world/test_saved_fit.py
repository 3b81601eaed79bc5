"""A fit that is stopped or killed resumes with the bits of one that is not."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder
from anysearch_jax.world import saved_fit, warm_start

A = architecture_lib.Architecture(
  family="qwen3",
  vocab_size=23,
  d_model=8,
  layers=1,
  heads=2,
  kv_heads=1,
  head_dim=4,
  mlp_dim=16,
  qk_norm=True,
  tied=True,
)
STEPS = 6


def pool(seed=0):
  rng = np.random.default_rng(seed)
  return [
    warm_start.Demonstration(
      rng.integers(0, 23, n).astype(np.int32), np.ones(n, np.float32)
    )
    for n in (7, 12, 9, 15, 11)
  ]


def fit(saved=None, **kwargs):
  return warm_start.fit(
    decoder.initialize(A, 3),
    A,
    pool(),
    seed=5,
    config=config_lib.WarmStartConfig(steps=STEPS, batch_tokens=24),
    optimizer=config_lib.OptimizerConfig(),
    batch=config_lib.BatchConfig(
      row_lengths=(32,), micro_batch_tokens=32, max_micro_batches=4
    ),
    saved=saved,
    **kwargs,
  )


def assert_same_bits(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


class KilledError(BaseException):
  """Stands for a kill: nothing after it runs."""


def test_a_killed_fit_repeats_the_steps_since_its_last_save(tmp_path):
  path, reached = tmp_path / "state", itertools.count(1)

  def kill():  # Before the sixth step; the fourth was saved.
    if next(reached) == STEPS:
      raise KilledError
    return False

  with pytest.raises(KilledError):
    fit(path, save_every=2, stop=kill)
  again = itertools.count(1)
  found = fit(path, save_every=2, stop=lambda: next(again) < 0)
  assert next(again) - 1 == 2  # The fifth and the sixth.
  assert_same_bits(found, fit())


@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_stopped_fit_saves_where_it_is(tmp_path, before):
  path, asked = tmp_path / "state", itertools.count()
  assert fit(path, stop=lambda: next(asked) == before) is None
  again = itertools.count(1)
  found = fit(path, stop=lambda: next(again) < 0)
  assert next(again) - 1 == STEPS - before
  assert_same_bits(found, fit())


def test_a_finished_fit_takes_no_step(tmp_path):
  path = tmp_path / "state"
  trained = fit(path)

  def stop():
    raise AssertionError("a step")

  assert_same_bits(fit(path, stop=stop), trained)


def test_a_damaged_position_is_refused(tmp_path):
  path = tmp_path / "state"
  fit(path, stop=lambda: True)
  path.write_bytes(path.read_bytes()[:-7])
  with pytest.raises(ValueError, match=r"state: not a whole .* begin anew"):
    fit(path)


def test_a_position_of_another_policy_is_refused(tmp_path):
  path = tmp_path / "state"
  fit(path, stop=lambda: True)
  with pytest.raises(ValueError, match="arrays of another policy"):
    saved_fit.load(path, {"x": np.zeros(3)})
