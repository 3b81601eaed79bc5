"""Tests scoring a rollout: valid trajectories, rewards and token weights."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.methods import systems
from anysearch_jax.training import rewards_and_advantages, sampler

PROMPT, MODEL, ENVIRONMENT = types.Author
BATCH = config_lib.BatchConfig(
  row_lengths=(16,), micro_batch_tokens=32, max_micro_batches=4
)
OBJECTIVE = config_lib.ObjectiveConfig()
PER_TOKEN = dataclasses.replace(OBJECTIVE, reduction="token-mean")


def trajectory(q, g, *, model, answer="wrong", failed=False):
  """Has 3 tokens of a prompt, `model` of the model, 1 of the environment."""
  authors = np.array([PROMPT] * 3 + [MODEL] * model + [ENVIRONMENT], np.int8)
  size = len(authors)
  return types.Trajectory(
    types.Address(0, q, g),
    types.Question(f"q{q}", "where?", ("tol",)),
    budget=2,
    scaffold=False,
    # The ids identify the trajectory.
    token_ids=np.arange(size, dtype=np.int32) + 100 * q + 20 * g,
    authors=authors,
    logps=np.where(authors == MODEL, -0.5 - g, 0.0).astype(np.float32),
    versions=np.where(authors == MODEL, 0, -1).astype(np.int32),
    spans=(types.Span(MODEL, f"<think>so</think><answer>{answer}</answer>"),),
    searches=0,
    queries=(),
    violation=False,
    outcome=types.Outcome.FAILED if failed else types.Outcome.ANSWERED,
  )


def group(q, *trajectories):
  first = trajectories[0]
  return types.Group(first.question, 2, False, trajectories)


@pytest.fixture(scope="module")
def groups():
  """Three questions x two samples; the second group was dropped."""
  return [
    group(
      0,
      trajectory(0, 0, model=4, answer="Tol"),
      trajectory(0, 1, model=2),
    ),
    None,
    group(
      2,
      trajectory(2, 0, model=5, failed=True),
      # Its prompt left no room for the model.
      trajectory(2, 1, model=0),
    ),
  ]


def score(groups, objective_config=OBJECTIVE, **changes):
  return rewards_and_advantages.score(
    groups,
    np.array([2, 1, 2], np.int32),
    samples=2,
    method=systems.trained(config_lib.ExperimentConfig(**changes)),
    objective=objective_config,
  )


def test_failed_and_dropped_trajectories_are_not_valid(groups):
  scored = score(groups)
  np.testing.assert_array_equal(
    scored.valid, [[True, True], [False, False], [False, True]]
  )
  np.testing.assert_array_equal(scored.em, [[1, 0], [0, 0], [0, 0]])
  # Two rewards are one deviation from their mean; one alone has advantage 0.
  np.testing.assert_allclose(
    scored.advantages, [[1, -1], [0, 0], [0, 0]], rtol=1e-4
  )


@pytest.mark.parametrize(
  ("objective_config", "expected"),
  [
    # Three valid trajectories, one of them without tokens of the model.
    (OBJECTIVE, [1 / (4 * 3), 1 / (2 * 3)]),
    (PER_TOKEN, [1 / 6, 1 / 6]),
  ],
  ids=["sequence-mean", "token-mean"],
)
def test_examples_carry_the_weights_of_the_reduction(
  groups, objective_config, expected
):
  found = rewards_and_advantages.examples(score(groups, objective_config))
  assert [example.token_ids[0] for example in found] == [0, 20]
  for example, model, weight, g in zip(found, (4, 2), expected, (0, 1)):
    np.testing.assert_array_equal(
      example.weights, np.float32([0] * 3 + [weight] * model + [0])
    )
    np.testing.assert_array_equal(
      example.logps, np.float32([0] * 3 + [-0.5 - g] * model + [0])
    )
    assert example.advantage == pytest.approx(1 - 2 * g, rel=1e-4)


@pytest.mark.parametrize("objective_config", [OBJECTIVE, PER_TOKEN])
def test_denominators_are_those_of_the_step(groups, objective_config):
  # One trajectory in each of six steps: each mean is over one trajectory.
  scored = score(groups, objective_config)
  steps = rewards_and_advantages.batches(scored, count=6, config=BATCH)
  assert [int(rows.used) for (rows,) in steps] == [1, 1, 0, 0, 0, 0]
  for (rows,), model in zip(steps, (4, 2)):
    np.testing.assert_array_equal(
      rows.weight[rows.weight > 0], np.float32([1 / model] * model)
    )


def test_a_group_may_straddle_two_steps(groups):
  whole = [groups[0], group(1, *groups[0].trajectories), groups[2]]
  (first,), (second,) = rewards_and_advantages.batches(
    score(whole), count=2, config=BATCH
  )
  # All three trajectories of the first step are valid, two of the second.
  weights = [np.unique(rows.weight)[1:].tolist() for rows in (first, second)]
  expected = [[1 / (4 * 3), 1 / (2 * 3)], [1 / (2 * 2)]]
  assert weights == [np.float32(w).tolist() for w in expected]
  assert first.segment_ids.max() == 2


def test_micro_batches_have_a_multiple_of_the_devices_rows(groups):
  (one,) = rewards_and_advantages.batches(score(groups), count=1, config=BATCH)
  (eight,) = rewards_and_advantages.batches(
    score(groups), count=1, config=BATCH, multiple=8
  )
  assert (one[0].tokens.shape, eight[0].tokens.shape) == (
    (4, 2, 16),
    (4, 8, 16),
  )
  np.testing.assert_array_equal(
    *(np.sort(b[0].weight[b[0].weight > 0]) for b in (one, eight))
  )


def test_steps_must_divide_the_rollout(groups):
  with pytest.raises(ValueError, match="3 questions x 2 .* into 4 batches"):
    rewards_and_advantages.batches(score(groups), count=4, config=BATCH)


def test_metrics_exclude_failed_trajectories(groups):
  found = rewards_and_advantages.metrics(score(groups))
  assert found["reward/em"] == pytest.approx(1 / 3)
  assert found["policy/advantage_share"] == pytest.approx(2 / 3)
  assert found["rollout/generated_tokens"] == pytest.approx((4 + 2 + 0) / 3)
  assert found["rollout/total_tokens"] == pytest.approx((8 + 6 + 4) / 3)
  assert found["rollout/answered"] == 1.0
  assert "rollout/failed" not in found


def test_rewards_are_recorded_with_their_trajectories(groups):
  first, last = rewards_and_advantages.records(score(groups))
  assert [first["question_id"], last["question_id"]] == ["q0", "q2"]
  right, wrong = first["trajectories"]
  reward = config_lib.RewardConfig()
  assert (right["answer"], right["em"], right["format"]) == ("Tol", 1, 1)
  assert (wrong["answer"], wrong["em"], wrong["format"]) == ("wrong", 0, 1)
  # No trajectory searched, so all used the same share of the budget.
  assert wrong["reward"] == pytest.approx(
    reward.beta + reward.delta * wrong["parts"]["length"]
  )
  assert right["advantage"] == pytest.approx(1, rel=1e-4)
  failed, _ = last["trajectories"]
  assert failed["failed"] and "reward" not in failed


def test_a_method_without_a_format_check_has_no_format_metric(groups):
  scored = score(
    groups,
    method=config_lib.MethodConfig(name="otc"),
    episode=config_lib.EpisodeConfig(prompts="bats_world"),
  )
  assert "reward/format" not in rewards_and_advantages.metrics(scored)
  assert "reward/format" in rewards_and_advantages.metrics(score(groups))
  (first, _) = rewards_and_advantages.records(scored)
  assert [t["format"] for t in first["trajectories"]] == [None, None]


def test_every_budget_that_was_played_is_counted():
  budgets = np.array([2, 2, 0, 7])
  assert sampler.drawn(budgets, max_budget=3) == {
    "curriculum/count0": 1,
    "curriculum/count1": 0,
    "curriculum/count2": 2,
    "curriculum/count3": 0,
    "curriculum/count7": 1,
  }
