"""The rewards of the shipped systems, by tables made by hand."""

from __future__ import annotations

import pytest
import reward_tables

from anysearch_jax.methods import systems

VARIANT = {"format_variant": True, "retrieval": 0.1}
# Of each system: constants, columns (outcomes or measures), rows whose last
# number is the reward.
TABLES = {
  "search_r1": ({}, "em format", [(1, 1, 1), (1, 0, 1), (0, 1, 0), (0, 0, 0)]),
  "search_r1 variant": (
    VARIANT,
    "em format answered gold_found",
    [
      *((1, 1, 1, 0, 1.0), (1, 1, 1, 1, 1.0), (1, 0, 1, 1, 0.8)),
      *((0, 1, 1, 1, 0.3), (0, 1, 1, 0, 0.2), (0, 0, 1, 1, 0.1)),
      *((0, 0, 1, 0, 0.1), (0, 0, 0, 1, 0.0), (0, 0, 0, 0, 0.0)),
    ],
  ),
  "stepsearch": (
    {},
    "f1 answered search_keys",
    [(1, 1, 0.5, 1.309), (0.5, 1, 1, 1.118), (0, 1, 0, 0), (0, 0, 1, -1)],
  ),
  "zerosearch": ({}, "f1", [(1, 1), (0.4, 0.4), (0, 0)]),
}


def test_every_trained_system_has_a_table():
  known = {key.split()[0] for key in TABLES} | {"anysearch"}
  assert known == {n for n, m in systems.METHODS.items() if m.reward}


@pytest.mark.parametrize("case", TABLES)
def test_rewards_equal_their_table(case):
  reward_tables.assert_equals(systems.get(case.split()[0]), *TABLES[case])


@pytest.mark.parametrize("case", TABLES)
def test_failed_episodes_have_no_reward_and_change_none(case):
  changes, columns, _ = TABLES[case]
  reward_tables.drawn(systems.get(case.split()[0]), changes, columns)
