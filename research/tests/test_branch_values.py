"""The value of a search in a scripted world whose truth is known.

Where the policy often asks, searching corrects its answers; where it seldom
asks, searching spoils them.
"""

from __future__ import annotations

import numpy as np
import pytest

from research import branch_values

# Of a kind of questions, the probabilities that a sampled turn asks, and that
# the granted, the refused and the stored answer are right.
KINDS = np.array(
  [
    (0.9, 0.95, 0.45, 0.5),
    (0.4, 0.7, 0.4, 0.5),
    (0.05, 0.35, 0.5, 0.5),
    (0.01, 0.1, 0.5, 0.6),
  ]
)
QUESTIONS, CUTS, SAMPLES = 80, 2, 4
ASKS, GRANTED, REFUSED, STORED = KINDS.T
# By name, the values as the policy asks, and their means over cuts.
TRUTH = {
  "worth": ASKS @ (GRANTED - REFUSED) / ASKS.sum(),
  "gain": ASKS @ (GRANTED - STORED) / ASKS.sum(),
  "asks": ASKS.mean(),
  "worth_bounds": np.mean(GRANTED - REFUSED),
  "gain_bounds": np.mean(GRANTED - STORED),
}


def ends(tries, seed=0):
  """Yields the rows of `branches.jsonl` of an evaluation in this world."""
  rng = np.random.default_rng(seed)
  for question, kind in enumerate(rng.integers(len(KINDS), size=QUESTIONS)):
    asks, granted, refused, stored = KINDS[kind]
    for cut in range(CUTS):
      before = int(rng.random() < stored)
      attempts = rng.geometric(asks, SAMPLES)
      right = rng.random((SAMPLES, 2)) < (granted, refused)
      for attempt, (with_it, without) in zip(attempts, right.astype(int)):
        asked = attempt <= tries
        yield _end(
          f"q{question}",
          worth=int(with_it - without) if asked else None,
          tries=int(min(attempt, tries)),
        ) | {
          "budget": cut,
          "stored_em": before,
          "gain": int(with_it - before) if asked else None,
        }


def summary(tries, seed=0):
  return branch_values.summary(ends(tries, seed))["continue"]


@pytest.mark.parametrize("tries", [1, 16])
def test_estimates_are_the_truth_whatever_the_tries(tries):
  n = 60
  found = [summary(tries, seed) for seed in range(n)]
  for name in ("worth", "gain", "asks"):
    mean = np.mean([one[name]["value"] for one in found])
    assert mean == pytest.approx(TRUTH[name], abs=0.03)
  for name, value in TRUTH.items():
    held = [one[name]["low"] <= value <= one[name]["high"] for one in found]
    assert np.mean(held) > 0.95 - 4 * (0.95 * 0.05 / n) ** 0.5


def test_more_tries_narrow_the_bounds_to_the_mean_over_cuts():
  widths = []
  for tries in (1, 16, 2048):
    found = summary(tries)
    bounds = found["worth_bounds"]
    widths.append(bounds["high"] - bounds["low"])
    gap = found["gained"] - found["lost"]
    assert found["worth"]["value"] == pytest.approx(gap)
  assert widths[0] > widths[1] > widths[2]
  assert found["cuts_reached"] == found["cuts"] == QUESTIONS * CUTS
  assert bounds["low"] <= TRUTH["worth_bounds"] <= bounds["high"]


def _end(question, worth, tries):
  return {
    "question_id": question,
    "budget": 1,
    "seed": 1,
    "kind": "continue",
    "cut": 0,
    "tries": tries,
    "outcome": "answered" if worth is not None else None,
    "stored_em": 0,
    "worth": worth,
    "gain": None if worth is None else max(worth, 0),
  }


def test_a_cut_weighs_as_often_as_the_policy_asks_there():
  """By hand: a cut that always asks, one that does at a quarter of its ends."""
  rows = [
    _end(q, worth=worth if asked else None, tries=1 if asked else 2)
    for q, worth, asks in (("a", 1, 4), ("b", -1, 1), ("c", 0, 0))
    for asked in [True] * asks + [False] * (4 - asks)
  ]
  found = branch_values.summary(rows)["continue"]
  assert (found["cuts_reached"], found["cuts"]) == (2, 3)
  assert found["worth"]["value"] == pytest.approx((1 - 1 / 4) / (1 + 1 / 4))
  assert found["gain"]["value"] == pytest.approx(1 / (1 + 1 / 4))
  assert found["asks"]["value"] == pytest.approx((1 + 1 / 4 + 0) / 3)
  assert (found["gained"], found["lost"]) == (
    pytest.approx(1 / (1 + 1 / 4)),
    pytest.approx(1 / 4 / (1 + 1 / 4)),
  )


def test_a_search_at_a_later_try_has_no_weight_but_is_within_the_bounds():
  rows = [
    _end("a", worth=1, tries=1),
    _end("b", worth=-1, tries=2),
    _end("c", worth=None, tries=2),
  ]
  found = branch_values.summary(rows)["continue"]
  assert found["worth"]["value"] == 1
  assert (found["cuts_reached"], found["cuts"]) == (2, 3)
  assert found["worth_bounds"]["low"] <= -1 / 3
  assert found["worth_bounds"]["high"] >= 1 / 3


def test_failed_ends_are_counted_and_left_out():
  rows = [row | {"outcome": "failed"} for row in ends(4)]
  found = branch_values.summary(rows)["continue"]
  assert found["failed"] == found["ends"] == len(rows)
  assert found["cuts"] == 0
  assert found["worth"]["value"] is found["gained"] is None
  assert found["worth_bounds"] == {"low": None, "high": None}
