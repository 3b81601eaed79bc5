"""Tests the errors that stop an unhealthy run, and the warnings."""

from __future__ import annotations

import dataclasses
import pathlib
from collections import Counter

import numpy as np
import pytest
import spoken

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.training import collection, health

CONFIG = config_lib.ExperimentConfig(
  questions=4,
  group=5,
  watch=config_lib.WatchConfig(
    bad_steps=2,
    max_failed=0.3,
    min_entropy=0.1,
    max_kl=0.5,
    max_gap=0.2,
    max_far=0.01,
    max_largest_gap=5.0,
    gap_rollouts=3,
    max_stale=3,
  ),
)
FINE = {
  "rollout": 0,
  "phase": 2,
  "policy/entropy": 1.0,
  "policy/advantage_share": 0.5,
  "loss/kl": 0.01,
  "loss/logp_difference": 0.001,
  "loss/logp_difference_far": 0.0,
  "loss/logp_difference_max": 0.5,
  **{f"curriculum/count{budget}": 3 for budget in range(1, 6)},
}


def monitor(said, **changes):
  config = dataclasses.replace(CONFIG, **changes)
  return health.HealthMonitor(
    config.watch,
    stream=collection.QuestionStream(
      (), groups=config.questions, samples=config.group
    ),
    curriculum=config.curriculum,
    warn=said.append,
  )


@pytest.fixture
def said():
  return []


@pytest.fixture
def watching(said):
  return monitor(said)


@pytest.mark.parametrize(
  ("counts", "sentence"),
  [
    ({}, ""),
    ({"failed": 6}, ""),  # Of 20.
    ({"failed": 9, "resampled": 2}, ""),  # Of 30.
    ({"failed": 7}, "7 of 20 episodes failed, more than watch.max_failed, 0.3"),
    ({"failed": 5, "stragglers": 1}, "5 of 15 episodes failed"),
    ({"failed": 40, "resampled": 4, "dropped": 4}, "40 of 40"),
    (
      {"failed": 5, "dropped": 4, "groups": [None, None]},
      "5 of 20 episodes failed, which leaves no group to train on",
    ),
    ({"failed": 5, "dropped": 3, "groups": [None, "group"]}, ""),
  ],
)
def test_too_many_failures_stop_the_run_with_their_reason(
  watching, counts, sentence
):
  values = {
    **{"groups": ["group"], "places": np.zeros(0, np.int64)},
    **dict.fromkeys(("dropped", "resampled", "failed", "stragglers"), 0),
    **{"engine": Counter(), "search": Counter(), "reason": "No answer."},
  }
  collected = collection.RolloutBatch(**values | counts)
  if not sentence:
    watching.collected(4, collected)
    return
  with pytest.raises(health.FailedEpisodesError) as raised:
    watching.collected(4, collected)
  assert f"Rollout 4: {sentence}" in str(raised.value)
  assert "No answer." in str(raised.value)


def test_only_consecutive_bad_steps_stop_the_run(watching, said):
  dumps = []

  def step(finite):
    values = {"finite": finite, "loss/total": 1.5, "grad_norm": np.inf}
    watching.step(7, values, lambda: dumps.append(1) or pathlib.Path("x.jsonl"))

  for finite in (0, 1, 0, 1, 1, 0):
    step(finite)
  assert len(said) == len(dumps) == 3
  assert "gradient norm inf. The step was not applied" in said[0]
  with pytest.raises(health.NotFiniteError, match=r"x\.jsonl.*2 in a row"):
    step(0)


@pytest.mark.parametrize(
  ("values", "sentence"),
  [
    ({"policy/entropy": 0.05}, "entropy is 0.05 nats a token, below 0.1"),
    ({"loss/kl": 0.7}, "KL divergence from the start is 0.7, above 0.5"),
    ({"loss/logp_difference": 0.3}, "differ by 0.3 a token, more than 0.2"),
    ({"loss/logp_difference_far": 0.02}, "1 nat at 0.02 of the tokens, above"),
    ({"loss/logp_difference_max": 6.0}, "differ by 6 at most, above 5: "),
    ({"policy/advantage_share": 0.0}, "all advantages are zero"),
  ],
)
def test_a_warning_is_given_when_something_begins(
  watching, said, values, sentence
):
  watching.rollout(FINE)
  # NaN metrics do not warn.
  watching.rollout(FINE | {"policy/entropy": np.nan, "loss/kl": np.nan})
  assert not said
  for _ in range(2):
    watching.rollout(FINE | values | {"rollout": 5})
  assert len(said) == 1 and sentence in said[0] and "Rollout 5" in said[0]
  watching.rollout(FINE)
  watching.rollout(FINE | values)
  assert len(said) == 2


