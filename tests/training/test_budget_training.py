"""Trainings whose budgets are pairs of searches and tokens, or cents alone."""

from __future__ import annotations

import dataclasses

import pytest
import scripted_runs as runs
import small_run

BASE = dataclasses.replace(
  small_run.CONFIG,
  save_every=1,
  curriculum=dataclasses.replace(small_run.CONFIG.curriculum, total_steps=6),
)
PAIRS = dataclasses.replace(
  BASE,
  curriculum=dataclasses.replace(BASE.curriculum, token_levels=(9, 16)),
  reward=dataclasses.replace(BASE.reward, abs_tokens=1.0, rel_cost="dollars"),
  evaluation=dataclasses.replace(
    BASE.evaluation, search_price=5.0, output_price=1.0
  ),
)
CENTS = dataclasses.replace(
  BASE,
  curriculum=dataclasses.replace(
    BASE.curriculum, cent_levels=(1, 6), phase1_steps=0
  ),
  reward=dataclasses.replace(BASE.reward, abs_searches=0.0, abs_dollars=1.0),
  evaluation=dataclasses.replace(BASE.evaluation, tool_prices=("search=30",)),
)


def check_levels(folder, names):
  """Checks that the levels of every group are counted."""
  for record in small_run.records(folder):
    assert sum(record[f"curriculum/{name}"] for name in names) == 4
    assert sum(record[f"curriculum/p{b}"] for b in (1, 2)) == pytest.approx(1)


def test_every_episode_is_within_caps_on_searches_and_tokens(parts, tmp_path):
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  small_run.train(whole, parts, PAIRS)
  drawn = set()
  for groups in runs.played(whole):
    for group in groups:
      for trajectory in group["trajectories"]:
        cap = trajectory["caps"]["tokens"]
        drawn.add((group["budget"], cap))
        assert trajectory["generated_tokens"] <= cap
        assert trajectory["searches"] <= group["budget"]
  assert drawn >= {(2, 16), (1, 9)} and len(drawn) > 2
  check_levels(whole, ("tokens9", "tokens16"))
  small_run.train(killed, parts, PAIRS, rollouts=2)
  small_run.train(killed, parts, PAIRS)
  small_run.assert_same_bits(killed, whole)
  assert list(runs.played(whole)) == list(runs.played(killed))


def test_every_group_has_a_cap_in_cents_and_no_other(parts, tmp_path):
  small_run.train(tmp_path, parts, CENTS)
  drawn = set()
  for groups in runs.played(tmp_path):
    for group in groups:
      for trajectory in group["trajectories"]:
        caps = trajectory["caps"]
        drawn.add(caps["dollars"])
        assert "tokens" not in caps
        assert caps["prices"]["tools"] == [["search", 30.0]]
  assert drawn == {0.01, 0.06}
  check_levels(tmp_path, ("count1", "count2"))
