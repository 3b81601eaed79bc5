"""Tests advantages of single turns within groups against float64 loops."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.methods import systems
from anysearch_jax.training import rewards_and_advantages, turn_advantages

PROMPT, MODEL, ENVIRONMENT = types.Author
OBJECTIVE = config_lib.ObjectiveConfig(turn_weight=0.5)
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
    (q, s, g): r - sum(group.values()) / len(group)
    for (q, s), group in groups.items()
    for g, r in group.items()
  }
  divisor = {}
  for (q, s), group in groups.items():
    own = [centred[q, s, g] for g in group]
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
  found = turn_advantages.of_searches(steps, (6, 5), config=config)
  expected = oracle(steps, normalize, 0.5)
  assert found.keys() == expected.keys()
  for place, values in expected.items():
    np.testing.assert_allclose(found[place], values, rtol=2e-4, atol=1e-6)


def test_by_hand():
  steps = {(0, 0): [1, 2], (0, 1): [0], (0, 2): [], (1, 0): [3]}
  steps = {place: np.float32(rewards) for place, rewards in steps.items()}
  found = turn_advantages.of_searches(steps, (2, 3), config=OBJECTIVE)
  # First searches: 1 and 0, one deviation from their mean. Others are alone.
  np.testing.assert_allclose(found[0, 0], [0.5, 0], rtol=1e-5)
  np.testing.assert_allclose(found[0, 1], [-0.5], rtol=1e-5)
  assert found[0, 2].shape == (0,) and found[1, 0].tolist() == [0]


def test_nothing_is_found_if_nobody_searched():
  steps = {(0, 0): np.zeros(0), (0, 1): np.zeros(0)}
  found = turn_advantages.of_searches(steps, (1, 2), config=OBJECTIVE)
  assert [x.shape for x in found.values()] == [(0,), (0,)]


def trajectory(g, answer, searches):
  """Has 2 tokens of a prompt, then 3 + 2 of each search, 4 of the answer."""
  turn = [MODEL] * 3 + [ENVIRONMENT] * 2
  authors = np.array([PROMPT] * 2 + turn * searches + [MODEL] * 4, np.int8)
  size = len(authors)
  return types.Trajectory(
    types.Address(0, 0, g),
    types.Question("q", "where?", ("tol",)),
    budget=2,
    scaffold=False,
    token_ids=np.arange(size, dtype=np.int32) + 100 * g,
    authors=authors,
    logps=np.where(authors == MODEL, -1.0, 0.0).astype(np.float32),
    versions=np.where(authors == MODEL, 0, -1).astype(np.int32),
    spans=(types.Span(MODEL, f"<answer>{answer}</answer>"),),
    searches=searches,
    queries=("q",) * searches,
    violation=False,
    outcome=types.Outcome.ANSWERED,
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
    [types.Group(members[0].question, 2, False, members)],
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


def test_a_batch_holds_the_advantage_of_each_target(scored):
  (batch,) = rewards_and_advantages.batches(scored, count=1, config=BATCH)
  (rows,) = batch
  for example in rewards_and_advantages.examples(scored):
    size = len(example.token_ids)
    given = np.broadcast_to(np.float32(example.advantage), size)
    here = np.isin(rows.targets, example.token_ids[1:]) & (rows.weight != 0)
    np.testing.assert_array_equal(
      rows.advantage[here], given[example.weights != 0]
    )


def test_records_and_metrics_tell_the_searches_apart(scored):
  (group,) = rewards_and_advantages.records(scored)
  first, second, last = group["trajectories"]
  assert first["steps"] == [1, 5] and second["steps"] == [0]
  np.testing.assert_allclose(first["turn_advantages"], [0.5, 0], rtol=1e-5)
  assert last["turn_advantages"] == []
  assert rewards_and_advantages.metrics(scored)["reward/steps"] == 2


def test_a_critic_takes_the_rewards_themselves(scored):
  trajectory_ = scored.groups[0].trajectories[0]
  given = rewards_and_advantages.token_rewards(
    trajectory_, 1.0, scored.steps[0, 0]
  )
  assert np.flatnonzero(given).tolist() == [4, 9, 15]
  assert given[[4, 9, 15]].tolist() == [1, 5, 1]
