"""The value of a search in a scripted world whose truth is known.

Where the policy often asks, searching corrects its answers; where it seldom
asks, searching spoils them. `research.search_value` runs more.
"""

from __future__ import annotations

import numpy as np
import pytest

from research import branch_values, search_value

SIZE = search_value.Size(questions=80)
TRUTH = search_value.truth()


def summary(tries, seed=0, size=SIZE):
  rng = np.random.default_rng(seed)
  rows = search_value.ends(size, tries, rng)
  return branch_values.summary(rows)["continue"]


def test_the_truth_of_the_scripted_world():
  """By hand, over four kinds of equal frequency."""
  worth = 0.9 * 0.5 + 0.4 * 0.3 - 0.05 * 0.15 - 0.01 * 0.4
  assert TRUTH["worth"] == pytest.approx(worth / (0.9 + 0.4 + 0.05 + 0.01))
  assert TRUTH["worth_bounds"] == pytest.approx((0.5 + 0.3 - 0.15 - 0.4) / 4)


@pytest.mark.parametrize("tries", search_value.TRIES)
def test_estimates_are_the_truth_whatever_the_tries(tries):
  n = 60
  found = search_value.measured(SIZE, tries, n)
  for name in ("worth", "gain", "asks"):
    assert found[name] == pytest.approx(TRUTH[name], abs=0.03)
  for name in TRUTH:
    assert found[f"{name}, held"] > 0.95 - 4 * (0.95 * 0.05 / n) ** 0.5


def test_the_mean_of_reached_cuts_depends_on_the_tries():
  """Which is why it is not reported."""
  found = [
    search_value.measured(SIZE, tries, 10)["reached"] for tries in (1, 64)
  ]
  assert found[0] - found[1] > 0.15


def test_more_tries_narrow_the_bounds_to_the_mean_over_cuts():
  widths = []
  for tries in (1, 16, 2048):
    found = summary(tries)
    bounds = found["worth_bounds"]
    widths.append(bounds["high"] - bounds["low"])
  assert widths[0] > widths[1] > widths[2]
  assert found["cuts_reached"] == found["cuts"] == SIZE.questions * SIZE.cuts
  assert bounds["low"] <= TRUTH["worth_bounds"] <= bounds["high"]


def test_worth_is_the_gained_share_minus_the_lost_one():
  found = summary(4)
  gap = found["gained"] - found["lost"]
  assert found["worth"]["value"] == pytest.approx(gap)


def _end(question, worth, tries):
  return {
    "question_id": question,
    "budget": 1,
    "seed": 1,
    "kind": "continue",
    "cut": 0,
    "hops": None,
    "budget_left": 1,
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
  rng = np.random.default_rng(0)
  rows = [
    row | {"outcome": "failed"} for row in search_value.ends(SIZE, 4, rng)
  ]
  found = branch_values.summary(rows)["continue"]
  assert found["failed"] == found["ends"] == len(rows)
  assert found["cuts"] == 0
  assert found["worth"]["value"] is found["gained"] is None
  assert found["worth_bounds"] == {"low": None, "high": None}
