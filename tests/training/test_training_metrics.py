"""Tests the metrics of a rollout's optimizer steps."""

from __future__ import annotations

import functools

import jax
import numpy as np

from anysearch_jax import config as config_lib
from anysearch_jax.algorithms import grpo
from anysearch_jax.training import metrics

LOSS = jax.jit(
  functools.partial(grpo.grpo_loss, config=config_lib.ObjectiveConfig())
)


def _of_step(difference):
  """Returns a step's metrics for these differences, in three micro-batches."""
  zeros, parts = np.zeros(len(difference), np.float32), []
  for part in np.array_split(np.arange(len(difference)), 3):
    logp = np.where(np.isin(np.arange(len(zeros)), part), difference, 0)
    weight = np.isin(np.arange(len(zeros)), part) / len(zeros)
    _, values = LOSS(np.float32(logp), *[zeros] * 3, np.float32(weight))
    parts.append(values)
  name = "logp_difference_counts"
  return metrics.of_step(
    {"grad_norm": np.float32(2), f"loss/{name}": sum(p[name] for p in parts)}
  )


def test_quantiles_of_the_gap_are_those_of_all_tokens():
  rng = np.random.default_rng(0)
  difference = np.exp(rng.normal(-4, 2.5, 1001)) * rng.choice([-1, 1], 1001)
  values = _of_step(difference)
  assert values.keys() == {
    "grad_norm",
    *(f"loss/logp_difference_{name}" for name in ("p50", "p99", "far")),
  }
  for name, quantile in (("p50", 0.5), ("p99", 0.99)):
    exact = np.quantile(np.abs(difference), quantile, method="inverted_cdf")
    found = values[f"loss/logp_difference_{name}"]
    assert exact <= found < exact * 10 ** (1 / 8)
  far = np.mean(np.abs(difference) > 1)
  assert 0.01 < far
  np.testing.assert_allclose(values["loss/logp_difference_far"], far)


def test_quantiles_beyond_all_edges_and_without_tokens():
  assert _of_step(np.full(1001, 500.0))["loss/logp_difference_p50"] == np.inf
  counts = np.zeros(1 + len(grpo.GAP_EDGES), np.float32)
  assert metrics.of_step({"loss/logp_difference_counts": counts}) == {
    "loss/logp_difference_p50": grpo.GAP_EDGES[0],
    "loss/logp_difference_p99": grpo.GAP_EDGES[0],
    "loss/logp_difference_far": 0.0,
  }


def test_the_gap_of_the_engine_is_that_of_the_first_step():
  names = ("", "_p50", "_p99", "_far", "_max")
  steps = [
    {
      f"loss/logp_difference{name}": float(step + i)
      for i, name in enumerate(names)
    }
    for step in (1, 7)
  ]
  on_policy = metrics.over_steps(steps, on_policy=True)
  assert [on_policy[f"policy/engine_gap{name}"] for name in names] == [
    1,
    2,
    3,
    4,
    5,
  ]
  assert on_policy["loss/logp_difference"] == 4
  assert on_policy["loss/logp_difference_max"] == 11
  stale = metrics.over_steps(steps, on_policy=False)
  assert not any(name.startswith("policy/") for name in stale)
