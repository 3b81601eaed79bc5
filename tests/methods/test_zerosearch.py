"""ZeroSearch's reward and noise schedule."""

from __future__ import annotations

import dataclasses

import chex
import numpy as np
import pytest
import spoken

from anysearch_jax.config import methods as config_methods
from anysearch_jax.methods import zerosearch

CONFIG = config_methods.ZeroSearchConfig()
UNJITTED = zerosearch.reward.__wrapped__


class RewardTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_reward_is_f1_and_zero_for_failed_episodes(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    told = spoken.drawn(np.random.default_rng(0), 50, 5)
    assert not told.valid.all()
    out = reward(told, config=CONFIG)
    f1 = np.where(told.valid, told.f1, 0)
    chex.assert_trees_all_close(out, {"f1": f1, "total": f1}, atol=0)
    chex.assert_trees_all_equal(
      out, reward(spoken.spoiled(told), config=CONFIG)
    )


def test_noise_rises_late_from_start_to_end():
  # (4^.5 - 1) / 3 = 1/3; (4^.25 - 1) / 3 = .1381.
  table = {0: 0.0, 0.25: 0.5 * 0.138071, 0.5: 0.5 / 3, 1: 0.5}
  for progress, expected in table.items():
    assert zerosearch.noise(progress, CONFIG) == pytest.approx(
      expected, abs=1e-6
    )


def test_noise_can_start_above_zero_fall_or_be_linear():
  c = dataclasses.replace(CONFIG, noise_start=0.75, noise_end=0.25)
  assert zerosearch.noise(0, c) == 0.75
  assert zerosearch.noise(0.5, c) == pytest.approx(0.75 - 0.5 / 3)
  assert zerosearch.noise(1, c) == 0.25
  line = dataclasses.replace(c, noise_base=1.0)
  assert zerosearch.noise(0.5, line) == 0.5


def test_progress_outside_unit_interval_is_rejected():
  with pytest.raises(ValueError, match="progress of 1.5"):
    zerosearch.noise(1.5, CONFIG)
