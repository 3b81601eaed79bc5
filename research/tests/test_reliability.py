"""What AnySearch should lose by the reliability of memory, by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from research import reliability

# What trust costs at each of eight budgets, at two reliabilities.
TRUST = {0.4: np.arange(8) / 10, 0.8: np.arange(8) / 20}
SWITCH = reliability.Switch(
  rhos=np.array([0.4, 0.8]),
  by_budget=np.array([[0.5] * 4 + [0.7] * 4] * 2),
  of_all=np.array([0.6, 0.62]),
)


@pytest.mark.parametrize(
  ("rho", "alone", "chains", "budgets"),
  [
    (0.39, 0.0, 0.0, 0.0),  # Below 13 / 33, the switch point of a fact alone.
    (0.4, 0.35, 0.0, 0.0),
    # Costs are .075 a budget and step; budgets 1 to 4 are above theirs.
    (0.6, 0.2625, 0.0, (0 + 1 + 2 + 3) * 0.075 / 8),
    (0.8, 0.175, 0.175, 0.175),
  ],
)
def test_a_loss_is_that_of_trust_above_a_switch_point(
  rho, alone, chains, budgets
):
  found = reliability.predicted(TRUST, SWITCH, rho)
  np.testing.assert_allclose(found, (alone, chains, budgets))


def test_switch_points_are_those_of_the_file(tmp_path):
  path = tmp_path / "switches.json"
  stored = {
    f"start-{rho}": {
      "by_budget": {str(b): float(rho) / b for b in reliability.BUDGETS},
      "of_all": float(rho),
    }
    for rho in reliability.RHOS
  }
  path.write_text(json.dumps(stored))
  by_budget, of_all = reliability.switch_of_chains(path).at(0.525)
  np.testing.assert_allclose(by_budget, 0.525 / np.arange(1, 9))
  assert of_all == pytest.approx(0.525)


def test_the_shipped_file_has_every_world():
  switch = reliability.switch_of_chains()
  assert switch.by_budget.shape == (len(reliability.RHOS), 8)
  assert np.all((0 < switch.by_budget) & (switch.by_budget < 1))
