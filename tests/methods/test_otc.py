"""OTC-PO's reward: corner cases by hand, formulas in float64."""

from __future__ import annotations

import dataclasses
import math

import chex
import numpy as np
import pytest
import spoken
from absl.testing import parameterized

from anysearch_jax.config import methods as config_methods
from anysearch_jax.methods import otc

GRPO = config_methods.OtcConfig()
PPO = config_methods.OtcConfig(form="ppo", c=2.0, alpha=0.5)
UNJITTED = otc.reward.__wrapped__


def productivity(m, n, c):
  """Returns r_tool of one trajectory; n is None in the PPO form."""
  if n is None:
    return math.cos(m * math.pi / (2 * m + c))
  f = 0 if m == n == 0 else m if n == 0 else 2 * n * m / (m + n)
  if f == n == 0:
    return 1.0
  if n == 0:
    return math.cos(m * math.pi / (2 * m + c))
  return math.sin(f * math.pi / (2 * n))


def expected(em, searches, valid, c: config_methods.OtcConfig):
  """Returns a group's rewards in float64."""
  right = [i for i in range(len(em)) if valid[i] and em[i]]
  n = min((int(searches[i]) for i in right), default=0)
  out = [0.0] * len(em)
  for i in right:
    m = int(searches[i])
    out[i] = c.alpha * productivity(m, n if c.form == "grpo" else None, c.c)
  return out


class RewardTest(chex.TestCase):
  @chex.variants(with_jit=True, without_jit=True)
  def test_grpo_corners(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    em = [
      [1, 1, 1, 0],  # n = 0: cos(0), cos(pi/6), cos(2 pi/8).
      [1, 1, 1, 0],  # n = 1: sin(pi/2), sin(2 pi/3), sin(3 pi/4).
      [1, 0, 0, 0],  # n = 3: there is one right answer.
      [0, 0, 0, 0],  # No right answer, so n is undefined.
    ]
    searches = [[0, 1, 2, 0], [1, 2, 3, 0], [3, 0, 1, 2], [0, 1, 2, 3]]
    out = reward(spoken.outcomes(em, searches=searches), config=GRPO)
    half = math.sqrt(0.5)
    np.testing.assert_allclose(
      out["total"],
      [
        [1, math.sqrt(0.75), half, 0],
        [1, math.sqrt(0.75), half, 0],
        [1, 0, 0, 0],
        [0, 0, 0, 0],
      ],
      atol=1e-6,
    )
    chex.assert_type(list(out.values()), np.float32)

  @chex.variants(with_jit=True, without_jit=True)
  def test_ppo_corners(self):
    reward = self.variant(UNJITTED, static_argnames="config")
    # c = 2, alpha = 1/2: cos(0), cos(pi/4), cos(2 pi/6), then many searches.
    told = spoken.outcomes([1, 1, 1, 0], searches=[0, 1, 2, 0])
    np.testing.assert_allclose(
      reward(told, config=PPO)["total"],
      [0.5, 0.5 * math.sqrt(0.5), 0.25, 0],
      atol=1e-6,
    )

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(GRPO, PPO)
  def test_the_formulas_of_the_paper(self, c):
    reward = self.variant(UNJITTED, static_argnames="config")
    rng = np.random.default_rng(0)
    for group in (1, 5, 8):
      told = spoken.drawn(rng, 300, group)
      out = reward(told, config=c)
      rows = zip(told.em, told.searches, told.valid)
      np.testing.assert_allclose(
        out["total"], [expected(*row, c) for row in rows], atol=1e-6
      )
      chex.assert_trees_all_equal(out, reward(spoken.spoiled(told), config=c))


def test_failed_episode_is_not_the_fewest_searches_of_its_group():
  told = spoken.outcomes([1, 1], searches=[0, 2], valid=[False, True])
  np.testing.assert_allclose(
    otc.reward(told, config=GRPO)["total"], [0, 1], atol=1e-6
  )


def test_reward_of_right_answer_falls_with_searches():
  searches = np.arange(9)[None]
  told = spoken.outcomes(np.ones((1, 9)), searches=searches)
  for c in (GRPO, PPO):
    total = otc.reward(told, config=c)["total"]
    assert (np.diff(total) < 0).all() and (total > 0).all()


def test_larger_c_reduces_the_cost_of_a_search():
  told = spoken.outcomes([[1.0]], searches=[[3]])
  worth = [
    otc.reward(told, config=dataclasses.replace(PPO, c=c))["total"]
    for c in (0.5, 2.0, 8.0)
  ]
  assert worth[0] < worth[1] < worth[2]


def test_unknown_form_is_rejected():
  told = spoken.outcomes([1])
  with pytest.raises(ValueError, match="'reinforce'.*grpo or ppo"):
    otc.reward(told, config=dataclasses.replace(GRPO, form="reinforce"))
