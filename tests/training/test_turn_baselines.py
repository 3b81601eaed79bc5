"""Tests baselines of turns: by hand, against loops, and their mean gradient."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import grpo
from anysearch_jax.training import turn_advantages

OBJECTIVE = config_lib.ObjectiveConfig(normalize="none", baseline="turn")


def trajectory(q, g, shown):
  """`shown` has the passage of each search."""
  return types.Trajectory(
    types.Address(0, q, g),
    types.Question("q", "where?", ("tol",)),
    budget=4,
    scaffold=False,
    token_ids=np.arange(4 * len(shown) + 3, dtype=np.int32),
    authors=np.ones(4 * len(shown) + 3, np.int8),
    logps=np.zeros(4 * len(shown) + 3, np.float32),
    versions=np.zeros(4 * len(shown) + 3, np.int32),
    spans=(),
    searches=len(shown),
    queries=("q",) * len(shown),
    violation=False,
    outcome=types.Outcome.ANSWERED,
    search_ends=tuple(3 + 4 * n for n in range(len(shown))),
    observations=tuple(
      types.Observation("search", "q", n, (types.Passage(name, name, ""),))
      for n, name in enumerate(shown)
    ),
  )


def group(*shown, q=0):
  return {(q, g): trajectory(q, g, names) for g, names in enumerate(shown)}


def test_by_hand():
  """Four trajectories; two have the same first passage, one no search."""
  members = group("ab", "ac", "b", "")
  totals = np.float32([[1, 0, 0, 1]])
  found = turn_advantages.against_others(members, totals, config=OBJECTIVE)
  scale = 3 / 4
  expected = [
    # At first all four; after "a" the second; after "ab" nobody else, so "a".
    [scale * (1 - 1 / 3), scale * (1 - 0), scale * (1 - 0)],
    [scale * (0 - 2 / 3), scale * (0 - 1), scale * (0 - 1)],
    # After "b" nobody else stands, so all.
    [scale * (0 - 2 / 3), scale * (0 - 2 / 3)],
    [scale * (1 - 1 / 3)],
  ]
  for g, values in enumerate(expected):
    np.testing.assert_allclose(found[0, g], values, rtol=1e-6)


@pytest.mark.parametrize("normalize", grpo.NORMALIZERS)
def test_before_the_first_passage_it_is_the_groups_advantage(normalize):
  config = dataclasses.replace(OBJECTIVE, normalize=normalize)
  rng = np.random.default_rng(0)
  members, valid = {}, np.zeros((6, 5), bool)
  for q, g in itertools.product(range(6), range(5)):
    if rng.random() < 0.8:  # The others failed.
      valid[q, g] = True
      shown = rng.choice(list("ab"), rng.integers(0, 4))
      members[q, g] = trajectory(q, g, shown)
  totals = rng.random((6, 5)).astype(np.float32)
  expected = grpo.advantages(
    totals, valid, epsilon=config.advantage_epsilon, normalize=normalize
  )
  found = turn_advantages.against_others(members, totals, config=config)
  for place, turns in found.items():
    assert turns.dtype == np.float32
    assert turns.shape == (members[place].searches + 1,)
    np.testing.assert_allclose(turns[0], expected[place], atol=2e-5)
  added = turn_advantages.of_turns(
    members, totals, np.asarray(expected), {}, config=config
  )
  for place, turns in added.items():
    whole = float(expected[place])
    tokens = turn_advantages.of_tokens(members[place], whole, turns)
    ends = (*members[place].search_ends, len(tokens) - 1)
    np.testing.assert_allclose(
      [tokens[end] for end in ends], found[place], atol=1e-5
    )


def test_a_lone_trajectory_and_equal_rewards_learn_nothing():
  for members in (group("ab"), group("ab", "ab", "c")):
    totals = np.full((1, len(members)), 0.65, np.float32)
    for normalize in grpo.NORMALIZERS:
      config = dataclasses.replace(OBJECTIVE, normalize=normalize)
      found = turn_advantages.against_others(members, totals, config=config)
      for turns in found.values():
        np.testing.assert_allclose(turns, 0, atol=1e-6)


def test_rewards_of_searches_are_added():
  members = group("a", "a")
  steps = {(0, 0): np.float32([1]), (0, 1): np.float32([0])}
  totals = np.float32([[1, 0]])
  added = turn_advantages.of_turns(
    members, totals, np.float32([[0.5, -0.5]]), steps, config=OBJECTIVE
  )
  # Both turns of both have the group's advantage, and the search +-.5 more.
  np.testing.assert_allclose(added[0, 0], [0.5, 0])
  np.testing.assert_allclose(added[0, 1], [-0.5, 0])


def test_the_mean_gradient_is_that_of_the_episode_with_less_noise():
  """An episode of two coins: what the second shows cannot help the first.

  P(passage) = 1/2 each; R = first passage + second choice. The gradient of the
  second choice's logit is p (1 - p) = 1/4 in the mean.
  """
  rng = np.random.default_rng(0)
  gradients = {"turn": [], "group": []}
  for _ in range(4000):
    luck, choice = rng.integers(0, 2, (2, 6))
    members = group(*("ab"[x] for x in luck))
    totals = np.float32([2 * luck + choice])
    found = turn_advantages.against_others(members, totals, config=OBJECTIVE)
    score = choice - 0.5  # Of the logit.
    last = np.array([found[0, g][1] for g in range(6)])
    first = np.array([found[0, g][0] for g in range(6)])
    gradients["turn"].append(np.mean(last * score))
    gradients["group"].append(np.mean(first * score))
  for name, values in gradients.items():
    error = np.std(values) / np.sqrt(len(values))
    # Both are (G - 1) / G of the gradient.
    assert abs(np.mean(values) - 5 / 6 / 4) < 4 * error, name
  assert np.var(gradients["turn"]) < 0.6 * np.var(gradients["group"])
