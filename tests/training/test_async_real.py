"""Tests training while sampling, with the real engine and train step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scripted_runs as runs
import small_run
from spoken import group, of_authors

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.methods import systems
from anysearch_jax.policy import parameters as weights
from anysearch_jax.training import learner, rewards_and_advantages


def _real(folder, parts, config=small_run.CONFIG, *, level=1, **kwargs):
  small_run.train(
    folder, parts, runs.at_level(level, config, save_every=2), **kwargs
  )
  return folder


@pytest.mark.parametrize("rank", [0, 2])
def test_published_weights_outlive_the_next_step(rank, parts):
  """The step donates its state, whose arrays the engine may share."""
  lora = config_lib.LoraConfig(rank=rank, targets=("q",))
  config = runs.at_level(1, small_run.CONFIG, lora=lora)
  made = learner.Learner(config, parts["policy"])
  published = made.published()
  before = jax.tree.map(jnp.copy, made.state.params)
  packed = made.pack(_scored(config))
  given_away = jax.tree.leaves(made.state.params)
  assert [values["finite"] for values in made.steps(packed)] == [1, 1]
  assert all(x.is_deleted() for x in given_away)
  for path, leaf in jax.tree_util.tree_leaves_with_path(before):
    held = weights.get(published, [key.key for key in path])
    np.testing.assert_array_equal(held, leaf)
  assert any(
    (x != y).any()
    for x, y in zip(jax.tree.leaves(made.state.params), jax.tree.leaves(before))
  )


def _scored(config):
  """Returns a scored rollout of answers; half of them are too long."""
  prompt, model, _ = types.Author
  groups = [
    group(
      *(
        of_authors(
          q, g, [prompt] + [model] * (3 + 40 * g), outcome=types.Outcome.INVALID
        )
        for g in range(2)
      )
    )
    for q in range(4)
  ]
  return rewards_and_advantages.score(
    groups,
    np.ones(4, np.int32),
    samples=config.group,
    method=systems.trained(config),
    objective=config.objective,
  )


@pytest.fixture(scope="module")
def real(parts, tmp_path_factory):
  """A run with the real engine and learner at async_level 1, on one device."""
  return _real(tmp_path_factory.mktemp("real"), parts)


def test_metrics_distinguish_stale_from_fresh_tokens(real):
  records = runs.metrics(real)
  assert [r["policy/staleness_max"] for r in records] == [0, 1, 1, 1]
  # The gap compares engine and trainer only where the policy has not moved.
  assert records[0]["policy/engine_gap_max"] < 1e-5
  assert all("policy/engine_gap_max" not in r for r in records[1:])
  steps = small_run.records(real, "steps.jsonl")
  first = [s["loss/logp_difference_max"] for s in steps[::2]]
  # In a rollout's first step, the ratio is relative to the sampling weights.
  assert first[0] < 1e-5 and min(first[1:]) > 1e-4


def test_a_killed_run_of_the_real_engine_resumes_to_the_same_bits(
  real, parts, tmp_path
):
  _real(tmp_path, parts, rollouts=3)  # The checkpoint is of rollout 2.
  assert (tmp_path / "checkpoints" / "2" / "tokens").is_dir()
  _real(tmp_path, parts)
  assert runs.left(tmp_path) == runs.left(real)
  small_run.assert_same_bits(tmp_path, real)


def test_one_step_a_rollout_corrects_for_the_weights_that_sampled(
  parts, tmp_path
):
  """The ratio to the trainer's own log-probs is 1; the rest is capped."""
  config = config_lib.changed(
    small_run.CONFIG,
    objective=config_lib.ObjectiveConfig(
      old_logp="trainer", importance_cap=2.0
    ),
    curriculum={"phase1_steps": 2, "total_steps": 3, "steps_per_rollout": 1},
  )
  fresh, *stale = runs.metrics(_real(tmp_path, parts, config))
  assert abs(fresh["loss/importance"] - 1) < 1e-5
  assert len(stale) == 2
  for record in stale:
    assert record["loss/ratio"] == pytest.approx(1)
    assert record["loss/logp_difference_max"] > 1e-4
    assert abs(record["loss/importance"] - 1) > 1e-6
