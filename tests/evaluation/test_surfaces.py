"""Accuracy over pairs of caps, beside loops over episodes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import study

from anysearch_jax.evaluation import columns, curves

SEARCHES, TOKENS = (1, 2, 5), (40, 80, 160)


def episodes(pairs, *, questions=30):
  """Returns episodes under pairs of caps, each with its `caps`."""
  return [
    episode | {"caps": {"tokens": tokens}}
    for searches, tokens in pairs
    for episode in study.row(
      f"A{tokens}", budgets=(searches,), questions=questions
    ).episodes
  ]


GRID = [(b, t) for b in SEARCHES for t in TOKENS]
PLAYED = episodes(GRID)


def accuracy(pair):
  scored = [
    e["em"]
    for e in PLAYED
    if (e["budget"], e["caps"]["tokens"]) == pair and e["outcome"] != "failed"
  ]
  return sum(scored) / len(scored)


def test_cells_are_means_over_their_episodes():
  found = curves.surface("A", PLAYED)
  assert [(c.searches, c.tokens) for c in found.cells] == GRID
  for cell in found.cells:
    pair = cell.searches, cell.tokens
    here = [
      e
      for e in PLAYED
      if (e["budget"], e["caps"]["tokens"]) == pair and e["outcome"] != "failed"
    ]
    assert cell.n == len(here)
    assert cell.accuracy.value == pytest.approx(accuracy(pair))
    assert cell.accuracy.low < cell.accuracy.value < cell.accuracy.high
    for name, estimate in (
      ("searches", cell.used),
      ("generated_tokens", cell.generated),
    ):
      mean = sum(e[name] for e in here) / len(here)
      assert estimate.value == pytest.approx(mean)
    kept = [e["generated_tokens"] <= cell.tokens for e in here]
    assert cell.within == pytest.approx(sum(kept) / len(here))
  assert min(c.within for c in found.cells) < 1


def test_area_is_the_integral_over_the_rectangle():
  found = curves.surface("A", PLAYED)
  whole = 0.0
  for b0, b1 in zip(SEARCHES, SEARCHES[1:]):
    for t0, t1 in zip(TOKENS, TOKENS[1:]):
      corners = [accuracy((b, t)) for b in (b0, b1) for t in (t0, t1)]
      whole += (b1 - b0) * (t1 - t0) * math.fsum(corners) / 4
  assert found.area.value == pytest.approx(whole / (4 * 120))
  assert found.area.low < found.area.value < found.area.high


def test_area_of_one_cap_that_changes_nothing_is_that_of_the_curve():
  same = [
    e | {"caps": {"tokens": t}}
    for t in (300, 900)
    for e in study.row("A", budgets=SEARCHES, questions=30).episodes
  ]
  plain = study.row("A", budgets=SEARCHES, questions=30).episodes
  area = curves.surface("A", same).area
  curve = curves.curve("A", plain, trained=5).area
  assert area.value == pytest.approx(curve.value)
  assert area.low == pytest.approx(curve.low, abs=0.01)


@pytest.mark.parametrize("pairs", [[(1, 40), (2, 80)], [(1, 40), (2, 40)]])
def test_area_of_what_is_no_grid_is_undefined(pairs):
  assert curves.surface("A", episodes(pairs)).area.value is None


def test_other_budgets_are_left_out_or_refused():
  plain = study.row("A", budgets=(1, 2), questions=30).episodes
  with pytest.raises(ValueError, match="'A': found no budget with a cap"):
    curves.surface("A", plain)
  mixed = columns.of([*PLAYED, *plain])
  assert curves.surface("A", mixed) == curves.surface("A", PLAYED)
  timed = [e | {"caps": {"tokens": 40, "seconds": 3}} for e in PLAYED[:30]]
  with pytest.raises(ValueError, match="dollars or seconds"):
    curves.surface("A", [*timed, *PLAYED[30:]])


def test_pairs_have_the_order_of_their_numbers():
  table = columns.of(episodes([(2, 1000), (2, 90), (10, 90)]))
  found = curves.surface("A", table)
  assert [(c.searches, c.tokens) for c in found.cells] == [
    (2, 90),
    (2, 1000),
    (10, 90),
  ]
  assert np.isfinite(table.token_cap).all()
