"""The value of a search in a scripted world whose truth is known.

Forty cuts: where the policy often asks, searching corrects its answers; where
it seldom asks, searching spoils them. Reached cuts are therefore better than
all of them, and counting ends makes it worse.
"""

from __future__ import annotations

import numpy as np
import pytest

from anysearch_jax.evaluation import branch_values

# Probability of asking; of being right if granted, refused, and stored.
_KINDS = [
  (0.9, 0.95, 0.45, 0.5),
  (0.4, 0.7, 0.4, 0.5),
  (0.05, 0.4, 0.5, 0.5),
  (0.01, 0.1, 0.5, 0.6),
]
_QUESTIONS = 160
_SAMPLES = 8


def _truth():
  asks, granted, refused, stored = np.array(_KINDS).T
  return {
    "worth": np.mean(granted - refused),
    "gain": np.mean(granted - stored),
    "asked": np.sum(asks * (granted - refused)) / np.sum(asks),
  }


def _rows(tries, seed=0):
  rng = np.random.default_rng(seed)
  for question in range(_QUESTIONS):
    ask, granted, refused, stored = _KINDS[question % len(_KINDS)]
    before = int(rng.random() < stored)
    for sample in range(_SAMPLES):
      attempt = int(rng.geometric(ask))
      asked = attempt <= tries
      ends = [int(rng.random() < p) for p in (granted, refused)]
      yield {
        "question_id": f"q{question}",
        "budget": 3,
        "seed": 1,
        "kind": "continue",
        "cut": 1,
        "sample": sample,
        "hops": None,
        "budget_left": 2,
        "tries": min(attempt, tries),
        "outcome": "answered" if asked else None,
        "stored_em": before,
        "worth": ends[0] - ends[1] if asked else None,
        "gain": ends[0] - before if asked else None,
      }


def _summary(tries, seed=0):
  return branch_values.summary(_rows(tries, seed))["continue"]


@pytest.mark.parametrize("tries", [1, 4, 16, 64])
def test_bounds_hold_the_truth_whatever_the_tries(tries):
  truth, held = _truth(), 0
  for seed in range(10):
    found = _summary(tries, seed)
    held += all(
      found[f"{name}_bounds"]["low"]
      <= truth[name]
      <= found[f"{name}_bounds"]["high"]
      for name in ("worth", "gain")
    )
  assert held >= 9


def test_worth_as_it_asks_does_not_depend_on_the_tries():
  truth = _truth()["asked"]
  for tries in (1, 4, 64):
    found = np.mean([_summary(tries, s)["asked"]["value"] for s in range(8)])
    assert found == pytest.approx(truth, abs=0.03)


def test_more_tries_narrow_the_bounds_to_the_truth():
  widths = []
  for tries in (1, 16, 1024):
    found = _summary(tries)
    bounds = found["worth_bounds"]
    widths.append(bounds["high"] - bounds["low"])
  assert widths[0] > widths[1] > widths[2]
  assert found["cuts_reached"] == found["cuts"] == _QUESTIONS
  # With every cut reached, the mean over cuts is the truth, up to sampling.
  worth = found["worth"]
  assert worth["low"] <= _truth()["worth"] <= worth["high"]
  assert found["worth_bounds"] == {"low": worth["low"], "high": worth["high"]}


def test_cuts_weigh_alike_however_many_ends_asked():
  """By hand: a cut of four good ends, and one of a single bad one."""
  rows = [
    {
      "question_id": q,
      "budget": 1,
      "seed": 1,
      "kind": "continue",
      "cut": 0,
      "hops": None,
      "budget_left": 1,
      "tries": 1 if asked else 2,
      "outcome": "answered" if asked else None,
      "stored_em": 0,
      "worth": worth if asked else None,
      "gain": max(worth, 0) if asked else None,
    }
    for q, worth, asks in (("a", 1, 4), ("b", -1, 1), ("c", 0, 0))
    for asked in [True] * asks + [False] * (4 - asks)
  ]
  found = branch_values.summary(rows)["continue"]
  assert (found["reached"], found["cuts_reached"], found["cuts"]) == (5, 2, 3)
  assert found["worth"]["value"] == 0
  assert found["gain"]["value"] == pytest.approx(1 / 2)
  # Cut a asks always, cut b at a quarter of the first tries.
  assert found["asked"]["value"] == pytest.approx((1 - 1 / 4) / (1 + 1 / 4))
  assert (found["gained"], found["lost"]) == (4, 1)


def test_failed_ends_are_counted_and_left_out():
  rows = [row | {"outcome": "failed"} for row in _rows(4)]
  found = branch_values.summary(rows)["continue"]
  assert found["failed"] == found["ends"] == _QUESTIONS * _SAMPLES
  assert found["cuts"] == 0
  assert found["worth"]["value"] is None
  assert found["worth_bounds"] == {"low": None, "high": None}
