"""Tests advantages of single turns within groups against float64 loops."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from spoken import group, of_authors

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.algorithms import grpo
from anysearch_jax.methods import systems
from anysearch_jax.training import rewards_and_advantages, turn_advantages

PROMPT, MODEL, ENVIRONMENT = types.Author
OBJECTIVE = config_lib.ObjectiveConfig(turn_weight=0.5)
TURNS = config_lib.ObjectiveConfig(normalize="none", baseline="turn")
EPSILON = OBJECTIVE.advantage_epsilon
BATCH = config_lib.BatchConfig(
  row_lengths=(32,), micro_batch_tokens=64, max_micro_batches=8
)


def oracle(steps, normalize, weight):
  """Returns the advantages in float64, one search of one group at a time."""
  groups = {}
  for (q, g), rewards in steps.items():
    for s, reward in enumerate(rewards):
      groups.setdefault((q, s), {})[g] = float(reward)
  centred = {
    (q, s, g): r - sum(members.values()) / len(members)
    for (q, s), members in groups.items()
    for g, r in members.items()
  }
  divisor = {}
  for (q, s), members in groups.items():
    own = [centred[q, s, g] for g in members]
    of = {"group": own, "batch": list(centred.values()), "none": []}[normalize]
    spread = (sum(x * x for x in of) / max(len(of), 1)) ** 0.5
    divisor[q, s] = 1.0 if normalize == "none" else spread + EPSILON
  return {
    (q, g): [
      weight * centred[q, s, g] / divisor[q, s] for s in range(len(rewards))
    ]
    for (q, g), rewards in steps.items()
  }


@pytest.mark.parametrize("normalize", ["group", "batch", "none"])
def test_searches_are_compared_within_their_group(normalize):
  rng = np.random.default_rng(0)
  steps = {
    (q, g): rng.normal(size=rng.integers(0, 5)).astype(np.float32)
    for q in range(6)
    for g in range(5)
    if rng.random() < 0.9  # The others failed.
  }
  config = dataclasses.replace(OBJECTIVE, normalize=normalize)
  found = turn_advantages.search_advantages(steps, (6, 5), config=config)
  expected = oracle(steps, normalize, 0.5)
  assert found.keys() == expected.keys()
  for place, values in expected.items():
    np.testing.assert_allclose(found[place], values, rtol=2e-4, atol=1e-6)


def trajectory(g, answer, searches):
  """Has 2 tokens of a prompt, then 3 + 2 of each search, 4 of the answer."""
  turn = [MODEL] * 3 + [ENVIRONMENT] * 2
  return of_authors(
    0,
    g,
    [PROMPT] * 2 + turn * searches + [MODEL] * 4,
    spans=(types.Span(MODEL, f"<answer>{answer}</answer>"),),
    searches=searches,
    queries=("q",) * searches,
    search_ends=tuple(4 + 5 * n for n in range(searches)),
  )


@pytest.fixture(scope="module")
def scored():
  """Right after two searches, wrong after one, wrong at once."""
  members = (
    trajectory(0, "tol", 2),
    trajectory(1, "x", 1),
    trajectory(2, "x", 0),
  )
  method = dataclasses.replace(
    systems.trained(
      config_lib.ExperimentConfig(method=config_lib.MethodConfig("search_r1"))
    ),
    # The first search of a trajectory earns 1, or 0 in the second trajectory.
    steps=lambda t: np.float32([1 - t.address.sample, 5][: t.searches]),
  )
  return rewards_and_advantages.score(
    [group(*members)],
    np.array([2], np.int32),
    samples=3,
    method=method,
    objective=OBJECTIVE,
  )


def test_tokens_of_a_search_add_its_advantage_to_the_trajectorys(scored):
  high, low = 2**0.5, -(0.5**0.5)
  examples = rewards_and_advantages.examples(scored)
  expected = [
    [high + 0.5] * 5 + [high] * (2 + 3 + 2 + 4),
    [low - 0.5] * 5 + [low] * (2 + 4),
    low,
  ]
  for example, values in zip(examples, expected, strict=True):
    np.testing.assert_allclose(example.advantage, values, rtol=1e-4)


def test_records_and_metrics_tell_the_searches_apart(scored):
  (recorded,) = rewards_and_advantages.records(scored)
  first, second, last = recorded["trajectories"]
  assert first["steps"] == [1, 5] and second["steps"] == [0]
  np.testing.assert_allclose(first["turn_advantages"], [0.5, 0], rtol=1e-5)
  assert last["turn_advantages"] == []
  assert rewards_and_advantages.metrics(scored)["reward/steps"] == 2


def test_a_critic_takes_the_rewards_themselves(scored):
  first, *_ = rewards_and_advantages.examples(scored)
  given, total = first.rewards, scored.rewards["total"][0, 0]
  assert np.flatnonzero(given).tolist() == [4, 9, 15]
  assert given[[4, 9, 15]].tolist() == [1, 5, total]


# Baselines of turns.


def shown_to(q, g, shown):
  """Returns a trajectory; `shown` has the passage of each search."""
  return of_authors(
    q,
    g,
    [MODEL] * (4 * len(shown) + 3),
    searches=len(shown),
    queries=("q",) * len(shown),
    search_ends=tuple(3 + 4 * n for n in range(len(shown))),
    observations=tuple(
      types.Observation("search", "q", n, (types.Passage(name, name, ""),))
      for n, name in enumerate(shown)
    ),
  )


def all_shown(*shown):
  return {(0, g): shown_to(0, g, names) for g, names in enumerate(shown)}


def test_baselines_of_turns_by_hand():
  """Four trajectories; two have the same first passage, one no search."""
  members = all_shown("ab", "ac", "b", "")
  totals = np.float32([[1, 0, 0, 1]])
  found = turn_advantages.peer_advantages(members, totals, config=TURNS)
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


@pytest.mark.parametrize("deviation", grpo.DEVIATIONS)
@pytest.mark.parametrize("normalize", grpo.NORMALIZERS)
def test_before_the_first_passage_it_is_the_groups_advantage(
  normalize, deviation
):
  how = {"normalize": normalize, "deviation": deviation}
  config = dataclasses.replace(TURNS, **how)
  rng = np.random.default_rng(0)
  members, valid = {}, np.zeros((6, 5), bool)
  for q, g in itertools.product(range(6), range(5)):
    if rng.random() < 0.8:  # The others failed.
      valid[q, g] = True
      members[q, g] = shown_to(q, g, rng.choice(list("ab"), rng.integers(0, 4)))
  totals = rng.random((6, 5)).astype(np.float32)
  expected = grpo.advantages(
    totals, valid, epsilon=config.advantage_epsilon, **how
  )
  found = turn_advantages.peer_advantages(members, totals, config=config)
  added = turn_advantages.added_advantages(
    members, totals, np.asarray(expected), {}, config=config
  )
  for place, turns in found.items():
    assert turns.dtype == np.float32
    assert turns.shape == (members[place].searches + 1,)
    whole = float(expected[place])
    np.testing.assert_allclose(turns[0], whole, atol=2e-5)
    tokens = turn_advantages.token_advantages(
      members[place], whole, added[place]
    )
    ends = (*members[place].search_ends, len(tokens) - 1)
    np.testing.assert_allclose([tokens[i] for i in ends], turns, atol=1e-5)


def test_a_lone_trajectory_and_equal_rewards_learn_nothing():
  for members in (all_shown("ab"), all_shown("ab", "ab", "c")):
    totals = np.full((1, len(members)), 0.65, np.float32)
    for normalize in grpo.NORMALIZERS:
      config = dataclasses.replace(TURNS, normalize=normalize)
      found = turn_advantages.peer_advantages(members, totals, config=config)
      for turns in found.values():
        np.testing.assert_allclose(turns, 0, atol=1e-6)


def test_rewards_of_searches_are_added():
  members = all_shown("a", "a")
  steps = {(0, 0): np.float32([1]), (0, 1): np.float32([0])}
  totals = np.float32([[1, 0]])
  added = turn_advantages.added_advantages(
    members, totals, np.float32([[0.5, -0.5]]), steps, config=TURNS
  )
  # Both turns of both have the group's advantage, and the search +-.5 more.
  np.testing.assert_allclose(added[0, 0], [0.5, 0])
  np.testing.assert_allclose(added[0, 1], [-0.5, 0])
