"""Tests GAE and the critic's loss against direct float64 implementations."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from anysearch_jax.algorithms import ppo


def of_episode(rewards, values, gamma, lam):
  """Returns an episode's advantages, as sums of discounted deltas."""
  following = [*values[1:], 0.0]
  deltas = [
    r + gamma * after - v for r, v, after in zip(rewards, values, following)
  ]
  return [
    sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
    for t in range(len(deltas))
  ]


def expected(reward, value, mask, segment_ids, gamma, lam):
  """Returns the same for a packed row `[T]`, one episode after another."""
  out = np.zeros(len(reward))
  for segment in set(segment_ids[mask].tolist()):
    steps = np.flatnonzero(mask & (segment_ids == segment))
    rewards, values = (x[steps].astype(float).tolist() for x in (reward, value))
    out[steps] = of_episode(rewards, values, gamma, lam)
  return out


def test_a_row_by_hand():
  # Two episodes and padding: the first has an observation between its steps,
  # the second begins with a prompt. GAE skips tokens of the environment.
  segment_ids = np.array([1, 1, 1, 1, 2, 2, 2, 0])
  mask = np.array([1, 0, 0, 1, 0, 1, 1, 0], bool)
  value = np.float32([0.5, 9, 9, 0.25, 9, 1.0, 2.0, 9])
  reward = np.float32([0.125, 7, 7, 1.0, 7, 0.0, 3.0, 7])
  advantage, returns = ppo.gae(
    reward, value, mask, segment_ids, gamma=0.5, lam=0.5
  )
  # First episode, last step first: 1 - .25; .125 + .5 x .25 - .5 + .25 x .75.
  # Second episode, last step first: 3 - 2; 0 + .5 x 2 - 1 + .25 x 1.
  by_hand = [-0.0625, 0, 0, 0.75, 0, 0.25, 1.0, 0]
  np.testing.assert_array_equal(advantage, by_hand)
  np.testing.assert_array_equal(returns, [0.4375, 0, 0, 1, 0, 1.25, 3, 0])


def packed(rng):
  """Draws rows with several segments, tokens of both authors and padding."""
  segment_ids = np.zeros((6, 40), np.int32)
  for row in segment_ids:
    end = rng.integers(20, 41)
    cuts = np.sort(rng.choice(np.arange(1, end), 3, replace=False))
    row[:end] = 1 + np.searchsorted(cuts, np.arange(end), side="right")
  mask = (segment_ids > 0) & (rng.random(segment_ids.shape) < 0.6)
  reward, value = rng.normal(size=(2, *mask.shape)).astype(np.float32)
  return reward, value, mask, segment_ids


@pytest.mark.parametrize(
  ("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (1.0, 0.0), (0.95, 1.0), (0.0, 1)]
)
def test_packed_rows_equal_separate_episodes(gamma, lam):
  rows = packed(np.random.default_rng(0))
  advantage, returns = ppo.gae(*rows, gamma=gamma, lam=lam)
  oracle = np.stack([expected(*row, gamma, lam) for row in zip(*rows)])
  np.testing.assert_allclose(advantage, oracle, atol=2e-6)
  _, value, mask, _ = rows
  np.testing.assert_allclose(returns, (oracle + value) * mask, atol=2e-6)
  assert advantage.dtype == returns.dtype == np.float32
  assert not np.asarray(advantage)[~mask].any()


def test_values_off_the_mask_have_no_effect():
  reward, value, mask, segment_ids = packed(np.random.default_rng(2))
  how = {"gamma": 0.9, "lam": 0.8}
  before = ppo.gae(reward, value, mask, segment_ids, **how)
  garbage = [np.where(mask, x, np.nan) for x in (reward, value)]
  after = ppo.gae(*garbage, mask, segment_ids, **how)
  jax.tree.map(np.testing.assert_array_equal, before, after)


def test_whitening_is_over_the_model_tokens_of_all_batches():
  rng = np.random.default_rng(3)
  shapes = [(2, 3, 8), (1, 2, 16)]
  advantages = [rng.normal(3, 2, s).astype(np.float32) for s in shapes]
  masks = [rng.random(s) < 0.5 for s in shapes]
  found = ppo.whiten(
    [np.where(m, x, np.nan) for x, m in zip(advantages, masks)], masks
  )
  tokens = np.concatenate([x[m] for x, m in zip(advantages, masks)])
  tokens = tokens.astype(float)
  for white, x, m in zip(found, advantages, masks):
    np.testing.assert_allclose(
      white[m], (x[m] - tokens.mean()) / tokens.std(), atol=1e-5
    )
    assert not np.asarray(white)[~m].any()


@pytest.mark.parametrize("count", [0, 1, 8])
def test_equal_advantages_whiten_to_exact_zeros(count):
  mask = np.arange(8) < count
  (white,) = ppo.whiten([np.full(8, 0.3, np.float32)], [mask])
  np.testing.assert_array_equal(white, np.zeros(8))


def oracle_loss(value, old, returns, weight, clip):
  """Returns the loss, its slopes and the clipped weight, in scalar code."""
  total, slopes, held = 0.0, [], 0.0
  for v, o, r, w in zip(*(x.tolist() for x in (value, old, returns, weight))):
    near = min(max(v, o - clip), o + clip) if clip else v
    total += w * max((v - r) ** 2, (near - r) ** 2) / 2
    is_held = (near - r) ** 2 > (v - r) ** 2
    held += w * is_held
    slopes.append(0.0 if is_held else w * (v - r))
  return total, slopes, held


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_the_value_loss_equals_its_formula(clip):
  rng = np.random.default_rng(4)
  value, old, returns = rng.normal(size=(3, 60))
  weight = rng.random(60) * (rng.random(60) < 0.7)
  weight /= weight.sum()
  total, slopes, held = oracle_loss(value, old, returns, weight, clip)
  assert bool(held) == bool(clip)

  def loss(value, old, returns):
    return ppo.value_loss(value, old, returns, np.float32(weight), clip=clip)

  live = weight > 0
  arrays = np.float32(np.where(live, [value, old, returns], np.nan))
  slope_of = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (found, sums), slope = slope_of(*arrays)
  np.testing.assert_allclose(found, total, rtol=1e-5)
  np.testing.assert_allclose(slope, slopes, atol=1e-7)
  np.testing.assert_allclose(sums["clip_fraction"], held, atol=1e-6)
  np.testing.assert_allclose(
    sums["mean"], np.sum(weight * value), rtol=1e-4, atol=1e-6
  )
  names = (
    "weight",
    "returns",
    "returns_squared",
    "residual",
    "residual_squared",
  )
  explained = ppo.explained_variance(*(float(sums[name]) for name in names))

  def variance(x):
    return np.average((x - np.average(x, weights=weight)) ** 2, weights=weight)

  np.testing.assert_allclose(
    explained, 1 - variance(returns - value) / variance(returns), rtol=1e-4
  )


@pytest.mark.parametrize(
  ("values", "returns", "explained"),
  [
    ([1.0, 3.0], [1.0, 3.0], 1.0),
    ([2.0, 2.0], [1.0, 3.0], 0.0),
    ([3.0, 1.0], [1.0, 3.0], -3.0),
    ([0.0, 5.0], [2.0, 2.0], 0.0),
  ],
)
def test_explained_variance_by_hand(values, returns, explained):
  v, r = np.array(values), np.array(returns)
  found = ppo.explained_variance(
    1.0, r.mean(), (r**2).mean(), (r - v).mean(), ((r - v) ** 2).mean()
  )
  assert found == pytest.approx(explained)