def test_a_gap_in_consecutive_rollouts_stops_the_run(watching, said):
  apart = FINE | {"loss/logp_difference": 0.3, "rollout": 7}
  for rollout in (apart, apart, FINE, apart, apart):
    watching.rollout(rollout)
  with pytest.raises(
    health.WrongWeightsError,
    match="Rollout 7: .* 3 rollouts in a row .*it resumes",
  ):
    watching.rollout(apart)
  assert len(said) == 2


def test_training_since_sampling_does_not_count_as_an_engine_gap(
  watching, said
):
  engine = {"policy/engine_gap": 0.0, "policy/engine_gap_far": 0.0}
  moved = {"loss/logp_difference_far": 0.5, "loss/logp_difference_max": 9.0}
  values = FINE | moved | engine | {"policy/engine_gap_max": 0.1}
  watching.rollout(values)
  assert not said
  watching.rollout(values | {"policy/engine_gap_max": 9.0})
  assert len(said) == 1


@pytest.mark.parametrize(
  ("phases", "counts", "fixed", "found"),
  [
    ([2] * 5, [1, 0, 0, 0, 0], -1, True),
    # Phase I makes no window stale, and a fixed budget has no windows.
    ([1] * 5 + [2] * 3, [0] * 7 + [1], -1, False),
    ([2] * 6, [0] * 6, 5, False),
  ],
)
def test_a_stale_window_is_named(said, phases, counts, fixed, found):
  curriculum = dataclasses.replace(CONFIG.curriculum, fixed_budget=fixed)
  watching = monitor(said, curriculum=curriculum)
  for rollout, (phase, count) in enumerate(zip(phases, counts, strict=True)):
    watching.rollout(
      FINE | {"rollout": rollout, "phase": phase, "curriculum/count3": count}
    )
  assert len(said) == found
  if found:
    assert "Rollout 3: budget 3 had no episode for 3 rollouts" in said[0]


EQUAL = {
  "policy/advantage_share": 0.0,
  "reward/total": 0.0,
  "reward/em": 0.0,
  "reward/format": 0.0,
  "rollout/truncated": 0.75,
  "rollout/invalid": 0.25,
  "rollout/searches": 0.0,
}


def test_equal_rewards_stop_a_run_with_their_cause_and_an_episode(watching):
  question = types.Question("q", "Where?", ("Lund",))
  episode = spoken.trajectory(question, ("<answer>Beijing</answer>", None))
  for rollout in range(4):
    watching.rollout(FINE | EQUAL | {"rollout": rollout}, episode)
  with pytest.raises(health.NoGradientError) as error:
    watching.rollout(FINE | EQUAL | {"rollout": 4}, episode)
  for words in (
    "5 rollouts in a row (watch.equal_rollouts)",
    "The mean reward is 0; of the episodes 0% right, 0% well formed, 75% "
    "truncated, 25% invalid, with 0 searches each.",
    "4 searches allowed for 'Where?': '<answer>Beijing</answer>'",
    "anysearch sft",
  ):
    assert words in str(error.value)


@pytest.mark.parametrize(
  "between", [{"values": FINE}, {"values": FINE | EQUAL, "turns_differ": True}]
)
def test_a_rollout_that_teaches_begins_the_count_anew(watching, between):
  for rollout in range(12):
    if rollout % 4 == 3:
      values = between["values"] | {"rollout": rollout}
      turns_differ = between.get("turns_differ", False)
      watching.rollout(values, turns_differ=turns_differ)
    else:
      watching.rollout(FINE | EQUAL | {"rollout": rollout})


def test_equal_rewards_may_be_allowed(said):
  watch = dataclasses.replace(CONFIG.watch, equal_rollouts=0)
  watching = monitor(said, watch=watch)
  for rollout in range(9):
    watching.rollout(FINE | EQUAL | {"rollout": rollout})
