"""Tests scoring a rollout: valid trajectories, rewards and token weights."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import numpy as np
import pytest
import scripted_runs as runs
from spoken import group, of_authors

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.methods import systems
from anysearch_jax.training import rewards_and_advantages

PROMPT, MODEL, ENVIRONMENT = types.Author
OBJECTIVE = config_lib.ObjectiveConfig()
PER_TOKEN = dataclasses.replace(OBJECTIVE, reduction="token-mean")


def trajectory(q, g, *, model, answer="wrong", failed=False):
  """Has 3 tokens of a prompt, `model` of the model, 1 of the environment."""
  text = f"<think>so</think><answer>{answer}</answer>"
  return of_authors(
    q,
    g,
    [PROMPT] * 3 + [MODEL] * model + [ENVIRONMENT],
    spans=(types.Span(MODEL, text),),
    outcome=types.Outcome.FAILED if failed else types.Outcome.ANSWERED,
  )


@pytest.fixture(scope="module")
def groups():
  """Three questions x two samples; the second group was dropped."""
  return [
    group(trajectory(0, 0, model=4, answer="Tol"), trajectory(0, 1, model=2)),
    None,
    group(
      trajectory(2, 0, model=5, failed=True),
      # Its prompt left no room for the model.
      trajectory(2, 1, model=0),
    ),
  ]


def score(groups, objective=OBJECTIVE, **changes):
  return rewards_and_advantages.score(
    groups,
    np.array([2, 1, 2], np.int32),
    samples=2,
    method=systems.trained(config_lib.ExperimentConfig(**changes)),
    objective=objective,
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
  found = rewards_and_advantages.metrics(scored)
  assert found["reward/em"] == pytest.approx(1 / 3)
  assert found["policy/advantage_share"] == pytest.approx(2 / 3)
  assert found["rollout/generated_tokens"] == pytest.approx((4 + 2 + 0) / 3)
  assert found["rollout/total_tokens"] == pytest.approx((8 + 6 + 4) / 3)
  assert found["rollout/answered"] == 1.0
  assert "rollout/failed" not in found


def test_trajectories_without_searches_are_a_group_of_their_own():
  right = [[1, 0, 1, 1, 0], [0, 0, 1, 0, 0], [1, 1, 0, 1, 1]]
  names = [["tol" if x else "wrong" for x in row] for row in right]
  scored = rewards_and_advantages.score(
    [
      group(*(trajectory(q, g, model=4, answer=a) for g, a in enumerate(row)))
      for q, row in enumerate(names)
    ],
    np.array([2, 2, 2], np.int32),
    samples=5,
    method=systems.trained(config_lib.ExperimentConfig()),
    objective=OBJECTIVE,
    searchless=2,
  )
  totals = np.asarray(scored.rewards["total"], float)
  for part in (slice(3), slice(3, 5)):
    own = totals[:, part]
    centred = own - own.mean(1, keepdims=True)
    expected = centred / (own.std(1, keepdims=True) + 1e-12)
    np.testing.assert_allclose(scored.advantages[:, part], expected, atol=1e-4)


@pytest.mark.parametrize(
  ("objective", "expected"),
  [
    # Three valid trajectories, one of them without tokens of the model.
    (OBJECTIVE, [1 / (4 * 3), 1 / (2 * 3)]),
    (PER_TOKEN, [1 / 6, 1 / 6]),
  ],
  ids=["sequence-mean", "token-mean"],
)
def test_examples_carry_the_weights_of_the_reduction(
  groups, objective, expected
):
  scored = score(groups, objective)
  found = rewards_and_advantages.examples(scored)
  assert [example.token_ids[0] for example in found] == [0, 20]
  for example, model, weight, g in zip(found, (4, 2), expected, (0, 1)):
    np.testing.assert_array_equal(
      example.weights, np.float32([0] * 3 + [weight] * model + [0])
    )
    np.testing.assert_array_equal(
      example.logps, np.float32([0] * 3 + [-1] * model + [0])
    )
    assert example.advantage == pytest.approx(1 - 2 * g, rel=1e-4)
  # One trajectory in each of six steps: each mean is over one trajectory.
  steps = [rewards_and_advantages.examples(scored, i, i + 1) for i in range(6)]
  assert list(map(len, steps)) == [1, 1, 0, 0, 0, 0]
  for (example,), model in zip(steps, (4, 2)):
    found = example.weights[example.weights > 0]
    np.testing.assert_array_equal(found, np.float32([1 / model] * model))


def test_a_group_may_straddle_two_steps(groups):
  whole = [groups[0], group(*groups[0].trajectories), groups[2]]
  scored = score(whole)
  steps = [rewards_and_advantages.examples(scored, i, i + 3) for i in (0, 3)]
  # All three trajectories of the first step are valid, two of the second.
  weights = [[example.weights.max() for example in step] for step in steps]
  expected = [[1 / (4 * 3), 1 / (2 * 3), 1 / (4 * 3)], [1 / (2 * 2)]]
  assert weights == [list(np.float32(w)) for w in expected]


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
    method=config_lib.MethodConfig(name="search_r1"),
    episode=config_lib.EpisodeConfig(prompts="bats_world"),
  )
  assert "reward/format" not in rewards_and_advantages.metrics(scored)
  assert "reward/format" in rewards_and_advantages.metrics(score(groups))
  (first, _) = rewards_and_advantages.records(scored)
  assert [t["format"] for t in first["trajectories"]] == [None, None]


# Measures that a server gives.


def measuring(made, measure, deadline=5.0):
  return dataclasses.replace(
    made,
    measure=measure,
    measures=("kind",),
    measure_deadline=deadline,
    reward=lambda o: {"total": o.em + o.measures["kind"]},
  )


SEARCH_R1 = config_lib.ExperimentConfig(
  method=config_lib.MethodConfig("search_r1")
)


def measured(measure, run=asyncio.run, **kwargs):
  """Scores two groups, whose first answers are right."""
  return rewards_and_advantages.score(
    [
      group(
        *(
          of_authors(q, g, [PROMPT, MODEL], spans=(types.Span(MODEL, answer),))
          for g, answer in enumerate(
            ("<answer>tol</answer>", "<answer>x</answer>")
          )
        )
      )
      for q in (0, 1)
    ],
    np.array([1, 1], np.int32),
    samples=2,
    method=measuring(systems.trained(SEARCH_R1), measure, **kwargs),
    objective=OBJECTIVE,
    run=run,
  )


def test_trajectories_are_measured_at_the_same_time():
  waiting, everyone = [], asyncio.Event()

  async def measure(t):
    waiting.append(t.address)
    if len(waiting) == 4:
      everyone.set()
    await everyone.wait()
    return {"kind": 10 * t.address.question + t.address.sample}

  scored = measured(measure)
  assert len(waiting) == 4 and not scored.unmeasured
  # em is 1 for the first sample of each group.
  np.testing.assert_array_equal(scored.rewards["total"], [[1, 1], [11, 11]])


def test_a_trajectory_that_cannot_be_measured_has_failed():
  async def measure(t):
    match t.address.question, t.address.sample:
      case 0, 1:
        raise types.EngineError("The judge is down.")
      case 1, 0:
        await asyncio.sleep(60)
    return {"kind": 2}

  scored = measured(measure, deadline=0.05)
  np.testing.assert_array_equal(scored.valid, [[True, False], [False, True]])
  np.testing.assert_array_equal(scored.advantages, np.zeros((2, 2)))
  down, late = scored.unmeasured
  assert down == "It was not measured: The judge is down."
  assert "within 0.05 seconds (method.measure_deadline)" in late
  assert len(rewards_and_advantages.examples(scored)) == 2
  records = rewards_and_advantages.records(scored)
  failed = [[t["failed"] for t in row["trajectories"]] for row in records]
  assert failed == [[False, True], [True, False]]


def test_wrong_names_and_bugs_are_raised():
  async def misnamed(t):
    return {"sort": 1.0}

  async def broken(t):
    return 1 / 0

  with pytest.raises(ExceptionGroup) as error:
    measured(misnamed)
  assert "found sort, expected kind" in str(error.value.exceptions[0])
  with pytest.raises(ExceptionGroup) as error:
    measured(broken)
  assert isinstance(error.value.exceptions[0], ZeroDivisionError)


def test_plain_measures_need_no_event_loop():
  def never(coroutine):
    raise AssertionError(coroutine)

  scored = measured(lambda t: {"kind": 3}, run=never)
  assert scored.rewards["total"].tolist() == [[4, 3], [4, 3]]


def test_only_the_first_process_asks(monkeypatch):
  """Another process gets its results, and does not call `measure`."""

  async def measure(t):
    raise AssertionError("another process asked")

  told = [[{"kind": 1.0}, ""], [{}, "The judge is down."]]
  monkeypatch.setattr(
    rewards_and_advantages.processes, "on_main", lambda make: told
  )
  values, reasons = rewards_and_advantages.measure(
    measuring(systems.trained(SEARCH_R1), measure),
    {(0, g): of_authors(0, g, [PROMPT, MODEL]) for g in (0, 1)},
  )
  assert values == {(0, 0): {"kind": 1.0}}
  assert reasons == {(0, 1): "The judge is down."}


def test_unmeasured_trajectories_count_as_failed_but_are_stored_as_played(
  parts, scripted, tmp_path, monkeypatch
):
  """A judge that is down for one question of each rollout."""

  async def measure(t):
    if t.address.question == 1:
      raise types.RetrievalError("The judge is down.")
    return {"kind": t.address.sample}

  trained = systems.trained
  monkeypatch.setattr(
    systems, "trained", lambda config: measuring(trained(config), measure)
  )
  config = runs.at_level(1, watch=config_lib.WatchConfig(max_failed=1.0))
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  runs.run(whole, parts, config)
  runs.run(killed, parts, config, kill=3)
  runs.run(killed, parts, config)
  assert runs.left(killed) == runs.left(whole)
  # Both samples of one of four questions, and the totals of the run.
  counts = [
    (json.loads(line)["rollout/failed"], json.loads(line)["run/failed"])
    for line in (killed / "metrics.jsonl").open()
  ]
  assert counts == [(2, 2 * n) for n in range(1, runs.ROLLOUTS + 1)]
